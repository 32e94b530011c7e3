"""The runs of a sweep, `grpo-rl train --multirun key=a,b seed=1,2,3 ...`: Hydra's sweeper chooses them and
its launcher starts them; here they are planned first, run in a process each, and summed up in a table."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig

from grpo_rl.config import overrides
from grpo_rl.config.command_line import Command
from grpo_rl.config.compose import Composed, compose, main_of_hydra, read
from grpo_rl.config.hydra_files import reading
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError, Preempted
from grpo_rl.frozen import frozen
from grpo_rl.plan.make import make_plan, plan_without_page
from grpo_rl.sweep.outcome import (
    SEED_AXES,
    SWEEP_FILE,
    Point,
    last_step,
    name_of,
    read_points,
    score_until,
    summarize,
)
from grpo_rl.telemetry.finished import contents_changed
from grpo_rl.telemetry.rundir import dated_name, refuse_taken
from grpo_rl.telemetry.status import read_status

T = TypeVar("T")
STOPPED_CODES = (75, 130)
"""Exit codes of a run that was stopped from outside."""
STOP_FILE = ".stop"
"""In the sweep's folder: the runs save and end, and no other starts, on whatever machine."""
UNTIL = "sweep.until"
"""A word of the halving sweeper: the share of its steps that a run goes."""
_PLUGINS = {
    "hydra/launcher=joblib": "hydra_joblib_launcher",
    "hydra/launcher=submitit_local": "hydra_submitit_launcher",
    "hydra/launcher=submitit_slurm": "hydra_submitit_launcher",
    "hydra/sweeper=optuna": "hydra_optuna_sweeper",
}
_DEFAULTS = {
    # Its own starts as many runs at once as there are cores.
    "hydra/launcher=joblib": "hydra.launcher.n_jobs=2",
    "hydra/sweeper=optuna": "hydra.sweeper.direction=maximize",
}
"""A file in conf/ of a plugin's name would be matched with its schema."""
_LOOK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class RunFailed(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(name, code)
        self.code = code


@frozen
class RunPoint:
    """Hydra's task in a sweep: a run in a process of its own, on whatever machine."""

    folder: Path
    options: Sequence[str]
    """The options that name files."""
    axes: frozenset[str]
    """Keys that have several values, or from which a sweeper draws."""
    done: frozenset[str] = frozenset()
    totals: Mapping[str, int] = field(default_factory=dict)
    """The training steps of each planned run."""
    controller: int = 0
    """The process that receives the user's signals."""

    def __call__(self, composed: Any) -> float:
        """Returns the run's score: more is better. Raises RunFailed."""
        words = [word.lstrip("+") for word in _hydra().overrides.task]
        until = next((float(word.partition("=")[2]) for word in words if word.startswith(f"{UNTIL}=")), 1.0)
        values = {key: value for key, _, value in (word.partition("=") for word in words) if key in self.axes}
        name = name_of(values)
        folder, total = self.folder / name, self.totals.get(name, 0)
        end = math.ceil(until * total) if until < 1 else None
        if name not in self.done and not (end is not None and last_step(folder) >= end):
            if (self.folder / STOP_FILE).exists():
                raise RunFailed(name, Preempted.exit_code)
            self._run(name, [word for word in map(_typed, words) if not word.startswith(f"{UNTIL}=")], end)
        # A run that was done before has all of its steps.
        return score_until(folder, sys.maxsize if end is None else math.ceil(until * (total or last_step(folder))))

    def _run(self, name: str, words: list[str], end: int | None) -> None:
        number = _hydra().job.num
        to = f", to step {end} of {self.totals[name]}" if end is not None else ""
        count = f" of {len(self.totals)}" if self.totals and number < len(self.totals) else ""
        print(redact(f"\n=== run {number + 1}{count}: {name}{to}"), flush=True)
        place = [f"trainer.experiment_name={overrides.quoted(f'{self.folder.name}/{name}')}"]
        if os.getpid() != self.controller and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all: the run and the controller see to it
        process = subprocess.Popen([sys.executable, "-m", "grpo_rl.main", *self.options, *words, *place])
        stop_requested = paused = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_S)
                break
            stopped = (self.folder / STOP_FILE).exists()
            paused = paused or (not stopped and end is not None and last_step(self.folder / name) >= end)
            if (stopped or paused) and not stop_requested:
                process.send_signal(signal.SIGTERM)
                stop_requested = True
        code = code if code >= 0 else 128 - code
        if code in STOPPED_CODES and paused:
            return
        if code in STOPPED_CODES:
            (self.folder / STOP_FILE).touch()
        if code:
            raise RunFailed(name, code)


def _hydra() -> Any:
    assert HydraConfig.initialized()
    return HydraConfig.instance().cfg.hydra  # type: ignore[union-attr]


def _typed(word: str) -> str:
    """As on a command line, where no choice of a group is `null`."""
    if not word.startswith("~"):
        return word
    key = word.removesuffix("=null")
    return key if "." in key else f"{key.removeprefix('~')}=null"


def setting_of(words: Sequence[str]) -> tuple[str, ...]:
    """Runs with the same words are repetitions of each other."""
    return tuple(word for word in words if word.lstrip("+").partition("=")[0] not in SEED_AXES)


@frozen
class Sweep:
    folder: Path
    points: Sequence[Point]
    """Empty if a sweeper draws them."""
    composed: Mapping[str, Composed]
    """Configurations by the run's name."""
    is_named: bool
    """Whether the same command goes on with the sweep."""
    task: RunPoint
    words: Sequence[str]
    """The words for Hydra."""


def run_sweep(argv: Sequence[str]) -> int:
    """Returns 0 if all runs are done, or the exit code of the first that failed.

    Every run is planned first: ConfigError or DataError has the problems of all. Runs that are done with the
    same configuration are skipped; one that was stopped goes on. One that fails does not keep the next from
    starting; a signal does, after the run that it meets has saved. Raises Preempted then.
    """
    command = read(["hydra/sweeper=halving" if word == "sweep.halving=true" else word for word in argv])
    sweep = sweep_of(command)
    count = len(sweep.points)
    if any(composed.config.trainer.dry_run for composed in sweep.composed.values()):
        for number, (name, composed) in enumerate(sweep.composed.items(), start=1):
            print(redact(f"=== run {number} of {count}: {name}\n{make_plan(composed).render()}"))
        return 0
    waiting = [point.name for point in sweep.points if not _is_done(sweep, point)]
    totals = _of_each(waiting, max(1, len(waiting)), lambda name: _steps(sweep.composed[name]))
    done = frozenset(point.name for point in sweep.points) - set(waiting)
    task = replace(sweep.task, done=done, totals=totals, controller=os.getpid())
    sweep.folder.mkdir(parents=True, exist_ok=True)
    stop = sweep.folder / STOP_FILE
    stop.unlink(missing_ok=True)
    if sweep.points:
        record = [{"name": point.name, "values": dict(point.values)} for point in sweep.points]
        (sweep.folder / SWEEP_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    skipped = f"; {len(done)} of them are done and skipped" if done else ""
    runs = f"{count} runs" if sweep.points else "runs"
    print(redact("\n  ".join([f"sweep: {runs} in {sweep.folder}{skipped}", *waiting])), flush=True)
    code = 0
    with _stopped_by_signals(stop) as signal_names:
        try:
            with reading(command.folders, command.config_name):
                main_of_hydra(command, task, ["--multirun", *sweep.words])
        except RunFailed as failed:
            code = failed.code
        finally:
            # Hydra's callback at the end of a sweep is not called if a run has failed.
            print(redact(f"\n{summarize(sweep.folder, sweep.points or read_points(sweep.folder))}"), flush=True)
    if stop.exists():
        stop.unlink()
        named = "" if sweep.is_named else f" with trainer.experiment_name={sweep.folder.name}"
        by = signal_names[0] if signal_names else "a signal to the run"
        raise Preempted(f"by {by}; the same command{named} goes on: runs that are done are skipped")
    return code


@contextmanager
def _stopped_by_signals(stop: Path) -> Iterator[list[str]]:
    """Yields the signals that have come: runs that are going on save then, and no other starts."""
    names: list[str] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        stop.touch()

    # Below nohup SIGHUP is ignored, and stays so.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield names
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _steps(composed: Composed) -> int:
    """Plan a run; return its steps."""
    refuse_taken(composed.config.trainer.default_local_dir, composed.config.trainer.experiment_name)
    return plan_without_page(composed.config).sizes.total_steps or 0


def _of_each(names: Sequence[str], num_runs: int, make: Callable[[str], T]) -> dict[str, T]:
    """Raises ConfigError, or DataError if only data are wrong, with all problems and the runs of each."""
    made: dict[str, T] = {}
    problems: dict[str, list[str]] = {}
    of_data = True
    for name in names:
        try:
            made[name] = make(name)
        except (ConfigError, DataError) as error:
            of_data = of_data and isinstance(error, DataError)
            for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
                problems.setdefault(problem, []).append(name)
    lines = []
    for problem, where in problems.items():
        listed = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        lines.append(problem if len(where) == num_runs else f"{problem} (in run {listed})")
    if lines:
        raise DataError("\n  ".join(lines)) if of_data else ConfigError(lines)
    return made


def _is_done(sweep: Sweep, point: Point) -> bool:
    """Whether the run has ended well with the configuration that it has now."""
    folder = sweep.folder / point.name
    if read_status(folder).get("state") != "done":
        return False
    file, composed = folder / "config.yaml", sweep.composed[point.name]
    if not (file.is_file() and file.read_text(encoding="utf-8") == composed.yaml()):
        return False
    if contents_changed(folder, composed.resolved):
        raise ConfigError(
            f"{folder}: is done, and the files of its functions or models have changed since, so that it cannot be compared with the runs "
            "to come; give the sweep another trainer.experiment_name"
        )
    return True


def sweep_of(command: Command) -> Sweep:
    """Raises ConfigError with every problem of every run."""
    rest = list(command.rest)
    axes = overrides.axes([word for word in rest if not word.startswith("hydra")], list(command.folders))
    hydras = [word for word in rest if word.startswith("hydra")]
    line = overrides.read([*axes.fixed, *hydras], list(command.folders))
    draws = any(word.startswith("hydra/sweeper=") and word != "hydra/sweeper=halving" for word in hydras)
    axes.problems += _problems_of(axes, line, hydras, draws)
    if axes.problems:
        raise ConfigError(axes.problems)
    flags = ((name, getattr(command.options, name)) for name in ("config_path", "config_name", "config_dir"))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags if value]
    combinations = [dict(zip(axes.values, values, strict=True)) for values in itertools.product(*axes.values.values())]
    # A sweeper that draws is tried with the first value of each list.
    points = [Point(values, name_of(values)) for values in (combinations[:1] if draws else combinations)]
    places = [word for word in hydras if word.startswith("hydra.sweep.dir=")]
    lines = {
        point.name: [*options, *axes.fixed, *(f"{key}={value}" for key, value in point.values.items()), *places]
        for point in points
    }
    experiment_name = None
    with suppress(ConfigError):  # wrong words show below, in every run
        experiment_name = compose(lines[points[0].name]).config.trainer.experiment_name
    name = experiment_name or f"sweep_{dated_name()}"
    composed = _of_each(
        list(lines),
        len(points),
        lambda point: compose([*lines[point], f"trainer.experiment_name={overrides.quoted(f'{name}/{point}')}"]),
    )
    folders = {str(Path(run.config.trainer.default_local_dir).expanduser()) for run in composed.values()}
    if len(folders) > 1:
        raise ConfigError(f"--multirun: the runs of a sweep lie in one folder, not in {' and '.join(sorted(folders))}")
    if draws:
        points, composed = [], {}
    if "hydra/sweeper=halving" in hydras and len({point.setting for point in points}) < 2:
        raise ConfigError("hydra/sweeper=halving: all runs differ by their seeds alone, and none is a better setting")
    folder = Path(folders.pop()) / name
    place = [f"hydra.sweep.dir={overrides.quoted(str(folder))}", "hydra.sweep.subdir=."]
    task = RunPoint(folder, options, frozenset([*axes.values, *axes.drawn]))
    defaults = [word for plugin, word in _DEFAULTS.items() if plugin in hydras]
    words = [*defaults, *line.words, *axes.words, *place]
    return Sweep(folder, points, composed, experiment_name is not None, task, words)


def _problems_of(axes: overrides.Axes, line: overrides.Line, hydras: Sequence[str], draws: bool) -> list[str]:
    problems = []
    if "trainer.experiment_name" in axes.values:
        problems.append("trainer.experiment_name: a sweep has one name, and its runs are named after their values")
    if not axes.values and not axes.drawn:
        problems.append("--multirun: no setting has several values; write them with commas, such as seed=1,2,3")
    if axes.drawn and not draws:
        problems += [
            f"{key}={text}: a sweep needs single values: {key}=1,2,3 or {key}=range(1,4)" for key, text in axes.drawn.items()
        ]
    runs = math.prod(map(len, axes.values.values()))
    if runs > overrides.MOST_RUNS and not draws:
        problems.append(f"--multirun: {runs:,} runs; at most {overrides.MOST_RUNS:,}")
    for word, package in _PLUGINS.items():
        if word in hydras and (find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{package}") is None):
            problems.append(f"{word}: is not installed; python -m pip install 'grpo_rl[sweep]'")
    secret = [word.partition("=")[0] for word in line.words if overrides.is_secret(word) and "${" not in word]
    # Hydra and its launchers write the words down.
    problems += [f"{key.lstrip('+')}: a sweep's words are written to files; give it as '${{oc.env:NAME}}'" for key in secret]
    return problems
