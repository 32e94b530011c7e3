"""A reward process: `python -m grpo_rl.rewards.runtime.reward_process_main CHANNEL PARENT`, started by `worker.py` only.

It loads no torch, gets the names of the functions to call, and answers on its channel only; what functions
print goes to the log that its parent keeps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_rl.config.schema.reward import CustomRewardConfig, RewardConfig
from grpo_rl.processes.inside import Parent, serve
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import INVALID, Component, RewardFailure, RewardResult, Sample, call, call_batch

WARM_UP = (("\\boxed{}\n#### 1", "\\frac{3}{4}"), ("\\boxed{2\\sqrt{x}+\\sin y}\n#### 1", "\\sin y+2\\sqrt{x}"))
"""Harmless responses and truths with which rules load what they need, before a deadline runs."""


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    """Load the functions, and return what answers a request: each of its calls, in their order."""
    components = {component.name: component for component in _components(setup["reward"])}
    _warm_up(list(components.values()), setup["data_sources"])

    def handle(request: dict[str, Any]) -> None:
        chosen = [components[name] for name in request["functions"]]
        for samples in request["calls"]:
            for answer in _answers(chosen, [Sample(*fields) for fields in samples], request.get("timed", False)):
                try:
                    parent.send(answer)
                except (TypeError, ValueError) as error:  # what cannot be sent
                    parent.send(_one(RewardFailure(INVALID, f"the result holds what cannot be read: {error}")))
                    break
                if answer.get("exit"):
                    os._exit(0)

    return handle


def _components(reward: dict[str, Any]) -> list[Component]:
    custom = CustomRewardConfig(**reward.pop("custom_reward_function"))
    return RewardFunction.from_config(RewardConfig(custom_reward_function=custom, **reward)).components


def _answers(components: Sequence[Component], samples: Sequence[Sample], timed: bool) -> Iterator[dict[str, Any]]:
    """One message per function, in their order; the first that fails is the last."""
    for component in components:
        started = time.perf_counter()
        failure: RewardFailure | None = None
        try:
            if component.batched:
                answer: dict[str, Any] = {"answers": [_one(result) for result in call_batch(component, samples)]}
            else:
                answer = _one(call(component, samples[0]))
        except RewardFailure as error:
            failure = error
            answer = _one(error) | {"exit": isinstance(error.__cause__, MemoryError)}
        if timed:
            answer["seconds"] = time.perf_counter() - started
        yield answer
        if failure is not None:
            return


def _one(result: RewardResult | RewardFailure) -> dict[str, Any]:
    if isinstance(result, RewardFailure):
        return {"failure": result.kind, "cause": result.cause}
    return {"result": result.plain()}


def _warm_up(components: Sequence[Component], data_sources: Sequence[str]) -> None:
    """Call the registered functions once with each data source; their results do not matter."""
    for component in components:
        for data_source in () if component.own else data_sources:
            for text, truth in WARM_UP:
                with contextlib.suppress(RewardFailure):
                    call(component, Sample(data_source, text, truth, {}))


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
