"""The exceptions a user can meet, each with the exit code the program ends with."""

from __future__ import annotations


class GrpoRlError(Exception):
    """Base of every error whose message is meant for the user: the value, the rule, what to do."""

    exit_code = 70


class ConfigError(GrpoRlError):
    """The configuration cannot be run. `problems` holds every one that was found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(GrpoRlError):
    """The data cannot be used: file, row, column, what was found, what was expected; or nothing in them can be learnt from."""

    exit_code = 3


class CheckpointError(GrpoRlError):
    """A checkpoint cannot be written, found, or trusted."""

    exit_code = 4


class RewardError(GrpoRlError):
    """A reward function failed or returned something that is not a reward."""

    exit_code = 5


class ClusterError(GrpoRlError):
    """A worker or the cluster failed: which worker, in which phase, at which step, and why."""

    exit_code = 6


class WeightVersionError(GrpoRlError):
    """A rollout was sampled with other weights than the controller asked for."""
