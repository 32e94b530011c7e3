"""A reward process and what it is asked: calls of functions for responses, and the meaning of its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_rl.config.schema.reward import RewardConfig
from grpo_rl.processes.child import Child, OutputLog, encode
from grpo_rl.rewards.compose import place, sample_of
from grpo_rl.rewards.contract import ERROR, INVALID, KINDS, TIMEOUT, Component, RewardFailure, RewardResult, read_result

if TYPE_CHECKING:  # types imports torch, which trying a function out does without
    from grpo_rl.types import Rollout

Item = TypeVar("Item")
UNSENDABLE = "ground_truth or extra_info cannot be sent to a reward function"
Outcome = RewardResult | RewardFailure


@dataclass(slots=True)
class Reply:
    """The answers to a call: complete, or cut off, or never begun."""

    answers: list[Any] = field(default_factory=list)
    complete: bool = False
    ended: str | None = None
    """The reason why no further answer came: how the process died or was killed; None where all is well."""
    timed_out: bool = False


class RewardProcess:
    """A reward process. It dies with the thread that started it: start it and ask it in the same one."""

    def __init__(self, config: RewardConfig, data_sources: Sequence[str], log: OutputLog) -> None:
        """Start the process; `wait_until_ready` waits for it."""
        custom = config.custom_reward_function
        limit = config.memory_limit_gb
        setup = {
            "reward": {
                "functions": config.functions,
                "audit": config.audit,
                "custom_reward_function": {"path": custom.path, "name": custom.name, "reward_kwargs": custom.reward_kwargs},
                "batched": config.batched,
                "function_kwargs": config.function_kwargs,
                # Options are checked against it.
                "timeout_s": config.timeout_s,
            },
            "data_sources": sorted(set(data_sources)),
            "memory_limit": None if limit is None else int(limit * 2**30),
        }
        self.child = Child("grpo_rl.rewards.runtime.reward_process_main", setup, log)
        self.num_answered = 0
        """Calls that it has answered."""
        self.died_by_itself = False
        """True once it has ended in a request, and was not killed at a deadline."""

    def ask(
        self,
        request: bytes,
        replies: Sequence[Reply],
        num_answers: int,
        timeout_s: float,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a request with one call for each of the `replies`, and fill these in their order.

        `told` is called after each reply that is complete. A call has `num_answers`, fewer where one is a failure, and
        `timeout_s` from the end of the one before it. At that deadline the process is killed, and where it ends before,
        the call that it was at has ended too. Replies behind such a call stay as they were: theirs was not begun.
        """
        reply = replies[0]
        try:
            self.child.send(request, timeout_s)
            for reply in replies:
                if self._receive(reply, num_answers, timeout_s):
                    self.child.kill()
                    return
                if not self.child.has_message:  # many that arrive together are told of at once
                    told()
        except TimeoutError:
            reply.timed_out, reply.ended = True, f"killed after {timeout_s:g} s"
            self.child.kill()
        except (OSError, EOFError, ValueError) as error:
            reply.ended = self.child.how_it_ended(error)
            self.died_by_itself = True
            self.child.kill()

    def _receive(self, reply: Reply, num_answers: int, timeout_s: float) -> bool:
        """Fill one reply; return whether the process ends after it, because it has no memory left."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self.child.receive(deadline - time.monotonic())
            reply.answers.append(answer)
            failed = isinstance(answer, dict) and "failure" in answer
            if failed or len(reply.answers) == num_answers:
                reply.complete = True
                self.num_answered += 1
                return failed and bool(answer.get("exit"))


@dataclass(slots=True, eq=False)
class Job:
    """One call: of all functions of single responses for one, or of a function that takes lists for one or many."""

    rollouts: Sequence[Rollout]
    components: list[Component]
    outcomes: list[list[Outcome]] = field(default_factory=list)
    """One outcome of each component for each rollout; shorter after a failure. Written once, before `done`."""
    failed_as_whole: bool = False
    """True where the call itself gave nothing, as opposed to single results that are none."""
    done: bool = False

    @property
    def is_joint(self) -> bool:
        return len(self.rollouts) != 1

    def settle(self, reply: Reply, timeout_s: float) -> None:
        """Each rollout's outcomes: what was answered, and at the first answer that is missing why it is."""
        rows: list[list[Outcome]] = [[] for _ in self.rollouts]
        for component, answer in zip(self.components, reply.answers, strict=False):
            column = self._column(component, answer)
            for row, rollout, one in zip(rows, self.rollouts, column, strict=True):
                outcome = read_answer(one)
                row.append(outcome.at(place(component.name, rollout)) if isinstance(outcome, RewardFailure) else outcome)
        if reply.ended is not None:
            self.failed_as_whole = True
            name = self.components[len(reply.answers)].name
            for row, rollout in zip(rows, self.rollouts, strict=True):
                row.append(_missing(reply, timeout_s, rollout).at(place(name, rollout)))
        self.outcomes = rows

    def fail(self, failure: RewardFailure) -> None:
        """The same failure for each rollout."""
        self.outcomes, self.failed_as_whole = [[failure] for _ in self.rollouts], True

    def _column(self, component: Component, answer: Any) -> list[Any]:
        if not component.batched:
            return [answer]
        given = answer.get("answers") if isinstance(answer, dict) and "failure" not in answer else None
        if isinstance(given, list) and len(given) == len(self.rollouts):
            return given
        self.failed_as_whole = True
        return [answer] * len(self.rollouts)


def request_for(jobs: Sequence[Job]) -> tuple[bytes, list[Job]]:
    """One message with a call for each of the jobs, which have the same functions, and those jobs.

    A job whose data cannot be sent is left out: it has failed.
    """
    sent, calls = [], []
    for job in jobs:
        try:
            calls.append(encode([sample_of(rollout) for rollout in job.rollouts]))
        except (TypeError, ValueError) as error:
            job.fail(RewardFailure(ERROR, f"{UNSENDABLE}: {error}"))
            job.done = True
        else:
            sent.append(job)
    functions = encode([component.name for component in jobs[0].components])
    return b'{"functions": %b, "calls": [%b]}' % (functions, b", ".join(calls)), sent


def spared(
    items: Sequence[Item],
    failed: Sequence[Outcome],
    alone: Callable[[Sequence[Item]], Sequence[Outcome]],
    together: Callable[[Sequence[Item]], Sequence[Outcome]],
) -> list[Outcome]:
    """Return the outcome of each item from a function of lists, after a call with all of them has `failed`.

    It is called with each `alone`, and then with all that it did not fail for `together`: they get the scores that they
    would have had if the others had never been written. Where it fails for none alone, all have failed.
    """
    single = alone(items)
    good = [place for place, outcome in enumerate(single) if not isinstance(outcome, RewardFailure)]
    if len(good) == len(single):
        whole = [failure for failure in failed if isinstance(failure, RewardFailure)]
        return [RewardFailure(one.kind, f"{one.cause}; with each response alone it does not fail") for one in whole]
    found = dict(zip(good, together([items[place] for place in good]), strict=True)) if good else {}
    return [found.get(place, outcome) for place, outcome in enumerate(single)]


def _missing(reply: Reply, timeout_s: float, rollout: Rollout) -> RewardFailure:
    if reply.timed_out:
        cause = f"took longer than reward.timeout_s={timeout_s:g} (response of {len(str(rollout.text))} characters)"
        return RewardFailure(TIMEOUT, cause)
    return RewardFailure(ERROR, str(reply.ended))


def read_answer(answer: Any) -> Outcome:
    """Return a process's result for one response.

    It is checked as a function's result is, as the function itself may have written it.
    """
    try:
        if isinstance(answer, dict) and answer.get("failure") in KINDS:
            raise RewardFailure(answer["failure"], str(answer.get("cause")))
        if not isinstance(answer, dict) or "result" not in answer:
            raise RewardFailure(INVALID, "the process answered something else")
        return read_result(answer["result"])
    except RewardFailure as failure:
        return failure
