"""Signals that ask a run to stop: what is left at once, what is finished, and how the terminal looks afterwards."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import Terminal

from grpo_rl.errors import Preempted
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.stopping import Stop


@pytest.fixture
def stop() -> Iterator[Stop]:
    stop = Stop(grace_s=60.0, notice=lambda text: None)
    stop.listen()
    yield stop
    stop.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_sampling_is_left_at_once_when_the_step_has_no_known_end(stop: Stop, number: signal.Signals) -> None:
    stop.step_begins()
    stop.phase("gen")
    with pytest.raises(Preempted, match=number.name):
        signal.raise_signal(number)


def test_an_update_is_never_left_and_the_run_stops_before_the_next_step(stop: Stop) -> None:
    stop.step_begins()
    stop.phase("update_actor")
    signal.raise_signal(signal.SIGTERM)
    stop.step_ends()
    with pytest.raises(Preempted):
        stop.step_begins()


def test_a_step_that_will_end_in_time_is_finished(stop: Stop) -> None:
    stop._step_s, stop._save_s = 20.0, 10.0
    stop.step_begins()
    stop.phase("gen")
    signal.raise_signal(signal.SIGTERM)  # 1.5 x 20 s + 1.5 x 10 s are less than a minute
    stop.phase("reward")


@pytest.mark.parametrize(("step_s", "save_s"), [(20.0, 21.0), (31.0, 10.0), (0.0, 10.0)])
def test_a_step_that_will_not_end_in_time_or_has_taken_too_long_already_is_left(
    stop: Stop, step_s: float, save_s: float
) -> None:
    stop._step_s, stop._save_s = step_s, save_s
    stop.step_begins()
    stop.phase("gen")
    with pytest.raises(Preempted):
        signal.raise_signal(signal.SIGTERM)


def ending(program: str) -> tuple[int, str]:
    """Exit code and standard error of a process that listens, and then runs `program`."""
    code = f"import signal, sys, time\nfrom grpo_rl.trainer.stopping import ONE_PRESS_S, Stop\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=dict(os.environ))
    return done.returncode, done.stderr


def test_one_press_that_timeout_or_srun_passes_on_once_more_is_one(stop: Stop) -> None:
    stop.phase("save")
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    assert stop.signal == "SIGINT"


def test_a_run_that_was_started_with_hangups_ignored_goes_on_when_its_terminal_closes() -> None:
    code, _ = ending(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); stop = Stop(60.0); stop.listen(); stop.listen(); stop.phase('gen')\n"
        "signal.raise_signal(signal.SIGHUP); sys.exit(0 if stop.signal is None else 1)"
    )
    assert code == 0


def test_a_function_that_prints_is_not_left_half_way_and_the_run_stops_a_moment_later(stop: Stop) -> None:
    signalled: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGTERM)
            signalled.append(text)
            return len(text)

    stop.phase("gen")
    Console(Screen()).info("a line")
    assert signalled and stop.signal == "SIGTERM"
    with pytest.raises(Preempted, match="SIGTERM"):
        for _ in range(100):
            time.sleep(0.1)


def test_when_the_grace_period_is_over_the_process_ends_whatever_it_is_doing() -> None:
    code, err = ending(
        "stop = Stop(0.3, lambda: print('last words', file=sys.stderr, flush=True)); stop.listen(); stop.phase('save')\n"
        "signal.raise_signal(signal.SIGTERM); time.sleep(60)"
    )
    assert code == 75 and "last words" in err


TWICE = """
import os, time
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.stopping import Stop
console = Console()
stop = Stop(60.0, notice=console.notice, give_back_terminal=console.give_back_terminal)
stop.listen()
stop.phase("save")
console.info("ready")
with console.progress("training", 9) as outer, console.progress("saving"):
    outer.left(100)
    while True:
        time.sleep(0.05)
"""


def test_a_second_interrupt_ends_the_process_and_gives_the_terminal_back(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", TWICE], tmp_path) as run:
        run.until("left", 120)
        run.press(b"\x03")
        run.until("stopping within 60 s", 120)
        time.sleep(0.6)  # a person's second press, not the same one passed on
        run.press(b"\x03")
        assert run.wait(120) == 130
        screen = run.screen()
    assert screen.cursor_is_visible
    # The terminal itself shows the first key that was pressed as ^C.
    lines = [line.replace("^C", "").strip() for line in screen.text().splitlines()]
    assert [line for line in lines if line] == [
        "ready",
        "SIGINT: stopping within 60 s (trainer.grace_s)",
        "interrupted again: ended at once",
    ]


LOADING = """
import sys
from grpo_rl.main import main

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print("ready", flush=True)

sys.meta_path.insert(0, Finder())
sys.exit(main(["trainer.device=cpu"]))
"""


def test_an_interrupt_while_the_command_is_still_loading_is_one_line(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", LOADING], tmp_path) as run:
        run.until("ready", 120)
        run.press(b"\x03")
        assert run.wait(120) == 130
        assert run.screen().text().replace("^C", "").split() == ["ready", "interrupted"]
