"""The measurement of the policy on the validation data: during a training, and as all that a run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from grpo_rl.config.schema.tree import ValSamplingConfig
from grpo_rl.rewards.combined import by_rule
from grpo_rl.rewards.validation_metrics import validation_metrics
from grpo_rl.trainer.progress import advancing
from grpo_rl.trainer.sampled.trained import scored
from grpo_rl.trainer.schedule import VALIDATION, Context, required, training_sampling
from grpo_rl.types import Metrics, Rollout, Sampling


class Validation:
    """A sampler of responses to the validation prompts, with their scores; for schedules with a rollout role.

    Of iterated training, whose reward is the reward model's score, it measures the reward of the rules.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(self) -> Metrics:
        """Return metrics of the current policy on all validation prompts, which are sampled as `val_kwargs` says.

        The responses go to `val/step_N.jsonl`. Empty without validation data.
        """
        context, data = self.context, self.context.val_data
        if data is None:
            return {}
        rollout, rewarder = required(context.roles.rollout, "rollout"), required(context.roles.rewarder, "rewarder")
        values, timer = context.config.actor_rollout_ref.rollout.val_kwargs, context.progress.timer()
        prompts = [data.prompt(row, f"val-{row}") for row in range(len(data))]
        with timer("testing"), context.output.console.progress("validating", len(prompts) * values.n, keep=False) as bar:
            # Without an actor nothing is trained, and the engines have the weights that they were started with.
            if context.roles.actor is not None:
                rollout.sync_weights(context.roles.actor)
            sampling = validation_sampling(values, training_sampling(context.config, VALIDATION))
            rollouts = rollout.generate(prompts, values.n, sampling, advancing(bar, rewarder.submit))
            rollouts = by_rule(scored(rewarder, rollouts, context.output.console.warn))
        context.output.rollouts.write("val", context.step, rollouts)
        return validation_metrics(rollouts, values.n) | timer.metrics()


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


class ValidationOnly:
    """The schedule of `trainer.val_only=true`: it validates, and has no step. It needs an actor only to load a checkpoint."""

    roles: ClassVar[frozenset[str]] = frozenset({"rollout", "rewarder"})

    def __init__(self, context: Context) -> None:
        self.validation = Validation(context)
        self.trained: Sequence[Rollout] = ()

    def step(self) -> Metrics:
        raise AssertionError("a run that only validates has no step")

    def evaluate(self) -> Metrics:
        return self.validation()

    def ended(self) -> str | None:
        return "trainer.val_only=true validates and trains nothing"

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the next step of a training is not decided here."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave the state alone: it is that of the schedule which trained."""
