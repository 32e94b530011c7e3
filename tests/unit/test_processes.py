"""Processes out of reach of stop signals, and their end: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_rl.processes.family import STOP_SIGNALS, is_running, kill_tree, shielded, started

ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
OUTLIVES = "from grpo_rl.processes.family import outlive_stop_signals; outlive_stop_signals()\n"
ENDS_OTHERS = OUTLIVES + (
    "import multiprocessing, subprocess, sys, time\n"
    "program = subprocess.Popen(['sleep', '600'])\n"
    "fork = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)); fork.start()\n"
    "program.terminate(); fork.terminate()\n"
    "print(program.wait(10), fork.join(10) or fork.exitcode, flush=True)\n"
)


@contextmanager
def python(program: str) -> Iterator[subprocess.Popen[str]]:
    """A shielded process that runs this, and is killed at the end."""
    with shielded():
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.communicate()


def echo(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    "program", [ECHO, OUTLIVES + ECHO, "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n" + ECHO]
)
def test_a_shielded_process_goes_on_whatever_stop_signals_it_and_its_group_get(program: str) -> None:
    with python(program) as process:
        for number in STOP_SIGNALS:
            os.kill(process.pid, number)  # also before it has done anything itself
        assert echo(process, "one") == "one"
        for number in STOP_SIGNALS:
            os.killpg(process.pid, number)
        assert echo(process, "two") == "two"


def test_this_process_gets_its_own_signals_again_behind_the_shield() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with shielded():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(STOP_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_a_process_that_outlives_signals_starts_itself_can_be_terminated() -> None:
    with python(ENDS_OTHERS) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["-15", "-15"]


def test_a_process_is_told_by_its_id_and_its_start() -> None:
    with python(ECHO) as process:
        assert is_running(process.pid)
        since = started(process.pid)
        assert since is not None and since >= (started(os.getpid()) or 0)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert not is_running(process.pid)
    assert started(process.pid) is None and not is_running(process.pid)
