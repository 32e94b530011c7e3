"""What a reward function is called with, what it may return, and the three kinds of failure."""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_rl.config.secrets import redact
from grpo_rl.control_words import outside
from grpo_rl.errors import RewardError, raised_in
from grpo_rl.frozen import frozen

if TYPE_CHECKING:  # types imports torch, which a reward process does without
    import asyncio


TIMEOUT = "reward_timeout"
ERROR = "reward_error"
INVALID = "reward_invalid"
"""Not a finite float32, or a list of the wrong length."""
LARGEST_REWARD = 3.4028234663852886e38
KINDS = (TIMEOUT, ERROR, INVALID)
CALLED = "; it is called as "
SHOWN_CAUSES = 3
LONGEST_CAUSE = 2000
"""Characters of a cause: an exception's text may hold a whole response."""


class RewardFailure(RewardError):
    """`kind` is one word that ends in _timeout, _error or _invalid."""

    def __init__(self, kind: str, cause: str) -> None:
        self.kind, self.cause = kind, shortened(cause)
        super().__init__(self.cause)

    def __reduce__(self) -> tuple[type[RewardFailure], tuple[str, str]]:
        return RewardFailure, (self.kind, self.cause)

    def at(self, place: str) -> RewardFailure:
        return RewardFailure(self.kind, f"{place}: {self.cause}")


def shortened(cause: str) -> str:
    cause = outside(redact(cause))
    half = LONGEST_CAUSE // 2
    return cause if len(cause) <= LONGEST_CAUSE else f"{cause[:half]} ... {cause[-half:]}"


def summary(failures: Sequence[tuple[str, str]], total: int) -> str:
    """`3 of 64 rewards failed (2 reward_timeout, 1 reward_error), first: ...` of (kind, cause)."""
    counts = Counter(kind for kind, _ in failures)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    first_causes = [next(cause for other, cause in failures if other == kind) for kind in counts]
    causes = list(dict.fromkeys([*first_causes, *(cause for _, cause in failures)]))[:SHOWN_CAUSES]
    parts = [cause.partition(CALLED) for cause in causes]
    interfaces = dict.fromkeys(called + interface for _, called, interface in parts)
    text = "; ".join(cause for cause, _, _ in parts) + "".join(interfaces)
    return f"{len(failures)} of {total} rewards failed ({kinds}), first: {text}"


class RewardResult(NamedTuple):
    """The score is before the component's factor."""

    score: float
    values: Mapping[str, float] = MappingProxyType({})
    """Further numbers, logged as `name/key`."""
    steps: Any = None
    """A function's value of `steps`, unread, or a model's rewards of steps, on tokens."""

    def parts(self, name: str) -> dict[str, float]:
        return {name: self.score} | {f"{name}/{key}": number for key, number in self.values.items()}


Outcome = RewardResult | RewardFailure


def message_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome on its way between two processes."""
    if isinstance(outcome, RewardFailure):
        return {"failure": outcome.kind, "cause": outcome.cause}
    return {"score": outcome.score, "values": dict(outcome.values), "steps": outcome.steps}


def outcome_of(message: Any, kinds: tuple[str, str, str]) -> Outcome:
    """Check a message again: a user's function or parser may have written it. `kinds`: timeout, error, invalid."""
    _, _, invalid = kinds
    try:
        if message.get("failure") in kinds:
            return RewardFailure(message["failure"], str(message.get("cause")))
        values = {outside(str(name)): number_of(number, str(name)) for name, number in message["values"].items()}
        return RewardResult(number_of(message["score"], "score"), values, message.get("steps"))
    except RewardFailure as failure:
        return RewardFailure(invalid, failure.cause)
    except (LookupError, AttributeError, TypeError):
        return RewardFailure(invalid, "the process answered something else")


def read_result(value: Any) -> RewardResult:
    """Raises RewardFailure, also if reading fails: the value may be of a user's class."""
    try:
        value = _item(value)
        if not isinstance(value, Mapping):
            return RewardResult(number_of(value, "score"))
        if "score" not in value:
            raise RewardFailure(INVALID, f"the dict has no 'score', it has {', '.join(map(str, value)) or 'nothing'}")
        numbers = {
            outside(str(key)): number_of(number, str(key))
            for key, number in ((key, _item(number)) for key, number in value.items())
            if key not in ("score", "steps") and isinstance(number, Real)  # text is for the user's own logs
        }
        return RewardResult(number_of(value["score"], "score"), numbers, value.get("steps"))
    except RewardFailure:
        raise
    except (Exception, SystemExit) as error:
        cause = f"a {type(value).__name__} that cannot be read: {type(error).__name__}: {error}"
        raise RewardFailure(INVALID, cause) from error


def _item(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def number_of(value: Any, key: str) -> float:
    value = _item(value)
    if not isinstance(value, Real):
        raise RewardFailure(INVALID, f"{key} is {value!r:.200} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(INVALID, f"{key} is {number}, not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise RewardFailure(INVALID, f"{key} is {number:g}, beyond float32, whose largest number is {LARGEST_REWARD:g}")
    return number


class Sample(NamedTuple):
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


ARGUMENTS = Sample._fields
BATCH_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)
RETURNED = "a finite number or a dict with 'score'"


@frozen
class Component:
    name: str
    factor: float
    function: Callable[..., Any]
    batched: bool = False
    """Takes lists, one entry per response, and returns a list."""
    own: bool = False
    """A user's function: it is called to score only, as a call may cost something."""

    @property
    def interface(self) -> str:
        if not self.own:
            return ""
        arguments, returned = (BATCH_ARGUMENTS, f"a list of {RETURNED}") if self.batched else (ARGUMENTS, RETURNED)
        return f"{CALLED}function({', '.join(f'{name}=...' for name in arguments)}) and returns {returned}"


def call(component: Component, sample: Sample) -> RewardResult:
    return read_result(_returned(component, sample._asdict()))


def call_batch(component: Component, samples: Sequence[Sample]) -> list[Outcome]:
    """Raises RewardFailure if the call itself fails."""
    columns = [list(column) for column in zip(*samples, strict=True)]
    returned = _returned(component, dict(zip(BATCH_ARGUMENTS, columns, strict=True)))
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardFailure(
            INVALID, f"a batched function returns a list of {len(samples)}, and this is a {type(returned).__name__}"
        )
    if len(returned) != len(samples):
        raise RewardFailure(INVALID, f"it returned {len(returned)} results for {len(samples)} responses")
    results: list[Outcome] = []
    for value in returned:
        try:
            results.append(read_result(value))
        except RewardFailure as failure:
            results.append(failure)
    return results


def _returned(component: Component, arguments: dict[str, Any]) -> Any:
    try:
        returned = component.function(**arguments)
        return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code: whatever it raises is reported with its place
        cause = f"{type(error).__name__}: {error}{raised_in(error)}"
        raise RewardFailure(ERROR, cause + component.interface) from error


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: a function may keep its connections."""
    import asyncio  # a sixth of a reward process's start, for functions that are async

    return asyncio.new_event_loop()
