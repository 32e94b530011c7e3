"""The exceptions a user can meet, each with the exit code the program ends with."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator

LIBRARIES = (os.path.join(os.path.dirname(__file__), ""), os.path.join(os.path.dirname(os.__file__), ""), "<")
"""Beginnings of the paths of code that is no user's; "<" is code without a file."""

SETUP = "bash scripts/setup.sh makes one with all that is needed, .venv: start with .venv/bin/python"

Problems = Iterator[str]
"""What is wrong with a configuration, a line each: key, value, rule and remedy."""

EXIT_CODES = {
    0: ("done", "nothing"),
    2: ("the configuration is refused", "mend the keys that are named; nothing was started"),
    3: ("the data cannot be used", "mend the file and row that are named"),
    4: ("a checkpoint cannot be written, read or trusted", "make room, or choose another one with trainer.resume_from_path"),
    5: (
        "a reward function, or another function of yours, failed",
        "mend the function; the same command goes on from the last commit",
    ),
    6: ("a worker or the cluster failed", "read the log that is named; the same command goes on from the last commit"),
    70: ("an error of ours, or training that diverged", "the traceback is in the file that is named; please report it"),
    75: (
        "stopped by a signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1), and saved",
        "start the same command again: it goes on where it stopped",
    ),
    76: (
        "stopped by an alarm of the doctor that trainer.stop_on names",
        "read what it says, and change what it names; the same command goes on from the checkpoint that the last line names",
    ),
    130: ("interrupted before the run began, or by a second Ctrl-C", "the same command goes on from the last commit"),
    137: (
        "the run's controller was killed, by somebody (kill -9) or by the kernel where memory ran out; 128 + N: by signal N",
        "the same command goes on from the last commit",
    ),
}


class GrpoRlError(Exception):
    """An error whose message is meant for the user: the value, the rule, what to do."""

    exit_code: int = 70
    where: str = ""
    """The step and phase of the training."""
    advice: str = ""


class ConfigError(GrpoRlError):
    """`problems` holds every problem of the configuration."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(GrpoRlError):
    """The data cannot be used, or nothing can be learnt from them."""

    exit_code = 3


class CheckpointError(GrpoRlError):
    exit_code = 4


class RewardError(GrpoRlError):
    exit_code = 5


class NoRewardError(RewardError):
    """None of the responses that were scored together has a reward."""


class FunctionError(GrpoRlError):
    """A user's own estimator, loss, average, KL or schedule failed."""

    exit_code = 5


class ClusterError(GrpoRlError):
    """A worker or the cluster failed."""

    exit_code = 6


class OutOfMemory(ClusterError):
    """A worker's process ran out of memory. It is alive, and a smaller piece of work may do."""


class Preempted(BaseException):
    """A signal asked the run to stop; no Exception, so that handlers of failures do not catch it."""

    exit_code: int = 75


class DivergedError(GrpoRlError):
    """The loss or the gradient was not finite more often than the configuration allows."""


class StoppedByAlarm(GrpoRlError):
    exit_code = 76


class WeightVersionError(GrpoRlError):
    """A rollout was sampled with other weights than the controller asked for."""


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust panicked: its error is no Exception."""
    return type(error).__name__ == "PanicException"


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, GrpoRlError | Preempted):
        return error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return ClusterError.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 70


def headline(error: BaseException) -> str:
    """Return the cause in one line: step and phase, the first line of the message, the advice."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    if not isinstance(error, GrpoRlError | Preempted):
        text = f"{type(error).__name__}: {text}"
    if isinstance(error, ModuleNotFoundError):
        text = f"{text} in the environment of {sys.executable}; {SETUP}"
    where = getattr(error, "where", "")
    advice = getattr(error, "advice", "")
    return (f"{where}: {text}" if where else text) + (f"; {advice}" if advice else "")


def details(error: BaseException, limit: int = 20) -> list[str]:
    """Return at most `limit` lines below the headline, and log files; lines with "|" stay in the logs."""
    lines = [line.strip() for line in str(error).strip().splitlines()[1:]]
    logs = [line for line in lines if line.startswith("log:")]
    causes = [line for line in lines if line and not line.startswith(("|", "log:"))]
    rest = [f"... and {len(causes) - limit} more lines"] if len(causes) > limit else []
    return [*causes[:limit], *rest, *logs]


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """Return ` Did you mean A or B?` with the nearest of the known names, or nothing."""
    nearest = difflib.get_close_matches(name[:200], list(known), n=most, cutoff=0.5)
    return f" Did you mean {' or '.join(nearest)}?" if nearest else ""


def users_line(error: BaseException) -> tuple[str, int, str] | None:
    """Return file, line and function of the last line of a user's own file that the exception passed."""
    place, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES) and "site-packages" not in code.co_filename:
            place = code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next
    return place


def raised_in(error: BaseException) -> str:
    """Return `users_line` as ` (FILE, line N, in NAME)`; "" without one."""
    place = users_line(error)
    return "" if place is None else f" ({place[0]}, line {place[1]}, in {place[2]})"
