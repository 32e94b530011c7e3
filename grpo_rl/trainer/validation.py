"""How good the policy is on the validation data."""

from __future__ import annotations

import dataclasses

from grpo_rl.config.schema.tree import ValSamplingConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.protocols import Rewarder, RolloutPool
from grpo_rl.rewards.validation_metrics import validation_metrics
from grpo_rl.telemetry.console import Console
from grpo_rl.trainer.progress import advancing
from grpo_rl.trainer.reward_failures import scored
from grpo_rl.types import Metrics, Rollout, Sampling


def validate(
    data: PromptDataset,
    values: ValSamplingConfig,
    training: Sampling,
    rollout: RolloutPool,
    rewarder: Rewarder,
    console: Console,
) -> tuple[list[Rollout], Metrics]:
    """Scored responses to all prompts, sampled as `values` says and else as in training, and their metrics."""
    sampling = dataclasses.replace(
        training,
        temperature=values.temperature if values.do_sample else 0.0,
        top_p=values.top_p,
        top_k=values.top_k,
        min_p=0.0,
        keep_support=False,
    )
    prompts = [data.prompt(row, f"val-{row}") for row in range(len(data))]
    with console.progress("validating", len(prompts) * values.n, keep=False) as bar:
        rollouts = rollout.generate(prompts, values.n, sampling, advancing(bar, rewarder.submit))
    rollouts = scored(rewarder, rollouts, console.warn)
    return rollouts, validation_metrics(rollouts, values.n)
