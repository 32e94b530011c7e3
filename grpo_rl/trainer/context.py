"""What a schedule is given: the roles that it drives, and where it shows and keeps what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from grpo_rl.protocols import Actor, Critic, Reference, Rewarder, RolloutPool
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.metrics.sinks import Sinks
from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.trainer.stopping import Stop
from grpo_rl.types import Metrics


@dataclasses.dataclass(slots=True)
class Roles:
    """The parts that a step drives. `reference` is None where no KL term reads it, `critic` where the estimator does not."""

    actor: Actor
    rollout: RolloutPool
    rewarder: Rewarder
    reference: Reference | None
    critic: Critic | None = None
    recoveries: Callable[[], Metrics] = dict
    """Since the last call: workers that failed and came back."""

    def committed(self, folder: Path) -> None:
        """Tell those with a state that the checkpoint of it is complete."""
        self.actor.committed(folder)
        if self.critic is not None:
            self.critic.committed(folder)


@dataclasses.dataclass(slots=True)
class Output:
    """Where a run shows and keeps what it does."""

    run_dir: RunDir
    console: Console
    sinks: Sinks
    rollouts: RolloutLog
    status: Status = dataclasses.field(default_factory=Status)
    stop: Stop = dataclasses.field(default_factory=Stop)


def is_due(step: int, frequency: int) -> bool:
    """Whether what happens every `frequency` steps happens after this one; -1 is never."""
    return frequency > 0 and step % frequency == 0


def mix_seed(seed: int | None, number: int) -> int:
    """A seed for one step, far from those of other steps and runs."""
    return ((seed or 0) * 1_000_003 + number * 7_919 + 17) & 0x7FFF_FFFF_FFFF_FFFF
