"""Training from Python: the main command in a process of its own (`train`), or a loop of one's own in this
process (`session`).

`train` has a process of its own because a run handles signals, switches garbage collection, and starts Ray.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from grpo_rl import errors
from grpo_rl.config.compose import Composed, as_words, compose
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ClusterError, ConfigError, GrpoRlError, exit_code_of
from grpo_rl.run_folder import Run
from grpo_rl.telemetry.rundir import dated_name

if TYPE_CHECKING:
    from grpo_rl.trainer.session import Session

GRACE_MARGIN_S = 30.0
"""Seconds beyond trainer.grace_s."""
_INTERRUPTED = 130


def train(overrides: Sequence[str], *, quiet: bool = False) -> Run:
    """Train as `python -m grpo_rl.main` does with these words, and return the finished run.

    `overrides` are the words of the command line: `recipe=arithmetic/grpo`,
    `trainer.total_training_steps=20`. With `quiet` only logs/console.log has the output. A named run
    (trainer.experiment_name) that was stopped goes on from its newest checkpoint.

    Raises ConfigError with every problem before anything starts, and otherwise what ended the run: DataError,
    RewardError, FunctionError, CheckpointError, ClusterError, DivergedError, or GrpoRlError for an error of
    the program; a note names the run's folder. An interrupt lets the run save and raises KeyboardInterrupt;
    another process's signal raises Preempted.
    """
    words, composed = _checked(overrides)
    trainer = composed.config.trainer
    name = trainer.experiment_name
    if name is None:
        name = dated_name()
        words.append(f"trainer.experiment_name={name}")
    folder = Path(trainer.default_local_dir).expanduser() / name
    with tempfile.TemporaryDirectory(prefix="grpo_rl-") as temporary:
        error_file = Path(temporary) / "error.json"
        command = [sys.executable, "-m", "grpo_rl.api", str(error_file), *words]
        code = _run(command, quiet, trainer.grace_s + GRACE_MARGIN_S)
        if code != 0:
            raise _raised(code, error_file, folder)
    return Run(folder)


@contextmanager
def session(*words: str | Mapping[str, Any]) -> Iterator[Session]:
    """Start the roles that the words of a command line describe, and yield their verbs for a loop in this
    process.

        with grpo_rl.session("recipe=arithmetic/grpo", "trainer.total_training_steps=20") as s:
            for step in s.steps():
                s.sync_weights()
                ...

    A configuration that Hydra has composed (`hydra.compose`, the argument under `@hydra.main`) may take the
    place of words. A named run goes on from its newest checkpoint. Leaving the block commits the last state
    and exports the model. Sessions may be open at once in one process, each with a run's folder of its own; they
    share one Ray, and the one that is opened first is left last.

    Raises what `train` raises; Preempted after Ctrl-C or another signal, with the state saved. A lost worker
    ends the session; the same words go on from the newest checkpoint. In a notebook a second Ctrl-C ends the
    kernel.
    """
    from grpo_rl.main import begin, leaving_results, opened, prepare
    from grpo_rl.plan.make import make_plan

    _, composed = _checked(words)
    schedule = composed.config.trainer.schedule
    if schedule != "sync" and ":" not in schedule:
        raise ConfigError(
            f"trainer.schedule={schedule}: the loop over a session is the schedule; leave the key out, or name that loop"
        )
    plan = make_plan(composed)
    with opened(composed, plan) as course, ExitStack() as stack:
        prepare(course)
        training = begin(course, stack)
        with leaving_results(course, training), training.guarded():
            yield training.session
            training.leave()


def _checked(overrides: Sequence[str | Mapping[str, Any]]) -> tuple[list[str], Composed]:
    """Raises ConfigError with all problems that need no look at model or data."""
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides={overrides!r}: is one text; give a list of words, such as [{overrides.split()[0]!r}, ...]"
        )
    with tempfile.TemporaryDirectory(prefix="grpo_rl-") as folder:
        words = as_words(overrides, Path(folder))
        composed = compose(words)
    if composed.config.trainer.dry_run:
        raise ConfigError(
            "trainer.dry_run=true: trains nothing; python -m grpo_rl.main trainer.dry_run=true ... prints the plan"
        )
    return words, composed


def _run(command: list[str], quiet: bool, grace_s: float) -> int:
    # A notebook and a test put objects of their own in the place of the standard output, which no process can inherit.
    is_plain = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    if is_plain and not quiet:
        sys.stdout.flush()
        return _wait(subprocess.Popen(command), grace_s)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if process.stdout is None:
        return _wait(process, grace_s)
    reader = threading.Thread(target=_pass_on, args=(process.stdout, sys.stdout.write), name="run-output", daemon=True)
    reader.start()
    try:
        return _wait(process, grace_s)
    finally:
        # What the run printed last is still in the pipe; a process that it left behind may hold the other end open.
        reader.join(5.0)


def _pass_on(lines: IO[str], write: Callable[[str], Any]) -> None:
    with lines:
        for line in lines:
            write(line)


def _wait(process: subprocess.Popen[Any], grace_s: float) -> int:
    """An interrupt asks the run to stop; a second one, or the end of the grace period, kills it."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal has sent SIGINT to the run as well, and two of them would end it without saving: hence SIGTERM.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=grace_s)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
            process.wait(timeout=grace_s)
        raise


def _raised(code: int, error_file: Path, folder: Path) -> BaseException:
    error: BaseException
    try:
        error = _rebuilt(json.loads(error_file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = ClusterError(f"the process of the run {how}, without a word; the same call goes on from the last commit")
    if folder.is_dir():
        error.add_note(f"run folder: {folder}")
    return error


def _rebuilt(record: dict[str, Any]) -> BaseException:
    if record["exit_code"] == _INTERRUPTED:
        return KeyboardInterrupt()
    kind = getattr(errors, record["kind"])
    error: BaseException = kind(record["texts"] if kind is ConfigError else record["texts"][0])
    if isinstance(error, GrpoRlError):
        error.where, error.advice = record["where"], record["advice"]
    for note in record["notes"]:
        error.add_note(note)
    return error


def _write_error(file: Path, error: BaseException) -> None:
    """Write the exception that ended the run, as the nearest class of `errors.py`, for `_raised`."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    kind, texts = next(kinds, ""), getattr(error, "problems", [str(error)])
    record = {
        "kind": kind or GrpoRlError.__name__,
        "texts": [redact(text if kind else f"unexpected {type(error).__name__}: {text}") for text in texts],
        "where": getattr(error, "where", ""),
        "advice": getattr(error, "advice", ""),
        "notes": [redact(note) for note in getattr(error, "__notes__", [])],
        "exit_code": exit_code_of(error),
    }
    file.write_text(json.dumps(record), encoding="utf-8")


def _child() -> int:
    from grpo_rl import main

    main.error_handlers.append(partial(_write_error, Path(sys.argv.pop(1))))
    return main.main()


if __name__ == "__main__":
    sys.exit(_child())
