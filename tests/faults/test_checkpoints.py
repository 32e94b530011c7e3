"""A process that writes checkpoints is killed, for certain and by the kernel, in the middle of its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.checkpoint.store import CheckpointStore

WRITER = """
import sys
from pathlib import Path
from grpo_rl.checkpoint.files import write_file
from grpo_rl.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
names = ["shard_of_rank0.bin", "shard_of_rank1.bin"]
for step in (1, 2, 3):
    draft = store.begin(step, {"step": step})
    written = {name: write_file(draft.folder / name, [bytes([step]) * 1000]) for name in names}
    store.clear(step, store.publish(draft, written))
    print(step, flush=True)
"""
# Of step 3: its state, before and after the rename.
PLACES = [
    "ckpt.call:kill9@call=write,file=trainer.json,n=3",
    "ckpt.before_rename:kill9@n=3",
    "ckpt.after_rename:kill9@n=3",
]
COMMITTED = {"ckpt.after_rename:kill9@n=3"}


@pytest.mark.parametrize("fault", PLACES)
def test_what_was_committed_before_the_kill_is_found_and_the_next_save_works(tmp_path, fault):
    environment = os.environ | {"GRPO_FAULT": fault, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert found.stdout.split() == ["1", "2"]
    store = CheckpointStore(tmp_path, keep=2)
    latest = store.latest(pytest.fail)
    assert latest is not None and latest.step == (3 if fault in COMMITTED else 2)
    assert (latest.folder / "shard_of_rank1.bin").read_bytes() == bytes([latest.step]) * 1000
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.name.startswith(".")] == []
    rerun = subprocess.run(
        command, env=environment | {"GRPO_FAULT": ""}, capture_output=True, text=True, timeout=120, check=True
    )
    assert rerun.stdout.split() == ["1", "2", "3"]
    assert store.steps() == [2, 3]
