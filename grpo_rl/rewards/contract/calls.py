"""Calls of reward functions: plain or async, one response at a time or many."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_rl.errors import raised_in
from grpo_rl.rewards.contract.failures import CALLED, ERROR, INVALID, RewardFailure
from grpo_rl.rewards.contract.results import Result, read_result

if TYPE_CHECKING:
    import asyncio

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
RETURNED = "a finite number or a dict with 'score'"


class Sample(NamedTuple):
    """The arguments of a reward function for one response."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Component:
    """One summand of the reward."""

    name: str
    factor: float
    function: Callable[..., Any]
    batched: bool = False
    """True where the function takes lists, one entry per response, and returns a list."""
    own: bool = False
    """True for a user's function: it is called to score only, as a call may cost something."""

    @property
    def interface(self) -> str:
        """Return the end of a failure's cause: how a user's function is called, and what it returns; "" for one of ours."""
        if not self.own:
            return ""
        arguments, returned = (BATCH_ARGUMENTS, f"a list of {RETURNED}") if self.batched else (ARGUMENTS, RETURNED)
        return f"{CALLED}function({', '.join(f'{name}=...' for name in arguments)}) and returns {returned}"


def call(component: Component, sample: Sample) -> Result:
    """The result for one response. Raises RewardFailure for whatever the function does but return a reward."""
    if component.batched:
        [result] = call_batch(component, [sample])
        if isinstance(result, RewardFailure):
            raise result
        return result
    return _read(_returned(component, dict(zip(ARGUMENTS, sample, strict=True))))


def call_batch(component: Component, samples: Sequence[Sample]) -> list[Result | RewardFailure]:
    """The results of one call for all responses. Raises RewardFailure where the call itself fails, which no response survives."""
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
    return [_read_or_failure(value) for value in returned]


def _returned(component: Component, arguments: dict[str, Any]) -> Any:
    try:
        returned = component.function(**arguments)
        return _event_loop().run_until_complete(_awaited(returned)) if inspect.isawaitable(returned) else returned
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code: whatever it raises is reported with its place
        cause = f"{type(error).__name__}: {error}{raised_in(error)}"
        raise RewardFailure(ERROR, cause + component.interface) from error


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, so that a function may keep its connections."""
    import asyncio  # a sixth of a reward process's start, for functions that are async

    return asyncio.new_event_loop()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _read_or_failure(value: Any) -> Result | RewardFailure:
    try:
        return _read(value)
    except RewardFailure as failure:
        return failure


def _read(value: Any) -> Result:
    """Read a value as `read_result` does. Even that may fail: a dict or a number may be of the user's own class."""
    try:
        return read_result(value)
    except RewardFailure:
        raise
    except (Exception, SystemExit) as error:
        raise RewardFailure(
            INVALID, f"a {type(value).__name__} that cannot be read: {type(error).__name__}: {error}"
        ) from error
