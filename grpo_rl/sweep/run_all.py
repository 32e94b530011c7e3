"""The runs of a sweep, one after the other: `python -m grpo_rl.main --multirun key=a,b seed=1,2,3 ...`.

With `sweep.halving=true` all run to a quarter of their steps, the better half of the settings to a half, and of these the better
half to the end: successive halving (Jamieson and Talwalkar, arXiv 1502.07943). A run that pauses is stopped as by a signal, and goes
on later with the same bits.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from grpo_rl.config import overrides
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError, Preempted
from grpo_rl.plan.make import make_plan
from grpo_rl.sweep.outcome import SWEEP_FILE, Point, last_step, name_of, score_until, summarize
from grpo_rl.telemetry.finished import functions_changed
from grpo_rl.telemetry.rundir import dated_name, refuse_taken
from grpo_rl.telemetry.status import read_status

T = TypeVar("T")
STOPPED_CODES = (75, 130)
"""Exit codes of a run that was stopped from outside: no other run of the sweep starts then."""
HALVING = "sweep.halving"
RUNGS = (0.25, 0.5, 1.0)
"""Shares of the steps to which the runs go in turns; after each but the last the worse half of the settings stays where it is."""
_LOOK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep and where they lie."""

    folder: Path
    points: Sequence[Point]
    words: Mapping[str, list[str]]
    """The command line of each run, by its name."""
    composed: Mapping[str, Composed]
    """The configuration of each run, by its name."""
    is_named: bool
    """True where the sweep has a name by which the same command goes on."""
    halving: bool = False


def run_sweep(words: Sequence[str]) -> int:
    """Run every combination of the values, and return 0 when all are done, or the exit code of the first that failed.

    Every run is planned first: ConfigError or DataError has the problems of all of them, before the first one starts. Runs that
    are done already, with the same configuration, are skipped; one that was stopped goes on. One that fails does not
    keep the next from starting; a signal does, after the run that it meets has saved. Raises Preempted then.
    """
    sweep = sweep_of(words)
    count = len(sweep.points)
    if any(composed.config.trainer.dry_run for composed in sweep.composed.values()):
        for number, point in enumerate(sweep.points, start=1):
            plan = make_plan(sweep.composed[point.name])
            print(redact(f"=== run {number} of {count}: {point.name}\n{plan.render()}"))
        return 0
    waiting = [point for point in sweep.points if not _is_done(sweep, point)]
    totals = _of_each([one.name for one in waiting], len(waiting), lambda name: _steps(sweep.composed[name]))
    # What the runs are, for the summary that is made from the folder.
    sweep.folder.mkdir(parents=True, exist_ok=True)
    record = [{"name": point.name, "values": dict(point.values)} for point in sweep.points]
    (sweep.folder / SWEEP_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    skipped = f"; {count - len(waiting)} of them are done and skipped" if len(waiting) < count else ""
    print(redact("\n  ".join([f"sweep: {count} runs in {sweep.folder}{skipped}", *(one.name for one in waiting)])), flush=True)
    codes: dict[str, int] = {}
    alive = sweep.points
    with _Signals() as signals:
        for share in RUNGS if sweep.halving else (1.0,):
            for number, point in enumerate(sweep.points, start=1):
                if signals.came is not None or point not in waiting or point not in alive:
                    continue
                folder, end = sweep.folder / point.name, math.ceil(share * totals[point.name])
                if share < 1 and last_step(folder) >= end:
                    continue
                to = f", to step {end} of {totals[point.name]}" if share < 1 else ""
                print(redact(f"\n=== run {number} of {count}: {point.name}{to}"), flush=True)
                process = subprocess.Popen([sys.executable, "-m", "grpo_rl.main", *sweep.words[point.name]])
                paused = share < 1 and signals.pause(process, partial(_is_at, folder, end))
                codes[point.name] = signals.wait(process)
                if codes[point.name] in STOPPED_CODES:
                    if paused:
                        codes[point.name] = 0
                    else:
                        signals.came = signals.came or "a signal to the run"
            if share < 1 and signals.came is None:
                alive = _better_half(sweep, alive, share, totals)
        came = signals.came
    print(redact(f"\n{summarize(sweep.folder, sweep.points)}"), flush=True)
    if came is not None:
        named = "" if sweep.is_named else f" with trainer.experiment_name={sweep.folder.name}"
        raise Preempted(f"by {came}; the same command{named} goes on: runs that are done are skipped")
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

    def pause(self, process: subprocess.Popen[bytes], is_far_enough: Callable[[], bool]) -> bool:
        """Wait until the run is far enough, and ask it to save and end; return False where it ended, or a signal came, before."""
        self._process = process
        while process.poll() is None and self.came is None:
            if is_far_enough():
                process.send_signal(signal.SIGTERM)
                return True
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
        return False

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


def _better_half(sweep: Sweep, points: Sequence[Point], share: float, totals: Mapping[str, int]) -> list[Point]:
    """Return the runs of the better half of the settings, by the mean over their seeds of the score that each had at this share."""
    settings: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        settings.setdefault(point.setting, []).append(point)

    def score(point: Point) -> float:
        folder = sweep.folder / point.name
        # A run that was done before this command has no total, and all of its steps.
        return score_until(folder, math.ceil(share * totals.get(point.name, last_step(folder))))

    ranked = sorted(settings.values(), key=lambda points: statistics.fmean(map(score, points)), reverse=True)
    return [point for points in ranked[: math.ceil(len(ranked) / 2)] for point in points]


def _is_at(folder: Path, step: int) -> bool:
    return last_step(folder) >= step


def _steps(composed: Composed) -> int:
    """Plan a run, and return its steps. Raises ConfigError and DataError."""
    refuse_taken(composed.config.trainer.default_local_dir, composed.config.trainer.experiment_name)
    return make_plan(composed).sizes.total_steps or 0


def _of_each(names: Sequence[str], num_runs: int, make: Callable[[str], T]) -> dict[str, T]:
    """Return what is made of each of the runs, by its name.

    Raises ConfigError, or DataError where only data are wrong, with the problems of all; each names the runs that it is in, unless
    these are all.
    """
    made: dict[str, T] = {}
    found: dict[str, list[str]] = {}
    of_data = True
    for name in names:
        try:
            made[name] = make(name)
        except (ConfigError, DataError) as error:
            of_data = of_data and isinstance(error, DataError)
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                found.setdefault(problem, []).append(name)
    lines = []
    for problem, where in found.items():
        shown = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        lines.append(problem if len(where) == num_runs else f"{problem} (in run {shown})")
    if lines:
        raise DataError("\n  ".join(lines)) if of_data else ConfigError(lines)
    return made


def _is_done(sweep: Sweep, point: Point) -> bool:
    """Return whether the run has ended well, with the configuration that it has now."""
    folder = sweep.folder / point.name
    if read_status(folder).get("state") != "done":
        return False
    file, composed = folder / "config.yaml", sweep.composed[point.name]
    if not (file.is_file() and file.read_text(encoding="utf-8") == composed.yaml()):
        return False
    if functions_changed(folder, composed.resolved):
        raise ConfigError(
            f"{folder}: is done, and the files of its functions have changed since, so that it cannot be compared with the runs "
            "to come; give the sweep another trainer.experiment_name"
        )
    return True


def sweep_of(words: Sequence[str]) -> Sweep:
    """Return the sweep that the words describe.

    Raises ConfigError with every problem of every run, before any of them starts; each names the runs that it is in.
    """
    halves = [word for word in words if word.partition("=")[0] == HALVING]
    if halves not in ([], [f"{HALVING}=true"], [f"{HALVING}=false"]):
        raise ConfigError(f"{halves[0]}: it is true or false, once")
    axes = overrides.axes([word for word in words if word not in halves])
    if "trainer.experiment_name" in axes.values:
        axes.problems.append("trainer.experiment_name: a sweep has one name, and its runs are named after their values")
    if axes.problems:
        raise ConfigError(axes.problems)
    combinations = [dict(zip(axes.values, values, strict=True)) for values in itertools.product(*axes.values.values())]
    points = [Point(values, name_of(values)) for values in combinations]
    settings = {point.name: [*axes.fixed, *(f"{key}={value}" for key, value in point.values.items())] for point in points}
    given = None
    with suppress(ConfigError):  # wrong words show below, in every run
        given = compose(settings[points[0].name]).config.trainer.experiment_name
    name = given or f"sweep_{dated_name()}"
    lines = {
        point: [*words, f"trainer.experiment_name={overrides.quoted(f'{name}/{point}')}"] for point, words in settings.items()
    }
    composed = _of_each(list(lines), len(points), lambda point: compose(lines[point]))
    folders = {str(Path(one.config.trainer.default_local_dir).expanduser()) for one in composed.values()}
    if len(folders) > 1:
        raise ConfigError(f"--multirun: the runs of a sweep lie in one folder, not in {' and '.join(sorted(folders))}")
    is_named, halving = given is not None, f"{HALVING}=true" in halves
    if halving and len({point.setting for point in points}) < 2:
        axes.problems.append(f"{HALVING}=true: all runs differ by their seeds alone, and none is a better setting")
        raise ConfigError(axes.problems)
    return Sweep(Path(folders.pop()) / name, points, lines, composed, is_named, halving)
