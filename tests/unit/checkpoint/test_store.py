"""Checkpoints are complete or not there, verified before use, and a crash at any point leaves the earlier one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint_trials as trials
import pytest
from checkpoint_trials import DAMAGE, SCENES, Crash, Scene, break_save, breaking, check_damage, save_with

from grpo_rl.checkpoint.files import write_file
from grpo_rl.checkpoint.manifest import MANIFEST, verify
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.errors import CheckpointError


def content(step: int) -> Callable[[Path], None]:
    """Return a function that writes what a worker group would: files, one of them in a folder of its own."""

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(bytes([step]) * 1000)
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text(f'{{"step": {step}}}')

    return write


def save(store: CheckpointStore, step: int) -> Path:
    return save_with(store, step, content(step), {"step": step})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def refuse(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


def newest(store: CheckpointStore) -> int | None:
    latest = store.latest(refuse)
    return None if latest is None else latest.step


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


# ---- writing and finding ----------------------------------------------------------------------------


def test_what_was_saved_is_found_with_its_files_and_its_state(store):
    folder = save(store, 7)
    assert folder == store.folder / "step_7"
    found = store.latest(refuse)
    assert found is not None and (found.folder, found.step, found.state) == (folder, 7, {"step": 7})
    assert (folder / "weights.bin").read_bytes() == bytes([7]) * 1000
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == {"weights.bin", "hf/config.json", "trainer.json"}
    assert names(store) == ["step_7"]


def test_the_newest_is_the_one_of_the_highest_step_and_not_of_the_highest_name(store):
    for step in (9, 10, 2):
        save(store, step)
    assert store.steps() == [2, 9, 10]
    assert newest(store) == 10


def test_other_names_in_the_folder_are_no_checkpoints(store):
    save(store, 1)
    for name in ("step_x", "best", "step_07", "step_0010", "step_10.bak", "step_-1", "step_1e9", "step_\u0662", ".step_9"):
        shutil.copytree(store.folder / "step_1", store.folder / name)
    assert store.steps() == [1]
    assert newest(store) == 1


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to(path.parent / "step_1")])
def test_what_has_a_checkpoints_name_and_is_none_is_told_of(store, make):
    save(store, 1)
    make(store.folder / "step_5")
    told: list[str] = []
    found = store.latest(told.append)
    assert found is not None and found.step == 1 and len(told) == 1 and "step_5 is " in told[0]
    # The run that goes on makes a step 5 of its own, and what was there is kept.
    assert [path.name for path in store.set_aside_after(1)] == ["aside_1_step_5"]
    save(store, 5)
    assert newest(store) == 5


def test_the_same_step_saved_again_takes_the_earlier_ones_place(store):
    save(store, 3)
    save_with(store, 3, content(30), {"step": 3, "again": True})
    assert verify(store.folder / "step_3").state == {"step": 3, "again": True}
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


def test_later_steps_are_set_aside_without_losing_any(store):
    for step in (2, 4, 6):
        save(store, step)
    assert [path.name for path in store.set_aside_after(2)] == ["aside_1_step_4", "aside_1_step_6"]
    assert store.steps() == [2]
    save(store, 4)
    assert [path.name for path in store.set_aside_after(2)] == ["aside_2_step_4"]
    assert names(store) == ["aside_1_step_4", "aside_1_step_6", "aside_2_step_4", "step_2"]
    assert verify(store.folder / "aside_1_step_6").state == {"step": 6}


def test_what_was_not_written_here_is_never_removed(tmp_path):
    told: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, warn=told.append)
    (save(store, 1) / "notes.txt").write_text("mine")
    flip_a_bit(save(CheckpointStore(store.folder), 2))
    (save(CheckpointStore(store.folder), 3) / MANIFEST).unlink()
    save(store, 4)
    # Step 2 is known for ours by its manifest, whatever has become of its files.
    assert names(store) == ["step_1", "step_3", "step_4"]
    assert ["step_1 is kept" in told[0], "step_3 is kept" in told[1], len(told)] == [True, True, 2]
    save(CheckpointStore(store.folder, keep=1), 5)
    assert names(store) == ["step_1", "step_3", "step_5"], "also after a restart"


# ---- damage ------------------------------------------------------------------------------------------


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[500] ^= 1
    (folder / "weights.bin").write_bytes(data)


def test_each_damaged_one_is_told_of_once_and_older_ones_are_not_looked_at(store):
    for step in range(1, 6):
        save(store, step)
    for step in (1, 4, 5):
        flip_a_bit(store.folder / f"step_{step}")
    told: list[str] = []
    found = store.latest(told.append)
    assert found is not None and found.step == 3
    assert [f"step_{step}" in message for step, message in zip((5, 4), told, strict=True)] == [True, True]


def test_when_all_are_damaged_nothing_is_started_silently(store):
    for step in (1, 2):
        save(store, step)
        flip_a_bit(store.folder / f"step_{step}")
    told: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is intact; .*resume_mode=disable"):
        store.latest(told.append)
    assert len(told) == 2


# ---- a disk that fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_error_at_any_call_is_told_with_path_and_sizes_and_leaves_the_earlier_one(tmp_path, number):
    scene = Scene((1,), 2)
    told = 0
    for call in range(break_save(tmp_path / "counting", scene, None)):
        store = CheckpointStore(tmp_path / f"error_{call}", warn=lambda _: None)
        with breaking():
            trials.save(store, 1)
        with breaking(call, OSError(number, os.strerror(number))) as disk:
            try:
                trials.save(store, 2)
            except CheckpointError as error:
                told += 1
                for part in (
                    f"cannot write {store.folder / 'step_2'}: {os.strerror(number)}",
                    "it needs 0.0 MiB",
                    "are free there",
                ):
                    assert part in str(error)
        with breaking():
            latest = CheckpointStore(store.folder).latest(refuse)
        assert latest is not None and latest.step == (2 if disk.committed else 1)
        assert [name for name in names(store) if not name.startswith("step_")] == []
    assert told >= 15


def test_a_full_disk_is_noticed_before_anything_is_written(store):
    save(store, 1)
    with breaking() as disk, pytest.raises(CheckpointError) as caught:
        save_with(store, 2, content(2), {}, needed=10**18)
    assert disk.calls == []
    assert "No space left on device (nothing was written); it needs 953,674,316,406.2 MiB, " in str(caught.value)
    assert names(store) == ["step_1"]


@pytest.mark.parametrize("harm", ["shorter", "gone"])
def test_a_file_that_is_not_what_its_writer_said_is_not_committed(store, harm):
    save(store, 1)

    def write(folder: Path) -> dict[str, tuple[int, str]]:
        entries = {"a": write_file(folder / "a", [b"12345"])}
        if harm == "shorter":
            os.truncate(folder / "a", 4)
        else:
            (folder / "a").unlink()
        return entries

    with pytest.raises(
        CheckpointError, match="a has 4 bytes, 5 were written" if harm == "shorter" else "a was written and is not"
    ):
        save_with(store, 2, write, {})
    assert names(store) == ["step_1"]


# ---- crashes and damage --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scene", "power_cut"), [*((scene, False) for scene in SCENES), (SCENES[2], True), (SCENES[-1], True)], ids=str
)
def test_a_save_that_dies_at_any_call_leaves_the_newest_committed_state(tmp_path, scene, power_cut):
    calls = break_save(tmp_path / "whole", scene, None, power_cut=power_cut)
    assert calls >= 12 + 6 * (scene.shards - 1)
    for at in range(calls):
        break_save(tmp_path / str(at), scene, at, power_cut=power_cut)


def test_the_harness_notices_a_save_that_forgets_to_flush(tmp_path, monkeypatch):
    """Without flushing the folder after the rename, a power cut takes a commit back that was said to be there."""
    monkeypatch.setattr(trials.files, "flush", lambda path: None)
    with pytest.raises(AssertionError):
        break_save(tmp_path, Scene((1,), 2), None, power_cut=True)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_every_kind_is_noticed(tmp_path, name):
    for seed in range(4):
        check_damage(tmp_path / str(seed), name, seed)


def test_what_a_broken_off_save_left_is_removed_at_the_next_start_and_nothing_else(store):
    with pytest.raises(Crash), breaking(8):
        trials.save(store, 1)
    for other in (".writing_by_hand", ".nfs0001", "step_1.tmp"):
        (store.folder / other).mkdir()
    (store.folder / ".writing_step_1_0123abcd").symlink_to(store.folder / "step_1.tmp")
    assert len(names(store)) == 5
    assert CheckpointStore(store.folder).latest(refuse) is None
    assert names(store) == [".nfs0001", ".writing_by_hand", ".writing_step_1_0123abcd", "step_1.tmp"]


def test_a_file_is_flushed_whole_before_its_writing_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_file(tmp_path / "one.bin", [b"abc", b"de"])
    assert flushed == [((tmp_path / "one.bin").stat().st_ino, 5)]
