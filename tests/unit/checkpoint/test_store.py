"""Checkpoints are complete or not there, verified before use, and a crash at any point leaves the earlier one."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.checkpoint.store import MANIFEST, CheckpointStore, verify
from grpo_rl.errors import CheckpointError


def content(step: int) -> Callable[[Path], None]:
    """What a worker group would write: files, one of them in a folder of its own."""

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(bytes([step]) * 1000)
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text(f'{{"step": {step}}}')

    return write


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, content(step), {"step": step})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def refuse(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


# ---- writing and finding ----------------------------------------------------------------------------


def test_what_was_saved_is_found_with_its_files_and_its_state(store):
    folder = save(store, 7)
    assert folder == store.folder / "step_7" == store.latest(refuse)
    assert verify(folder) == {"step": 7}
    assert (folder / "weights.bin").read_bytes() == bytes([7]) * 1000
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == {"weights.bin", "hf/config.json", "trainer.json"}
    assert names(store) == ["step_7"]


def test_without_checkpoints_there_is_no_latest(store):
    assert store.latest(refuse) is None and store.steps() == []
    store.folder.mkdir()
    assert store.latest(refuse) is None


def test_the_newest_is_the_one_of_the_highest_step_and_not_of_the_highest_name(store):
    for step in (9, 10, 2):
        save(store, step)
    assert store.steps() == [2, 9, 10]
    assert store.latest(refuse) == store.folder / "step_10"


def test_other_things_in_the_folder_are_no_checkpoints(store):
    save(store, 1)
    (store.folder / "step_5").mkdir()
    (store.folder / "step_6").write_text("a file")
    for name in ("step_x", "best", "step_07"):
        shutil.copytree(store.folder / "step_1", store.folder / name)
    assert store.steps() == [1]
    assert store.latest(refuse) == store.folder / "step_1"


def test_the_same_step_saved_again_takes_the_earlier_ones_place(store):
    save(store, 3)
    store.save(3, content(30), {"step": 3, "again": True})
    assert verify(store.folder / "step_3") == {"step": 3, "again": True}
    assert (store.folder / "step_3" / "weights.bin").read_bytes()[0] == 30
    assert names(store) == ["step_3"]


# ---- keeping and setting aside ----------------------------------------------------------------------


def test_only_the_newest_are_kept_and_foreign_files_stay(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    save(store, 1)
    (store.folder / "notes.txt").write_text("mine")
    shutil.copytree(store.folder / "step_1", store.folder / "step_1_best")
    for step in (2, 3, 4):
        save(store, step)
    assert names(store) == ["notes.txt", "step_1_best", "step_3", "step_4"]


def test_the_one_just_saved_is_kept_even_beside_a_later_step(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(CheckpointStore(store.folder), 10)
    save(store, 3)
    assert store.steps() == [3]


def test_later_steps_are_set_aside_without_losing_any(store):
    for step in (2, 4, 6):
        save(store, step)
    assert [path.name for path in store.set_aside_after(2)] == ["aside_1_step_4", "aside_1_step_6"]
    assert store.steps() == [2]
    save(store, 4)
    assert [path.name for path in store.set_aside_after(2)] == ["aside_2_step_4"]
    assert names(store) == ["aside_1_step_4", "aside_1_step_6", "aside_2_step_4", "step_2"]
    assert verify(store.folder / "aside_1_step_6") == {"step": 6}


# ---- damage ------------------------------------------------------------------------------------------


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[500] ^= 1
    (folder / "weights.bin").write_bytes(data)


def edit_manifest(name: str) -> Callable[[Path], None]:
    """The manifest names another file, with the size and the digest that the file really has."""

    def edit(folder: Path) -> None:
        (folder.parent / "outside.bin").write_bytes((folder / "weights.bin").read_bytes())
        manifest = json.loads((folder / MANIFEST).read_text())
        name_there = name.replace("PARENT", str(folder.parent))
        manifest["files"][name_there] = manifest["files"].pop("weights.bin")
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return edit


def link_outside(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "outside.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "outside.bin")


def write_manifest(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_text(text) and None


def drop_state(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"]["trainer.json"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGE = {
    "a flipped bit": (flip_a_bit, "weights.bin is not the file that was written"),
    "a file cut short": (lambda f: os.truncate(f / "weights.bin", 999), "weights.bin is not the file that was written"),
    "a file that grew": (lambda f: os.truncate(f / "weights.bin", 1001), "weights.bin is not the file that was written"),
    "a missing file": (lambda f: (f / "weights.bin").unlink(), "weights.bin is missing"),
    "a missing file in a folder": (lambda f: shutil.rmtree(f / "hf"), "hf/config.json is missing"),
    "a folder in place of a file": (
        lambda f: ((f / "weights.bin").unlink(), (f / "weights.bin").mkdir()),
        "weights.bin is missing",
    ),
    "a manifest leading out": (edit_manifest("../outside.bin"), "which is outside the folder"),
    "a manifest leading out by a detour": (edit_manifest("hf/../../outside.bin"), "which is outside the folder"),
    "an absolute name in the manifest": (edit_manifest("PARENT/outside.bin"), "which is outside the folder"),
    "a NUL byte in the manifest": (edit_manifest("a\0b"), "which is outside the folder"),
    "a link leading out": (link_outside, "which is outside the folder"),
    "an empty manifest": (write_manifest(""), "cannot be read"),
    "a manifest that is a list": (write_manifest("[]"), "cannot be read"),
    "a manifest of another form": (write_manifest('{"files": {"weights.bin": 3}}'), "cannot be read"),
    "a manifest in no text encoding": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\xfa"), "cannot be read"),
    "a manifest without the controller's state": (drop_state, "trainer.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_taken(store, damage):
    save(store, 1)
    save(store, 2)
    harm, message = DAMAGE[damage]
    harm(store.folder / "step_2")
    with pytest.raises(CheckpointError) as caught:
        verify(store.folder / "step_2")
    assert message in str(caught.value) and str(store.folder / "step_2") in str(caught.value)
    told: list[str] = []
    assert store.latest(told.append) == store.folder / "step_1"
    assert told == [str(caught.value)]


def test_each_damaged_one_is_told_of_once_and_older_ones_are_not_looked_at(store):
    for step in range(1, 6):
        save(store, step)
    for step in (1, 4, 5):
        flip_a_bit(store.folder / f"step_{step}")
    told: list[str] = []
    assert store.latest(told.append) == store.folder / "step_3"
    assert [f"step_{step}" in message for step, message in zip((5, 4), told, strict=True)] == [True, True]


def test_when_all_are_damaged_nothing_is_started_silently(store):
    for step in (1, 2):
        save(store, step)
        flip_a_bit(store.folder / f"step_{step}")
    told: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is intact; .*resume_mode=disable"):
        store.latest(told.append)
    assert len(told) == 2


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a checkpoint: its manifest.json cannot be read"):
        verify(tmp_path)


# ---- crashes -----------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here: nothing catches it, and nothing that comes later happens."""


# Everything that changes the disk goes through one of these.
STEPS = [(os, "mkdir"), (os, "rename"), (os, "fsync"), (os, "open"), (os, "unlink"), (os, "rmdir"), (io, "open")]


@contextmanager
def failing_from(call: int, error: BaseException, only_once: bool) -> Iterator[list[str]]:
    """The `call`-th of these calls (from 0) raises instead of working, and so do all later ones unless `only_once`."""
    log: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            if len(log) - 1 == call or (len(log) > call and not only_once):
                raise error
            return real(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for module, name in STEPS:
            patch.setattr(module, name, wrap(f"{module.__name__}.{name}", getattr(module, name)))
        yield log


def num_calls(tmp_path: Path, saved_before: list[int], step: int) -> int:
    store = CheckpointStore(tmp_path / "counting")
    for earlier in saved_before:
        save(store, earlier)
    with failing_from(10**9, Crash(), only_once=False) as log:
        save(store, step)
    assert {"os.mkdir", "os.rename", "os.fsync", "os.open", "io.open"} <= set(log)
    return len(log)


@pytest.mark.parametrize(("saved_before", "step"), [([1], 2), ([1, 2], 2)], ids=["a new step", "a step saved again"])
def test_a_crash_at_any_call_of_save_leaves_an_intact_checkpoint_and_the_next_save_works(tmp_path, saved_before, step):
    for call in range(num_calls(tmp_path, saved_before, step)):
        store = CheckpointStore(tmp_path / f"crash_{call}")
        for earlier in saved_before:
            save(store, earlier)
        try:
            with failing_from(call, Crash(), only_once=False):
                store.save(step, content(50), {"step": step, "new": True})
        except Crash:
            pass
        after = CheckpointStore(store.folder)
        latest = after.latest(refuse)
        state = verify(latest)
        expected = bytes([50 if "new" in state else state["step"]]) * 1000
        assert (latest / "weights.bin").read_bytes() == expected
        assert state["step"] in (max(saved_before), step)
        after.save(step + 1, content(step + 1), {"step": step + 1})
        assert [name for name in names(after) if not name.startswith("step_")] == [], "nothing half done is left"
        assert set(saved_before) <= set(after.steps())


@pytest.mark.parametrize(("saved_before", "step"), [([1], 2), ([1, 2], 2)], ids=["a new step", "a step saved again"])
def test_a_disk_error_at_any_call_of_save_is_a_checkpoint_error_and_leaves_the_earlier_one(tmp_path, saved_before, step):
    failed = 0
    for call in range(num_calls(tmp_path, saved_before, step)):
        store = CheckpointStore(tmp_path / f"error_{call}")
        for earlier in saved_before:
            save(store, earlier)
        try:
            with failing_from(call, OSError(28, "No space left on device"), only_once=True):
                store.save(step, content(50), {"step": step, "new": True})
        except CheckpointError as error:
            failed += 1
            assert "No space left on device" in str(error) and f"step_{step}" in str(error) and "GiB are free" in str(error)
        latest = CheckpointStore(store.folder).latest(refuse)
        assert verify(latest)["step"] in (max(saved_before), step)
        assert [name for name in names(store) if not name.startswith("step_")] == []
    assert failed >= 10


def test_an_error_of_a_worker_while_saving_is_passed_on_and_nothing_is_left(store):
    save(store, 1)

    def write(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"x")
        raise RuntimeError("actor0 died")

    with pytest.raises(RuntimeError, match="actor0 died"):
        store.save(2, write, {})
    assert names(store) == ["step_1"]
    assert store.latest(refuse) == store.folder / "step_1"
