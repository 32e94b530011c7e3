"""The display of a step: its phases, with their seconds, and its responses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_rl.faults import fault_point
from grpo_rl.telemetry.metrics.timeline import Role, Timeline
from grpo_rl.telemetry.terminal.text import Bar
from grpo_rl.types import Metrics, Rollout

PHASES: dict[str, tuple[str, Role]] = {
    "sync_weights": ("sending weights", "weights"),
    "gen": ("sampling", "rollout"),
    "wait_for_rollouts": ("waiting for responses", "wait"),
    "reward": ("scoring", "reward"),
    "old_logprobs": ("old log-probs", "actor"),
    "ref": ("reference", "reference"),
    "values": ("values", "critic"),
    "adv": ("advantages", "controller"),
    "update_critic": ("updating the critic", "critic"),
    "update_actor": ("updating the actor", "actor"),
    "refresh_reference": ("reference <- policy", "weights"),
    "update_reward_model": ("updating the reward model", "reward"),
    "testing": ("validating", "rollout"),
    "save": ("saving", "controller"),
}
"""A phase of a step in words, and the role that is busy in it; in others it is the controller."""


class StepProgress:
    """Notes beside the bar of the training steps, if there is one, and intervals of its phases."""

    def __init__(self, bar: Bar | None = None, on_phase: Callable[[str], None] = lambda _: None) -> None:
        self.bar = bar or Bar()
        self.on_phase = on_phase
        self.timeline = Timeline()

    def timer(self) -> Timer:
        return Timer(self.phase, self._ended)

    def _ended(self, phase: str, seconds: float) -> None:
        self.timeline.ended(PHASES[phase][1] if phase in PHASES else "controller", phase, seconds)

    def phase(self, name: str) -> None:
        self.on_phase(name)
        fault_point("driver.phase", phase=name)
        self.bar.advance(0, PHASES[name][0] if name in PHASES else name)

    def done(self, steps: int = 1) -> None:
        self.bar.advance(steps, "")

    def counting(self, submit: Callable[[Rollout], None], total: int | None = None) -> Callable[[Rollout], None]:
        """Return `submit`, which notes how many of the `total` responses have ended, if there is a total."""
        count, every = 0, max(1, (total or 0) // 1000)

        def submit_and_count(rollout: Rollout) -> None:
            nonlocal count
            submit(rollout)
            count += 1
            fault_point("driver.response", count=count)
            if total is not None and (count % every == 0 or count == total):
                self.bar.advance(0, f"{PHASES['gen'][0]} {count} of {total}")

        return submit_and_count


class Timer:
    """Wall-clock seconds of named phases, which are announced as they begin and reported as they end."""

    def __init__(
        self, announce: Callable[[str], None] = lambda _: None, ended: Callable[[str, float], None] = lambda *_: None
    ) -> None:
        self.announce, self.ended = announce, ended
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.announce(phase)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[phase] += seconds
            self.ended(phase, seconds)

    def total(self) -> float:
        return sum(self.seconds.values())

    def metrics(self) -> Metrics:
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def advancing(bar: Bar, submit: Callable[[Rollout], None]) -> Callable[[Rollout], None]:

    def submit_and_advance(rollout: Rollout) -> None:
        submit(rollout)
        bar.advance()

    return submit_and_advance
