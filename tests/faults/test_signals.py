"""A run on a real Ray is told to end in each way that terminals and batch systems have: exit code, cause, and nothing left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import oracles
import pytest
from tiny_run import two_workers

START_S = 240.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
SAMPLES = "driver.response:delay=60@step=2,count=2"
"""Keeps the run in the second step's generation."""
SAVED = "step 1 of 4 is saved; the same command goes on from there"
ENDS = {
    "closed terminal": ([signal.SIGHUP], 75, f"stopped: by SIGHUP: {SAVED}"),
    "scancel": ([signal.SIGTERM, signal.SIGCONT], 75, f"stopped: by SIGTERM: {SAVED}"),
    "Slurm's warning": ([signal.SIGUSR1], 75, f"stopped: by SIGUSR1: {SAVED}"),
    "Ctrl-C twice": ([signal.SIGINT, signal.SIGINT], 130, "interrupted again: ended at once"),
}
"""The signals to the process group, the exit code, and how the last line on the screen begins."""


@pytest.mark.parametrize("how", ENDS)
def test_a_signal_to_the_group_ends_the_run_with_its_code_and_leaves_nothing(
    training: Any, run_words: list[str], how: str
) -> None:
    numbers, code, said = ENDS[how]
    run = training("signalled", two_workers(run_words), SAMPLES).start()
    run.until(lambda _: bool(run.fired()), START_S)
    for number in numbers:
        os.killpg(run.process.pid, number)
        time.sleep(1.0)
    assert run.wait(START_S) == code, run.describe()
    assert run.error_lines()[-1].startswith(said), run.error_lines()
    status = run.status
    assert (status["state"], status["error"]["exit_code"]) == ("preempted", code)
    oracles.assert_nothing_left(run)
