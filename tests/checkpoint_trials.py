"""Ways to break a save and a checkpoint: a process that dies, or a disk that fails, at any call; damage of every kind.

A library for the tests of checkpoints.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from grpo_rl.checkpoint import files, manifest
from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.manifest import MANIFEST, Checkpoint
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.checkpoint.tensors import Part, write_parts
from grpo_rl.errors import CheckpointError

# ---- a checkpoint to break -------------------------------------------------------------------------------------


def write_state(folder: Path, value: int, shards: int = 2) -> Files:
    """Write what the ranks of a worker group would write for a state that is nothing but `value`, and a file of a library's."""
    entries = {}
    for rank in range(shards):
        for kind in ("weights", "optimizer"):
            tensor = torch.full((2, 8), float(value * 10 + rank))
            path = folder / f"{kind}_rank{rank}.safetensors"
            entries[path.name] = write_parts(path, {f"layer.{kind}": Part(tensor, 2 * rank, (2 * shards, 8))})
        path = folder / f"rng_rank{rank}.safetensors"
        entries[path.name] = write_parts(
            path, {"rng_cpu": Part(torch.full((64,), (value * 10 + rank) % 256, dtype=torch.uint8), 0, (64,))}
        )
    text = json.dumps({"num_optimizer_steps": value, "world_size": shards})
    entries["training.json"] = files.write_file(folder / "training.json", [text.encode()])
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text(json.dumps({"value": value}))
    return entries


def save(store: CheckpointStore, step: int, value: int | None = None, shards: int = 2) -> Path:
    value = step if value is None else value
    return save_with(store, step, lambda folder: write_state(folder, value, shards), {"step": step, "value": value})


def save_with(
    store: CheckpointStore, step: int, write: Callable[[Path], Files | None], state: dict[str, Any], needed: int = 0
) -> Path:
    """Save as a run does (`trainer.saving`), in one call: `write` fills the folder."""
    draft = store.begin(step, state, needed)
    with store.writing(draft):
        replaced = store.publish(draft, write(draft.folder) or {})
    store.clear(step, replaced)
    return store.folder / f"step_{step}"


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint beside its manifest."""
    return {name: (folder / name).read_bytes() for name, is_folder in files.walk(folder) if not is_folder and name != MANIFEST}


# ---- crashes ---------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here: nothing catches it, and nothing that comes later happens."""


@dataclass
class Disk:
    """The calls that the disk has had, and those that a power cut would undo."""

    calls: list[str] = field(default_factory=list)
    committed: bool = False
    """The rename that makes a checkpoint of the draft has been made."""
    _unwritten: set[Path] = field(default_factory=set)
    _unnamed: set[Path] = field(default_factory=set)
    _renamed: list[tuple[Path, Path]] = field(default_factory=list)

    def note(self, call: str, path: Path) -> None:
        if call == "write":
            self._unwritten.add(path)
        elif call == "open":
            self._unnamed.add(path)
        elif call == "fsync":
            self._unwritten.discard(path)
            self._unnamed = {other for other in self._unnamed if other.parent != path}
            self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]

    def renamed(self, source: Path, target: Path) -> None:
        self.committed = self.committed or source.name.startswith(".writing_")
        self._renamed.append((source, target))

    def cut_power(self) -> None:
        """Lose what was not flushed: the ends of files, the names of new files, new names of folders."""
        for path in self._unwritten:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for path in self._unnamed:
            path.unlink(missing_ok=True)
        for source, target in reversed(self._renamed):
            if target.exists() and not source.exists():
                target.rename(source)
                self.committed = self.committed and not source.name.startswith(".writing_")


@contextmanager
def breaking(at: int | None = None, error: BaseException | None = None) -> Iterator[Disk]:
    """Call number `at` (from 0) of those that change the disk is not made: the process dies there, or `error` is raised, once."""
    disk = Disk()
    rename = files.rename

    def point(call: str, path: Path) -> None:
        number = len(disk.calls)
        disk.calls.append(call)
        if at is not None and error is None and number >= at:
            raise Crash
        if number == at and error is not None:
            raise error
        disk.note(call, path)

    def noted_rename(source: Path, target: Path) -> None:
        rename(source, target)
        disk.renamed(source, target)

    with ExitStack() as stack:
        stack.enter_context(patch.object(files, "_point", point))
        stack.enter_context(patch.object(files, "rename", noted_rename))
        # What a power cut loses is played here: nothing is gained by waiting for the real disk.
        stack.enter_context(patch.object(os, "fsync", lambda _: None))
        yield disk


@dataclass(frozen=True)
class Scene:
    """A save to break off: what was saved before, what is saved, by how many ranks."""

    before: tuple[int, ...]
    step: int
    shards: int = 2
    keep: int | None = None


SCENES = [
    Scene((), 1),
    *(Scene((1,), 2, shards) for shards in (1, 2, 3, 4)),
    Scene((1, 2), 2),
    Scene((1, 2), 3, keep=1),
    Scene((1, 2, 3), 4, keep=2),
]
_AGAIN = 90


def break_save(folder: Path, scene: Scene, at: int | None, *, power_cut: bool = False) -> int:
    """Break off the scene's save at a call, start again, and check all that is promised. The number of calls made.

    Raises AssertionError if something is not as promised.
    """
    with breaking():
        store = CheckpointStore(folder, scene.keep)
        for step in scene.before:
            save(store, step, shards=scene.shards)
    returned = False
    with breaking(at) as disk, suppress(Crash):
        save(store, scene.step, _AGAIN, scene.shards)
        returned = True
    if power_cut:
        disk.cut_power()
    expected = _AGAIN if disk.committed or returned else max(scene.before, default=None)
    with breaking():
        check_recovery(folder, scene, expected)
    return len(disk.calls)


def check_recovery(folder: Path, scene: Scene, expected: int | None) -> None:
    """A new process finds the state `expected`, nothing half done, and can save."""
    told: list[str] = []
    after = CheckpointStore(folder, scene.keep)
    latest = after.latest(told.append)
    assert told == [], "what was never committed is nothing to warn of"
    assert (None if latest is None else latest.state["value"]) == expected
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if not name.startswith("step_")], f"left behind: {names}"
    if latest is not None:
        assert_state(latest, scene.shards)
    save(after, scene.step + 1, shards=scene.shards)
    following = CheckpointStore(folder).latest(told.append)
    assert following is not None and following.step == scene.step + 1 and told == []
    if scene.keep is not None:
        assert len(after.steps()) == scene.keep
    else:
        assert set(scene.before) <= set(after.steps())


def assert_state(checkpoint: Checkpoint, shards: int) -> None:
    """Every file of the checkpoint holds the value that its state names."""
    value = checkpoint.state["value"]
    for rank in range(shards):
        raw = (checkpoint.folder / f"optimizer_rank{rank}.safetensors").read_bytes()[-64:]
        assert torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() == [value * 10.0 + rank] * 16
    assert json.loads((checkpoint.folder / "huggingface" / "config.json").read_text()) == {"value": value}


# ---- damage ----------------------------------------------------------------------------------------------------

Damage = Callable[[Path, random.Random], Any]


def _file(folder: Path, rng: random.Random, among: str = "*") -> Path:
    return rng.choice(sorted(path for path in folder.rglob(among) if path.is_file()))


def _truncate(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    os.truncate(path, path.stat().st_size - 1)


def _flip(among: str) -> Damage:
    def damage(folder: Path, rng: random.Random) -> None:
        path = _file(folder, rng, among)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    return damage


def _edit(change: Callable[[dict[str, Any], random.Random, Path], Any], *, sealed: bool) -> Damage:
    """Edit the manifest; `sealed` as somebody would who knows how."""

    def damage(folder: Path, rng: random.Random) -> None:
        found = json.loads((folder / MANIFEST).read_text())
        seal = found.pop("sha256")
        change(found, rng, folder)
        seal = manifest._seal(found) if sealed else seal
        (folder / MANIFEST).write_text(json.dumps(found | {"sha256": seal}))

    return damage


def _rename_entry(name: str) -> Callable[[dict[str, Any], random.Random, Path], None]:
    """The manifest names a file outside, with the size and the digest that the file there really has."""

    def change(found: dict[str, Any], rng: random.Random, folder: Path) -> None:
        old = rng.choice(sorted(found["files"]))
        shutil.copy(folder / old, folder.parent / "outside.bin")
        (folder / old).unlink()
        found["files"][name] = found["files"].pop(old)

    return change


def _drop_entry(found: dict[str, Any], rng: random.Random, folder: Path) -> None:
    name = rng.choice(sorted(found["files"]))
    del found["files"][name]
    (folder / name).unlink()


def _change_digest(found: dict[str, Any], rng: random.Random, folder: Path) -> None:
    """The digest of something else, put there with it."""
    name = rng.choice(sorted(found["files"]))
    (folder / name).write_bytes(bytes(rng.randrange(256) for _ in range(found["files"][name][0])))
    found["files"][name][1] = files.entry_of(folder / name)[1]


def _from_other_step(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng, "*.safetensors")
    shutil.copy(rng.choice(_others(folder)) / path.name, path)


def _other_step(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder)
    shutil.copytree(rng.choice(_others(folder)), folder)


def _others(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.parent.glob("step_*")) if manifest.step_of(path.name) is not None and path != folder]


def _link_file(folder: Path, rng: random.Random) -> None:
    path = _file(folder, rng)
    path.rename(folder.parent / "outside.bin")
    path.symlink_to(folder.parent / "outside.bin")


def _link_folder(folder: Path, rng: random.Random) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def _link_inner_folder(folder: Path, rng: random.Random) -> None:
    shutil.move(folder / "huggingface", folder.parent / "elsewhere")
    (folder / "huggingface").symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def _special(make: Callable[[Path], Any]) -> Damage:
    def damage(folder: Path, rng: random.Random) -> None:
        path = _file(folder, rng)
        path.unlink()
        make(path)

    return damage


class _Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


CANARY = "canary"


def _pickle(folder: Path, rng: random.Random) -> None:
    _file(folder, rng).write_bytes(pickle.dumps(_Canary(folder.parent / CANARY)))


DAMAGE: dict[str, Damage] = {
    "one byte short": _truncate,
    "a bit of the manifest": _flip(MANIFEST),
    "a bit anywhere": _flip("*"),
    "a file is gone": lambda folder, rng: _file(folder, rng).unlink(),
    "the manifest is gone": lambda folder, _: (folder / MANIFEST).unlink(),
    "an extra file": lambda folder, _: (folder / "weights.pt").write_bytes(b"x"),
    "an extra folder": lambda folder, _: (folder / "critic").mkdir(),
    "a file of another step": _from_other_step,
    "another step's whole folder": _other_step,
    "manifest: a line dropped with its file": _edit(_drop_entry, sealed=False),
    "manifest: another digest, of other bytes": _edit(_change_digest, sealed=False),
    "manifest: another step": _edit(lambda found, *_: found.update(step=found["step"] + 1), sealed=True),
    "manifest: another format": _edit(lambda found, *_: found.update(format=2), sealed=True),
    "manifest: leads out": _edit(_rename_entry("../outside.bin"), sealed=True),
    "manifest: NUL in a name": _edit(_rename_entry("a\0b"), sealed=True),
    "manifest: nested without end": lambda folder, _: (folder / MANIFEST).write_text("[" * 100_000),
    "manifest: no text": lambda folder, _: (folder / MANIFEST).write_bytes(b"\xff\xfe\xfa"),
    "manifest: files twice": lambda folder, _: (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().rstrip("}\n") + ', "files": {}}'
    ),
    "a link in place of a file": _link_file,
    "a link in place of the folder": _link_folder,
    "a link in place of an inner folder": _link_inner_folder,
    "a pipe in place of a file": _special(os.mkfifo),
    "a pickle in place of a file": _pickle,
    "a copy as step_99": lambda folder, _: shutil.copytree(folder, folder.parent / "step_99"),
}


HARMLESS = ("a copy as step_99",)


def check_damage(run: Path, name: str, seed: int) -> None:
    """Damage the newest of three checkpoints (every third time all of them): a start as a run's never takes what was damaged."""
    rng, told = random.Random(seed), list[str]()
    with breaking():
        for step in (1, 2, 3):
            save(CheckpointStore(run), step)
    contents = {step: content(run / f"step_{step}") for step in (1, 2, 3)}
    alone = name in (*HARMLESS, "another step's whole folder")
    for step in [3] if alone or rng.randrange(3) else [3, 2, 1]:
        (run / "outside.bin").unlink(missing_ok=True)
        if not (run / "elsewhere").exists():
            DAMAGE[name](run / f"step_{step}", rng)
    try:
        found = CheckpointStore(run).latest(told.append)
    except CheckpointError:
        assert told, "refused without naming one"
        return
    assert not (run / CANARY).exists(), "a pickle was read"
    assert found is not None and found.state == {"step": found.step, "value": found.step}
    assert content(found.folder) == contents[found.step], "it is not what was written"
    assert (found.step == 3) == (name in HARMLESS) and len(told) >= 3 - found.step
