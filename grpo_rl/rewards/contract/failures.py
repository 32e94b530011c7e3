"""Failures of reward functions: three kinds, each with its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_rl.config.secrets import redact
from grpo_rl.errors import RewardError

TIMEOUT = "reward_timeout"
"""The failure of a call that took longer than `reward.timeout_s`."""
ERROR = "reward_error"
"""The failure of a function that raised, or whose process died."""
INVALID = "reward_invalid"
"""The failure of a value that is no reward: not a finite number, or a list of the wrong length."""
KINDS = (TIMEOUT, ERROR, INVALID)
CALLED = "; it is called as "
"""The words in a cause before the interface of a user's function."""
SHOWN_CAUSES = 3
LONGEST_CAUSE = 2000
"""Characters of a cause that are kept: an exception's text may hold a whole response."""


class RewardFailure(RewardError):
    """An error: one response could not be scored; `kind` is one of `KINDS`."""

    def __init__(self, kind: str, cause: str) -> None:
        assert kind in KINDS
        self.kind, self.cause = kind, shortened(cause)
        super().__init__(self.cause)

    def at(self, place: str) -> RewardFailure:
        """The same failure with the function and the rollout before its cause."""
        return RewardFailure(self.kind, f"{place}: {self.cause}")


def shortened(cause: str) -> str:
    """The cause without secrets, and with its middle left out where it is too long to keep."""
    cause = redact(cause)
    half = LONGEST_CAUSE // 2
    return cause if len(cause) <= LONGEST_CAUSE else f"{cause[:half]} ... {cause[-half:]}"


def summary(failures: Sequence[tuple[str, str]], total: int) -> str:
    """`3 of 64 rewards failed (2 reward_timeout, 1 reward_error), first: ...` of failures (kind, cause).

    The first cause of each kind comes first; interfaces of users' functions come last, each once.
    """
    counts = Counter(kind for kind, _ in failures)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    of_each_kind: dict[str, str] = {}
    for kind, cause in failures:
        of_each_kind.setdefault(kind, cause)
    causes = list(dict.fromkeys([*of_each_kind.values(), *(cause for _, cause in failures)]))[:SHOWN_CAUSES]
    parts = [cause.partition(CALLED) for cause in causes]
    interfaces = dict.fromkeys(called + interface for _, called, interface in parts)
    shown = "; ".join(cause for cause, _, _ in parts) + "".join(interfaces)
    return f"{len(failures)} of {total} rewards failed ({kinds}), first: {shown}"
