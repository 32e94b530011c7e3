"""What a run and its session share: the roles that were started, the receivers of what is shown, a step, its sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpo_rl.config.schema.tree import Config, ValSamplingConfig
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
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.telemetry.page.beside_run import PageBeside
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.stopping import Stop
from grpo_rl.types import Metrics, Sampling

if TYPE_CHECKING:
    # The plan looks up the schedule, and need not wait for what draws: TensorBoard, rich.
    from grpo_rl.rewards.audit import Audit
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.terminal.console import Console

VALIDATION = -1
"""The number that stands for a step's if sampling is seeded for validation."""


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
    reward_model: TrainedRewardModel | None = None
    """The reward model of a schedule that trains it."""
    recoveries: Callable[[], Metrics] = dict
    """Returns how often workers failed and came back since the last call."""
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

    number: int
    """From 1 on."""
    validates: bool = False
    """True if the policy is validated after this step."""
    metrics: Metrics = dataclasses.field(default_factory=dict)

    def log(self, metrics: Metrics) -> None:
        """Add metrics to those that are logged when the step ends."""
        self.metrics |= metrics


def is_due(step: int, frequency: int) -> bool:
    """Return whether what happens every `frequency` steps (-1: never) happens after this one."""
    return frequency > 0 and step % frequency == 0


def training_sampling(config: Config, step: int) -> Sampling:
    """Return the sampling parameters of a training step, or those that validation starts from (`step=VALIDATION`).

    The seed depends on the step; the rollout pool mixes in prompt and sample.
    """
    rollout = config.actor_rollout_ref.rollout
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


def validation_sampling(values: ValSamplingConfig, training: Sampling) -> Sampling:
    """Return sampling as `values` says, and else as in training."""
    return dataclasses.replace(
        training,
        temperature=values.temperature if values.do_sample else 0.0,
        top_p=values.top_p,
        top_k=values.top_k,
        min_p=0.0,
        keep_support=False,
    )
