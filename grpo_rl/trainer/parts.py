"""What a run and its session share: roles, output, and a step with its phases and its sampling."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpo_rl.config.schema.tree import Config
from grpo_rl.faults import fault_point
from grpo_rl.protocols import (
    Actor,
    Critic,
    MovingReference,
    Reference,
    Rewarder,
    RolloutPool,
    Saved,
    StepInstruments,
    Teacher,
    TrainedRewardModel,
)
from grpo_rl.telemetry.metrics.timeline import Role, Timeline
from grpo_rl.telemetry.page.beside_run import PageBeside
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.text import Bar
from grpo_rl.trainer.stopping import Stop
from grpo_rl.types import Metrics, Rollout, Sampling

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws: TensorBoard, rich.
    from grpo_rl.rewards.audit import Audit
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.terminal.console import Console

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


@dataclasses.dataclass(slots=True)
class Roles:
    """The roles that were started. None: the schedule does not name it, or the configuration does not need it."""

    actor: Actor | None = None
    rollout: RolloutPool | None = None
    rewarder: Rewarder | None = None
    audit: Audit | None = None
    reference: Reference | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    reward_model: TrainedRewardModel | None = None  # the reward model of a schedule that trains it
    recoveries: Callable[[], Metrics] = dict  # returns how often workers failed and came back since the last call
    instruments: StepInstruments | None = None
    replays: list[Saved] = dataclasses.field(default_factory=list)
    """What the session trains again: a part of a checkpoint, and no role."""

    def with_state(self) -> list[Saved]:
        """Return what a checkpoint holds: the roles that are trained, a reference that moves, what is replayed."""
        trained = [role for role in (self.actor, self.critic, self.reward_model) if role is not None]
        moving = [self.reference] if isinstance(self.reference, MovingReference) else []
        return [*trained, *moving, *self.replays]


@dataclasses.dataclass(slots=True)
class Output:
    """The receivers of what a run shows and keeps."""

    run_dir: RunDir
    console: Console
    sinks: Sinks
    rollouts: RolloutLog
    status: Status = dataclasses.field(default_factory=Status)
    stop: Stop = dataclasses.field(default_factory=Stop)
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    page: PageBeside = dataclasses.field(default_factory=PageBeside)


@dataclasses.dataclass(slots=True)
class Step:
    """One training step of a loop."""

    number: int  # from 1 on
    validates: bool = False  # True if the policy is validated after this step
    metrics: Metrics = dataclasses.field(default_factory=dict)

    def log(self, metrics: Metrics) -> None:
        """Add metrics to those that are logged when the step ends."""
        self.metrics |= metrics


class StepProgress:
    """Notes beside the bar of the training steps, if there is one, and times and intervals of their phases."""

    def __init__(self, timeline: Timeline) -> None:
        self.bar, self.timeline = Bar(), timeline
        self.on_phase: Callable[[str], None] = lambda phase: None  # called with the name of each phase before it begins

    def phase(self, name: str) -> None:
        self.on_phase(name)
        fault_point("driver.phase", phase=name)
        self.bar.advance(0, PHASES.get(name, (name,))[0])

    @contextmanager
    def timed(self, phase: str, timings: Metrics) -> Iterator[None]:
        """Begin a phase, and add the seconds that it takes to `timings`, as `timing_s/PHASE`."""
        self.phase(phase)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds, name = time.perf_counter() - started, f"timing_s/{phase}"
            timings[name] = timings.get(name, 0.0) + seconds
            self.timeline.ended(PHASES[phase][1] if phase in PHASES else "controller", phase, seconds)

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


def advancing(bar: Bar, submit: Callable[[Rollout], None]) -> Callable[[Rollout], None]:
    """Return `submit`, which moves `bar` on by one with each call."""

    def submit_and_advance(rollout: Rollout) -> None:
        submit(rollout)
        bar.advance()

    return submit_and_advance


def is_due(step: int, frequency: int) -> bool:
    """Return whether what happens every `frequency` steps (-1: never) happens after this one."""
    return frequency > 0 and step % frequency == 0


def training_sampling(config: Config, step: int) -> Sampling:
    """The seed depends on the step; the rollout pool mixes in prompt and sample."""
    rollout = config.rollout
    return Sampling(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        keep_support=True,
        ignore_eos=rollout.ignore_eos,
        seed=((rollout.seed or 0) * 1_000_003 + step * 7_919 + 17) & 0x7FFF_FFFF_FFFF_FFFF,
    )


def validation_sampling(config: Config) -> Sampling:
    """Return sampling as `rollout.val_kwargs` says, and else as in training."""
    values = config.rollout.val_kwargs
    return dataclasses.replace(
        training_sampling(config, -1),
        temperature=values.temperature if values.do_sample else 0.0,
        top_p=values.top_p,
        top_k=values.top_k,
        min_p=0.0,
        keep_support=False,
    )
