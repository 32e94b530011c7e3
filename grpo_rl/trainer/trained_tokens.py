"""What stands between scoring and training: the penalty for long responses, and which tokens are trained with what weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_rl.algos.correction import RolloutCorrection, correct
from grpo_rl.algos.segments import Segments
from grpo_rl.algos.shaping import overlong_penalty
from grpo_rl.config.schema.tree import AlgorithmConfig, OverlongBufferConfig
from grpo_rl.types import Batch, Metrics, Rollout


def penalize_overlong(rollouts: Sequence[Rollout], config: OverlongBufferConfig, max_length: int) -> list[Rollout]:
    """The scored rollouts with the penalty for long responses in their rewards, and as a part called `overlong`.

    One whose reward failed keeps what it has: none, or a fixed value.
    """
    if config.len is None:
        return list(rollouts)
    lengths_N = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    penalties = overlong_penalty(lengths_N, max_length, config.len, config.penalty_factor).tolist()
    for rollout, penalty in zip(rollouts, penalties, strict=True):
        if rollout.failure is not None:
            continue
        assert rollout.reward is not None
        rollout.reward += penalty
        rollout.reward_parts = {**rollout.reward_parts, "overlong": penalty}
    return list(rollouts)


class TrainedTokens:
    """Decides, between advantages and update, which tokens are trained (`keep_T`) and with what weight (`weights_T`)."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.correction = RolloutCorrection.from_config(config.rollout_correction)
        self.mask_truncated = config.mask_truncated

    def __call__(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with the columns that are needed, and how far engine and trainer are apart (`rollout_corr/*`).

        Without old log-probs, or with the engine's own in their place, the actor measures that distance in its update.
        """
        metrics: Metrics = {}
        whole_N = torch.ones(batch.num_rollouts, dtype=torch.bool)
        if self.mask_truncated:
            assert batch.truncated_N is not None
            whole_N = ~batch.truncated_N
            metrics["rollout/masked_fraction"] = float((~whole_N).double().mean())
        whole_T = Segments(batch.response_lengths_N).broadcast(whole_N)
        keep_T, weights_T = whole_T, None
        if batch.old_logprobs_T is not None and not self.correction.bypass_mode:
            segments = Segments(batch.response_lengths_N[whole_N])
            found = correct(self.correction, batch.old_logprobs_T[whole_T], batch.rollout_logprobs_T[whole_T], segments)
            metrics |= {f"rollout_corr/{name}": value for name, value in found.metrics.items()}
            if found.keep_T is not None:
                keep_T = torch.zeros_like(whole_T).masked_scatter(whole_T, found.keep_T)
            if found.weights_T is not None:
                weights_T = torch.zeros(len(whole_T)).masked_scatter(whole_T, found.weights_T)
        selects = self.mask_truncated or bool(self.correction.rollout_rs)
        return batch.replace(keep_T=keep_T if selects else None, weights_T=weights_T), metrics
