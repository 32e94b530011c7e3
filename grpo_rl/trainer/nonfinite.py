"""Updates whose loss or gradient was not finite: left out by the workers, counted and kept for a look here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import DivergedError
from grpo_rl.telemetry.rollouts.rollout_log import write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Metrics, Rollout

ROLES = ("actor", "critic")


class NonFiniteUpdates:
    """Lets `trainer.max_nonfinite_steps` training steps in a row pass in which an update was left out."""

    def __init__(self, config: TrainerConfig, run_dir: RunDir) -> None:
        self.allowed = config.max_nonfinite_steps if config.on_nonfinite == "skip" else 0
        self.key = "trainer.max_nonfinite_steps" if config.on_nonfinite == "skip" else "trainer.on_nonfinite"
        self.run_dir = run_dir
        self.in_a_row = 0

    def check(self, step: int, metrics: Metrics, trained: Sequence[Rollout]) -> None:
        """Save what the step trained on to `nonfinite_step_N.jsonl` where one of its updates was left out.

        Raises DivergedError when that happened in more steps in a row than are allowed.
        """
        left_out = [role for role in ROLES if metrics.get(f"{role}/nonfinite")]
        if not left_out:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        path = write_rollouts(self.run_dir.path / f"nonfinite_step_{step}.jsonl", trained)
        if self.in_a_row > self.allowed:
            raise DivergedError(
                f"loss or gradient of the {' and the '.join(left_out)} not finite in {self.in_a_row} steps in a row "
                f"({self.key}), no weight was changed by them; look at the rollouts, lower the learning rate or clip_grad, and go "
                f"on from the last checkpoint\n  log: {path}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row = int(state.get("in_a_row", 0))
