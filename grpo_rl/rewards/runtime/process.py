"""A reward process: what it is asked, what its answers mean, and, below, what runs in it, without torch.

It answers on its channel only; what functions print goes to the log that its parent keeps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_rl.config.schema.reward import CustomRewardConfig, RewardConfig
from grpo_rl.processes.child import Child, OutputLog, Parent, encode, serve
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import (
    ERROR,
    INVALID,
    KINDS,
    TIMEOUT,
    Component,
    Outcome,
    RewardFailure,
    Sample,
    call,
    call_batch,
    message_of,
    outcome_of,
)


@dataclass(slots=True, eq=False)
class Job:
    """One call: of all functions of single responses for one, or of one function of lists for one or many."""

    samples: Sequence[Callable[[], Sample]]
    """Return the arguments of the functions for each response: a text may lie in another process until it is sent."""
    functions: Sequence[str]
    batched: bool = False
    size: int = 0  # characters of a single response
    outcomes: list[Outcome] = field(default_factory=list)
    """One of each component, shorter after a failure; of a function of lists, one for each response."""
    failed_as_whole: bool = False
    """True if the call of a function of lists gave nothing, as opposed to single results that are none."""
    done: bool = False
    seconds: float = 0.0  # the time that the functions took

    @property
    def is_joint(self) -> bool:
        return len(self.samples) != 1

    def arguments(self) -> list[Sample]:
        """The samples with their texts, wherever these lie."""
        samples = [sample() for sample in self.samples]
        return [sample._replace(solution_str=str(sample.solution_str)) for sample in samples]

    def settle(self, answers: Sequence[Any], missing: RewardFailure | None = None) -> None:
        """Read the answers of the functions in their order; the first one without an answer failed as `missing` says."""
        messages = [answer if isinstance(answer, dict) else {} for answer in answers]
        self.seconds += sum(message["seconds"] for message in messages if isinstance(message.get("seconds"), float))
        listed = messages[0].get("answers") if self.batched and messages else None
        if isinstance(listed, list) and len(listed) == len(self.samples):
            messages, missing = listed, None
        self.outcomes = [*(outcome_of(message, KINDS) for message in messages), *([missing] if missing else [])]
        if self.batched and messages is not listed:
            self.failed_as_whole, self.outcomes = True, self.outcomes[:1] * len(self.samples)


SENT = ("functions", "audit", "batched", "function_kwargs", "timeout_s")
"""The settings that a process reads."""


class RewardProcess:
    """A reward process. It dies with the thread that started it: start it and ask it in the same one."""

    def __init__(self, config: RewardConfig, data_sources: Sequence[str], log: OutputLog) -> None:
        limit = config.memory_limit_gb
        setup = {
            "reward": {name: getattr(config, name) for name in SENT},
            "custom": asdict(config.custom_reward_function),
            "data_sources": sorted(set(data_sources)),
            "memory_limit": None if limit is None else int(limit * 2**30),
        }
        self.child = Child("grpo_rl.rewards.runtime.process", setup, log)
        self._timeout_s = config.timeout_s
        self._num_answered = 0

    def ask(self, jobs: Sequence[Job], told: Callable[[Sequence[Job]], None] = lambda jobs: None) -> Sequence[Job]:
        """Make these calls, of the same functions, in one message; return those that have no outcome because
        of another one.

        `told` is called with jobs that are settled. A call has `reward.timeout_s` from the end of the one
        before it; at that deadline the process is killed. If the process ends by itself, the call that it was
        at is settled only if it was the first: an earlier one may have broken the process.
        """
        sent, samples, settled = [], [], []
        for job in jobs:
            try:
                samples.append(encode(job.arguments()))
                sent.append(job)
            except (TypeError, ValueError) as error:
                cause = f"ground_truth or extra_info cannot be sent to a reward function: {error}"
                job.settle([], RewardFailure(ERROR, cause))
                settled.append(job)
        functions = encode(list(jobs[0].functions))
        num_done, answers, started = 0, list[Any](), time.monotonic()
        try:
            if sent:
                self.child.send(b'{"functions": %b, "calls": [%b]}' % (functions, b", ".join(samples)), self._timeout_s)
            while num_done < len(sent):
                answers, started = [], time.monotonic()
                goes_on = self._receive(answers, len(sent[num_done].functions))
                sent[num_done].settle(answers)
                settled.append(sent[num_done])
                num_done += 1
                if not goes_on:
                    self.child.kill()
                    break
                if not self.child.has_message:  # many that arrive together are told of at once
                    told(settled)
                    settled = []
        except (OSError, EOFError, ValueError) as error:
            at = sent[num_done]
            if isinstance(error, TimeoutError):
                size = sum(len(sample.solution_str) for sample in at.arguments())
                what = f"{len(at.samples)} responses" if at.is_joint else "response"
                took = f"took longer than reward.timeout_s={self._timeout_s:g} ({what} of {size} characters)"
                missing = RewardFailure(TIMEOUT, took)
            else:
                missing = RewardFailure(ERROR, self.child.how_it_ended(error))
            self.child.kill()
            at.seconds = time.monotonic() - started
            if isinstance(error, TimeoutError) or not self._num_answered:
                at.settle(answers, missing)
                settled.append(at)
                num_done += 1
        told(settled)
        return sent[num_done:]

    def _receive(self, answers: list[Any], num_answers: int) -> bool:
        """Receive a call's answers, of which a failure is the last; return whether the process goes on after it."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            answer = self.child.receive(deadline - time.monotonic())
            answers.append(answer)
            failed = isinstance(answer, dict) and "failure" in answer
            if failed or len(answers) == num_answers:
                self._num_answered += 1
                return not (failed and answer.get("exit"))


def spared(failed: Job, ask: Callable[[Sequence[Job]], object]) -> list[Outcome]:
    """Return the outcome of each response from a function of lists; one that makes the call fail costs the
    others nothing.

    If the call with all of them `failed`, the function is called with each alone, and then with all for which
    it did not fail: they get the scores that they would have had without the others. If it fails for none
    alone, all have failed.
    """
    if not (failed.failed_as_whole and failed.is_joint):
        return failed.outcomes
    single_jobs = [Job([sample], failed.functions, batched=True) for sample in failed.samples]
    ask(single_jobs)
    good = [job for job in single_jobs if not isinstance(job.outcomes[0], RewardFailure)]
    if len(good) == len(single_jobs):
        return [
            RewardFailure(failure.kind, f"{failure.cause}; with each response alone it does not fail")
            for failure in failed.outcomes
            if isinstance(failure, RewardFailure)
        ]
    if good:
        joint_job = Job([job.samples[0] for job in good], failed.functions, batched=True)
        ask([joint_job])
        for job, outcome in zip(good, joint_job.outcomes, strict=True):
            job.outcomes = [outcome]
    return [job.outcomes[0] for job in single_jobs]


# ---- inside the process ----------------------------------------------------------------------------------

WARM_UP = (("\\boxed{}\n#### 1", "\\frac{3}{4}"), ("\\boxed{2\\sqrt{x}+\\sin y}\n#### 1", "\\sin y+2\\sqrt{x}"))
"""Responses and truths with which rules load what they need, before a deadline runs."""


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    """Load the functions, and return what answers a request: each of its calls, in their order."""
    config = RewardConfig(custom_reward_function=CustomRewardConfig(**setup["custom"]), **setup["reward"])
    components = {component.name: component for component in RewardFunction.from_config(config).components}
    for component in components.values():
        for data_source in () if component.own else setup["data_sources"]:
            for text, truth in WARM_UP:
                with contextlib.suppress(RewardFailure):
                    call(component, Sample(data_source, text, truth, {}))

    def handle(request: dict[str, Any]) -> None:
        for samples in request["calls"]:
            for name in request["functions"]:
                answer = _answer(components[name], [Sample(*fields) for fields in samples])
                try:
                    parent.send(answer)
                except (TypeError, ValueError) as error:  # what cannot be sent
                    answer = message_of(RewardFailure(INVALID, f"the result holds what cannot be read: {error}"))
                    parent.send(answer)
                if answer.get("exit"):
                    os._exit(0)
                if "failure" in answer:
                    break

    return handle


def _answer(component: Component, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the message with a function's result; after one without memory the process must be replaced."""
    started = time.perf_counter()
    try:
        if component.batched:
            answer: dict[str, Any] = {"answers": [*map(message_of, call_batch(component, samples))]}
        else:
            answer = message_of(call(component, samples[0]))
    except RewardFailure as error:
        answer = message_of(error) | {"exit": isinstance(error.__cause__, MemoryError)}
    return answer | {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
