"""What a person sees of the step that is going on: its phase, and how many responses there are already."""

from __future__ import annotations

from collections.abc import Callable

from grpo_rl.faults import fault_point
from grpo_rl.telemetry.console import Bar
from grpo_rl.types import Rollout

PHASES = {
    "sync_weights": "sending weights",
    "gen": "sampling",
    "reward": "scoring",
    "old_logprobs": "old log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "testing": "validating",
    "save": "saving",
}


class StepProgress:
    """Notes beside the bar of the training steps. Without a bar nothing is shown."""

    def __init__(self, bar: Bar | None = None, on_phase: Callable[[str], None] = lambda _: None) -> None:
        self.bar = bar or Bar(None, None)
        self.on_phase = on_phase
        """Told the name of each phase before it begins."""

    def phase(self, name: str) -> None:
        """Say that this phase of the step has begun."""
        self.on_phase(name)
        fault_point("driver.phase", phase=name)
        self.bar.advance(0, PHASES.get(name, name))

    def done(self, steps: int = 1) -> None:
        """Move on by so many steps."""
        self.bar.advance(steps, "")

    def counting(self, submit: Callable[[Rollout], None], total: int) -> Callable[[Rollout], None]:
        """`submit`, and a note of how many of the `total` responses it has been called with."""
        count = 0

        def submit_and_count(rollout: Rollout) -> None:
            nonlocal count
            submit(rollout)
            count += 1
            fault_point("driver.response", count=count)
            self.bar.advance(0, f"{PHASES['gen']} {count} of {total}")

        return submit_and_count


def advancing(bar: Bar, submit: Callable[[Rollout], None]) -> Callable[[Rollout], None]:
    """`submit`, and `bar` one further with each call."""

    def submit_and_advance(rollout: Rollout) -> None:
        submit(rollout)
        bar.advance()

    return submit_and_advance
