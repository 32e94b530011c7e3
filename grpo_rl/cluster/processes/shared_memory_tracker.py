"""Python's tracker of shared memory, where nobody ends it before its work is done."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from typing import Any

_trackers: list[subprocess.Popen[bytes]] = []


def track_apart() -> None:
    """Start Python's tracker of shared memory for this process in a group of its own.

    Ray ends the group of a worker that died, a second after it has asked: with the tracker in it, and children that take
    longer to end, what they shared would stay in memory until the machine is started again.
    """

    def spawn(path: str, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments]
        # Kept, or its destructor would warn of a child that still runs.
        _trackers.append(subprocess.Popen(words, executable=path, pass_fds=passed, process_group=0))
        return _trackers[-1].pid

    before = util.spawnv_passfds
    util.spawnv_passfds = spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = before
