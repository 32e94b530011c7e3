"""A checkpoint's manifest: its files with size and SHA-256, and the check that they are the ones written.

Files that were wrong when written, or changed together with the manifest, are found by reading them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_rl.checkpoint import files
from grpo_rl.checkpoint.files import Files, entry_of
from grpo_rl.errors import CheckpointError, DataError
from grpo_rl.frozen import frozen
from grpo_rl.run_files import parsed, read_bytes

MANIFEST = "manifest.json"
STATE = "trainer.json"
TRAINING = "training.json"
"""Says how many ranks wrote their files."""
FORMAT = 1
_MOST_BYTES = 64 << 20
"""A manifest has some hundred bytes per file."""
_MOST_JSON_BYTES = 1 << 30
"""A trainer's state of a hundred million rows' pass rates stays below."""
_RANK_FILE = re.compile(r"(weights|optimizer|rng)_rank(0|[1-9][0-9]{0,8})\.safetensors")
_NAME = re.compile(r"step_(0|[1-9][0-9]{0,11})")


@frozen
class Checkpoint:
    """A checkpoint of which every file was found to be as it was written."""

    folder: Path
    step: int
    state: dict[str, Any]


@frozen
class Manifest:
    step: int
    files: Files
    seal: str


def step_of(name: str) -> int | None:
    """The step in a name of ours, without leading zeros; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, step: int, entries: Files) -> None:
    """It carries a digest of itself, for a lost line."""
    content = {"format": FORMAT, "step": step, "files": {name: list(entry) for name, entry in sorted(entries.items())}}
    text = json.dumps(content | {"sha256": _seal(content)}, indent=1)
    files.write_file(folder / MANIFEST, [text.encode()])


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if it is not whole; no other file is touched."""
    try:
        content = parsed(read_bytes(folder / MANIFEST, _MOST_BYTES).decode("utf-8"))
        seal = content.pop("sha256")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, this program reads {FORMAT}")
        if seal != _seal(content):
            raise ValueError("it is not as it was written")
        entries: Files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        return Manifest(int(content["step"]), entries, seal)
    except (DataError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint: its {MANIFEST} cannot be read ({_reason(error)})") from error


def verify(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` after reading every file.

    Raises CheckpointError naming the first file that is missing, changed or unknown, or field or tensor that
    cannot be used. Nothing outside the folder is read, whatever the manifest names.
    """
    manifest = read_manifest(folder)
    if step_of(folder.name) not in (None, manifest.step):
        raise CheckpointError(f"{folder} is the checkpoint of step {manifest.step} under another name")
    present = dict(files.walk(folder))
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            if name not in present or path.is_symlink():
                reason = "is a link, or outside of the folder" if os.path.lexists(path) else "is missing"
                raise CheckpointError(f"{folder}: {name!r} {reason}")
            if path.lstat().st_size != entry[0] or entry_of(path) != entry:
                raise CheckpointError(f"{folder}: {name} is not the file that was written (size or SHA-256 differs)")
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {_reason(error)}") from error
    extra = unknown_files(folder, manifest)
    if extra:
        raise CheckpointError(f"{folder}: {extra[0]} is in it and not in its {MANIFEST}; move what does not belong there")
    if STATE not in manifest.files:
        raise CheckpointError(f"{folder}: {STATE} is missing")
    state = _read_object(folder, STATE)
    if state.get("step", manifest.step) != manifest.step:
        raise CheckpointError(f"{folder}: {STATE} is of step {state['step']!r}, the checkpoint of step {manifest.step}")
    of_ranks: dict[str, set[str]] = defaultdict(set)
    for name in manifest.files:
        place, _, file_name = name.rpartition("/")
        if _RANK_FILE.fullmatch(file_name):
            of_ranks[place].add(file_name)
            _check_tensors(folder, name)
    for place, file_names in of_ranks.items():
        _check_ranks(folder / place, file_names)
    return Checkpoint(folder, manifest.step, state)


def unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names in the folder that this program did not write."""
    known = set(manifest.files) | {MANIFEST}
    folders = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    return [name for name, is_folder in files.walk(folder) if name not in (folders if is_folder else known)]


@contextmanager
def _usable(folder: Path, name: str) -> Iterator[None]:
    """Make a CheckpointError of whatever keeps a file from being used."""
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {name} cannot be used: it is no safetensors file ({error})") from error
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; nesting without end is a RecursionError.
    except (DataError, OSError, ValueError, RecursionError) as error:
        reason = "its nesting is too deep" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{folder}: {name} cannot be used: {reason}") from error


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    with _usable(folder, name):
        content = json.loads(read_bytes(folder / name, _MOST_JSON_BYTES).decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} where an object belongs")
    return content


def _check_ranks(folder: Path, present: Set[str]) -> None:
    if not (folder / TRAINING).is_file():
        raise CheckpointError(f"{folder}: {TRAINING} is missing")
    training = _read_object(folder, TRAINING)
    for name, least in (("world_size", 1), ("num_optimizer_steps", 0)):
        if not isinstance(training.get(name), int) or training[name] < least:
            raise CheckpointError(f"{folder}: {TRAINING} cannot be used: its field {name} is {training.get(name)!r}")
    kinds = ("weights",) if training.get("frozen") else ("weights", "optimizer", "rng")
    world_size = training["world_size"]
    # A number of ranks that is far too large is not counted to its end.
    expected = {f"{kind}_rank{rank}.safetensors" for kind in kinds for rank in range(min(world_size, len(present) + 1))}
    if missing := expected - present:
        raise CheckpointError(f"{folder}: {min(missing)} is missing: {world_size} ranks wrote the checkpoint")
    if extra := present - expected:
        raise CheckpointError(f"{folder}: {min(extra)} is of a rank beyond the {world_size} that wrote it")


def _check_tensors(folder: Path, name: str) -> None:
    """Raise CheckpointError if a file is not in the safetensors format, or a value is not finite."""
    with _usable(folder, name), safe_open(folder / name, framework="pt") as file:
        try:
            layout = json.loads((file.metadata() or {}).get("layout", "null"))
        except ValueError as error:
            raise ValueError(f"its layout is not JSON: {error}") from error
        keys = sorted(file.keys())
        if not isinstance(layout, dict) or sorted(layout) != keys:
            raise ValueError("its layout does not list its tensors")
        for key in keys:
            tensor = file.get_tensor(key)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{key} has values that are not finite")


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
