"""The check that each machine of a cluster has what the run needs, made before a worker starts there.

One task on each machine tells what it finds: the sources of this package, versions, the run's folder, model folders. What is
not as on the controller's machine would train something else without a word, or fail hours later.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_rl.errors import ClusterError
from grpo_rl.source_code import sources

PACKAGES = ("ray", "torch", "transformers", "vllm")
SEEN_S = 5.0
"""Seconds that a shared file system may take to show a file to another machine."""
ANSWER_S = 45.0
"""Seconds that a machine may take to answer: a process of Ray's has to start there."""
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a machine has."""

    name: str
    versions: Mapping[str, str]
    code: Mapping[str, str]
    """The SHA-256 of each source file, by its name."""
    lacks: frozenset[str] = frozenset()
    """Those of the files and folders asked for that are not there."""


def look(own_files: Sequence[str], paths: Sequence[str], seen_s: float = SEEN_S) -> Found:
    """Return what this machine has: its versions, its code with the user's `own_files`, and which of `paths` it lacks."""
    until = time.monotonic() + seen_s
    while (lacks := [path for path in paths if not _is_there(Path(path))]) and time.monotonic() < until:
        time.sleep(0.2)
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {package: _version(package) for package in PACKAGES}
    return Found(socket.gethostname(), versions, sources(own_files), frozenset(lacks))


def differences(machine: str, theirs: Found, ours: Found, needed: Mapping[str, str]) -> Iterator[str]:
    """Yield what keeps `machine` from taking part, a line each. `needed` says what each path is for."""
    for package, version in ours.versions.items():
        if theirs.versions.get(package) != version:
            found = theirs.versions.get(package, "none")
            yield (
                f"{machine} has {package} {found}, and the controller's machine ({ours.name}) {version}: "
                "bash scripts/setup.sh cluster, or the same image, on every machine"
            )
    differing = sorted(name for name in {**ours.code, **theirs.code} if ours.code.get(name) != theirs.code.get(name))
    if differing:
        first = f"{differing[0]} {'differs' if differing[0] in theirs.code else 'is not there'}"
        more = f", and so it is with {len(differing) - 1} more" if len(differing) > 1 else ""
        yield (
            f"{machine} has other code than the controller's machine ({ours.name}): {first}{more}; copy the same code to every "
            "machine, or send it along with scripts/submit.sh"
        )
    for path, what in needed.items():
        if path in theirs.lacks:
            yield f"{machine} does not see {path}, {what}"


def check(nodes: Iterable[str], run_folder: Path, own_files: Sequence[str], models: Mapping[str, str]) -> None:
    """Look at the machines with these ids of Ray's. Raises ClusterError naming each that does not have what the run needs.

    `own_files` are files of the user's that workers import; `models` the folders that they read, with the setting of each.
    """
    with _marker(run_folder) as marker:
        needed = {
            str(marker): "which the run has written: trainer.default_local_dir must be on storage that all machines share"
        }
        needed |= {path: f"{key}: copy it there, to the same path" for path, key in models.items() if _is_there(Path(path))}
        ours = look(own_files, ())
        known = {node["NodeID"]: f"the machine {node['NodeManagerAddress']}" for node in ray.nodes()}
        asked = {node: _look_on(node, own_files, list(needed)) for node in nodes}
        problems: list[str] = []
        until = time.monotonic() + ANSWER_S
        for node, answer in asked.items():
            machine = known.get(node, f"the node {node}")
            try:
                theirs: Found = ray.get(answer, timeout=max(PATIENCE_S, until - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                problems.append(
                    f"{machine} did not start a process within {ANSWER_S:.0f} s: is it overloaded, or out of reach?"
                )
            except ray.exceptions.RayError as error:
                problems.append(f"{machine} cannot run this program: {_reason(error)}; bash scripts/setup.sh cluster there")
            else:
                problems += differences(f"{machine} ({theirs.name})", theirs, ours, needed)
    if problems:
        raise ClusterError("\n  ".join(problems))


def _look_on(node: str, own_files: Sequence[str], paths: Sequence[str]) -> ray.ObjectRef:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(own_files, paths)


@contextmanager
def _marker(folder: Path) -> Iterator[Path]:
    """Yield a file with a new name in this folder: no file system has remembered that it was not there."""
    marker = folder / f".seen_{secrets.token_hex(4)}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _version(package: str) -> str:
    # vLLM's build for CPUs is a package of another name.
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _reason(error: Exception) -> str:
    """Return the last line of the error's text that names a missing module, or else its last line at all."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "ModuleNotFoundError" in line), lines[-1])
