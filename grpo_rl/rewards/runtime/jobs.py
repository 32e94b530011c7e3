"""Requests to reward processes: calls of functions for responses, and the meaning of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_rl.rewards.compose import place, sample_of
from grpo_rl.rewards.contract.calls import Component
from grpo_rl.rewards.contract.failures import ERROR, INVALID, KINDS, TIMEOUT, RewardFailure
from grpo_rl.rewards.contract.results import Result, read_result
from grpo_rl.rewards.runtime.messages import encode, frame
from grpo_rl.rewards.runtime.reward_process import Reply

if TYPE_CHECKING:  # types imports torch, which trying a function out does without
    from grpo_rl.types import Rollout

Item = TypeVar("Item")
UNSENDABLE = "ground_truth or extra_info cannot be sent to a reward function"
Outcome = Result | RewardFailure


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
    return frame(b'{"functions": %b, "calls": [%b]}' % (functions, b", ".join(calls))), sent


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
        cause = f"took longer than reward.timeout_s={timeout_s:g} (response of {len(rollout.text)} characters)"
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
