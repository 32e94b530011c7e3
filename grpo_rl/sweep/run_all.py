"""The runs of a sweep, one after the other: `python -m grpo_rl.main --multirun key=a,b seed=1,2,3 ...`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError, Preempted
from grpo_rl.plan.make import make_plan
from grpo_rl.sweep.outcome import summarize
from grpo_rl.sweep.points import Point, Sweep, sweep_of, with_places
from grpo_rl.telemetry.rundir import refuse_taken
from grpo_rl.telemetry.status import read_status

STOPPED_CODES = (75, 130)
"""Exit codes of a run that was stopped from outside: no other run of the sweep starts then."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_sweep(words: Sequence[str]) -> int:
    """Run every combination of the values, and return 0 when all are done, or the exit code of the first that failed.

    Every run is planned first: ConfigError or DataError has the problems of all of them, before the first one starts. Runs that
    are done already, with the same configuration, are skipped; one that was stopped goes on. One that fails does not
    keep the next from starting; a signal does, after the run that it meets has saved. Raises Preempted then.
    """
    sweep = sweep_of(words)
    if sweep.dry_run:
        _show_plans(sweep)
        return 0
    waiting = [point for point in sweep.points if not _is_done(sweep, point)]
    _check(sweep, waiting)
    sweep.write()
    print(redact(_heading(sweep, waiting)), flush=True)
    codes: dict[str, int] = {}
    with _Signals() as signals:
        for number, point in enumerate(sweep.points, start=1):
            if signals.came is not None:
                break
            if point not in waiting:
                continue
            print(redact(f"\n=== run {number} of {len(sweep.points)}: {point.name}"), flush=True)
            codes[point.name] = signals.wait(subprocess.Popen([sys.executable, "-m", "grpo_rl.main", *sweep.words[point.name]]))
            if codes[point.name] in STOPPED_CODES:
                signals.came = signals.came or "a signal to the run"
        came = signals.came
    print(redact(f"\n{summarize(sweep.folder, sweep.points)}"), flush=True)
    if came is not None:
        raise Preempted(f"by {came}; {_going_on(sweep)}")
    return next((code for code in codes.values() if code), 0)


class _Signals:
    """The signals that end a sweep: the run that is going on gets them as SIGTERM, and no other one starts.

    A terminal sends Ctrl-C to the run as well, which would take a second SIGINT for the wish to end without saving.
    """

    def __init__(self) -> None:
        self.came: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in _SIGNALS:
            # Below nohup SIGHUP is ignored, and stays so.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of a run, as a shell has it where a signal ended the process."""
        self._process = process
        if self.came is not None:  # between the start of the process and this line
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came = self.came or signal.Signals(number).name
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def _check(sweep: Sweep, points: Sequence[Point]) -> None:
    """Plan each of the runs. Raises ConfigError, or DataError where only data are wrong, with the problems of all."""
    found: dict[str, list[str]] = {}
    of_data = True
    for point in points:
        composed = sweep.composed[point.name]
        try:
            refuse_taken(composed.config.trainer.default_local_dir, composed.config.trainer.experiment_name)
            make_plan(composed)
        except (ConfigError, DataError) as error:
            of_data = of_data and isinstance(error, DataError)
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                found.setdefault(problem, []).append(point.name)
    if found:
        lines = with_places(found, len(points))
        raise DataError("\n  ".join(lines)) if of_data else ConfigError(lines)


def _is_done(sweep: Sweep, point: Point) -> bool:
    """Return whether the run has ended well, with the configuration that it has now."""
    folder = sweep.folder / point.name
    if read_status(folder).get("state") != "done":
        return False
    file = folder / "config.yaml"
    return file.is_file() and file.read_text(encoding="utf-8") == sweep.composed[point.name].yaml()


def _show_plans(sweep: Sweep) -> None:
    for number, point in enumerate(sweep.points, start=1):
        print(
            redact(f"=== run {number} of {len(sweep.points)}: {point.name}\n{make_plan(sweep.composed[point.name]).render()}")
        )


def _heading(sweep: Sweep, waiting: Sequence[Point]) -> str:
    done = len(sweep.points) - len(waiting)
    skipped = f"; {done} of them are done and skipped" if done else ""
    names = "\n".join(f"  {point.name}" for point in waiting)
    return f"sweep: {len(sweep.points)} runs in {sweep.folder}{skipped}" + (f"\n{names}" if names else "")


def _going_on(sweep: Sweep) -> str:
    if sweep.is_named:
        return "the same command goes on: runs that are done are skipped"
    return f"the same command with trainer.experiment_name={sweep.folder.name} goes on: runs that are done are skipped"
