"""A reward process: `python -m grpo_rl.rewards.runtime.reward_process_main CHANNEL PERMITS PARENT`, started by `reward_process.py` only.

It loads no torch, gets the names of the functions to call, and answers on its channel only; what functions
print goes to the log that its parent keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_rl.child_processes import outlive_stop_signals
from grpo_rl.config.schema.reward import CustomRewardConfig, RewardConfig
from grpo_rl.config.secrets import remember_environment
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract.calls import Component, Sample, call, call_batch
from grpo_rl.rewards.contract.failures import INVALID, RewardFailure, shortened
from grpo_rl.rewards.contract.results import Result
from grpo_rl.rewards.runtime.messages import encode, frame, receive

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WARM_UP = (("\\boxed{}\n#### 1", "\\frac{3}{4}"), ("\\boxed{2\\sqrt{x}+\\sin y}\n#### 1", "\\sin y+2\\sqrt{x}"))
"""Harmless responses and truths with which rules load what they need, before a deadline runs."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent is gone; never returns."""
    descriptor, permits, parent = map(int, arguments)
    remember_environment()
    _die_with_parent()
    # Orphans come to this process, so that whatever ends it finds them.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    channel = socket.socket(fileno=descriptor)
    setup = receive(channel)
    if setup is None:
        os._exit(1)
    _limit(setup["memory_limit"])
    own_pid = os.getpid()

    def in_a_fork() -> None:
        channel.close()
        _die_with_parent()

    os.register_at_fork(after_in_child=in_a_fork)
    outlive_stop_signals()
    try:
        components = {component.name: component for component in _components(setup["reward"])}
    except BaseException as error:  # a user's file may even exit: the parent needs the cause
        channel.sendall(frame(encode({"failed": shortened(f"{type(error).__name__}: {error}")})))
        os._exit(1)
    _warm_up(list(components.values()), setup["data_sources"])
    channel.sendall(frame(encode({"ready": True})))
    while (request := receive(channel)) is not None:
        chosen = [components[name] for name in request["functions"]]
        for number, samples in enumerate(request["calls"]):
            if number and not _is_permitted(permits):
                break
            for answer in _answers(chosen, [Sample(*fields) for fields in samples], request.get("timed", False)):
                if os.getpid() != own_pid:
                    os._exit(0)  # a function that forked, in the fork
                channel.sendall(answer)
    os._exit(0)


def _is_permitted(permits: int) -> bool:
    """Return whether the next call is this process's, which it is from then on; False where its parent has taken it back."""
    try:
        return bool(os.read(permits, 1))
    except BlockingIOError:
        return False


def _components(reward: dict[str, Any]) -> list[Component]:
    custom = CustomRewardConfig(**reward.pop("custom_reward_function"))
    return RewardFunction.from_config(RewardConfig(custom_reward_function=custom, **reward)).components


def _answers(components: Sequence[Component], samples: Sequence[Sample], timed: bool) -> Iterator[bytes]:
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
        try:
            message = encode(answer)
        except (TypeError, ValueError) as error:  # what cannot be sent
            failure = RewardFailure(INVALID, f"the result holds what cannot be read: {error}")
            message = encode(_one(failure))
        yield frame(message)
        if answer.get("exit"):
            os._exit(0)
        if failure is not None:
            return


def _one(result: Result | RewardFailure) -> dict[str, Any]:
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


def _limit(memory: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _libc_prctl() -> Callable[..., int]:
    prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    return prctl


_PRCTL = _libc_prctl()


def _prctl(option: int, value: int) -> None:
    _PRCTL(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
