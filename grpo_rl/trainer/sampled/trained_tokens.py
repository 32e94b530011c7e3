"""The penalty for long responses, and the choice of the tokens that are trained, with their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_rl.algos.correction import RolloutCorrection, correct
from grpo_rl.algos.segments import Segments
from grpo_rl.algos.shaping import overlong_penalty
from grpo_rl.columns import values
from grpo_rl.config.schema.tree import AlgorithmConfig, OverlongBufferConfig
from grpo_rl.types import Batch, Metrics, Rollout


def penalize_overlong(rollouts: Sequence[Rollout], config: OverlongBufferConfig, max_length: int) -> list[Rollout]:
    """Return the scored rollouts with the penalty for long responses in their rewards, and as a part called `overlong`.

    One whose reward failed keeps what it has: none, or a fixed value.
    """
    if config.len is None or not config.enable:
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
    """Decides, between advantages and update, which tokens are trained and with what weight.

    Advantages are made before, over whole responses; here the choice of tokens is applied, once for all that follows.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.correction = RolloutCorrection.from_config(config.rollout_correction)
        self.mask_truncated = config.mask_truncated

    def __call__(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch of the trained tokens, with `weights_T` where they are weighed, and what to log.

        The metrics `rollout_corr/*` say how far engine and trainer are apart. Where nothing is corrected, the actor
        measures that distance in its update: its ranks have the log-probs. `rollout/trained_token_fraction` is there
        where tokens may be left out.
        """
        metrics: Metrics = {}
        whole_N = torch.ones(batch.num_rollouts, dtype=torch.bool)
        masks = self.mask_truncated or batch.masked_N is not None
        if self.mask_truncated:
            assert batch.truncated_N is not None
            whole_N = ~batch.truncated_N
        if batch.masked_N is not None:
            whole_N = whole_N & ~batch.masked_N
        if masks:
            metrics["rollout/masked_fraction"] = float((~whole_N).double().mean())
        before = batch.num_trained_tokens
        if masks:
            batch = batch.keep(Segments(batch.trained_lengths_N).broadcast(whole_N))
        if batch.old_logprobs_T is not None and self.correction.active:
            assert batch.rollout_logprobs_T is not None, "these responses were sampled"
            # A response that was masked is in no mean of the correction.
            segments = Segments(batch.trained_lengths_N[whole_N])
            old_T, engine_T = values(batch.old_logprobs_T), values(batch.rollout_logprobs_T)
            found = correct(self.correction, old_T, engine_T, segments)
            metrics |= {f"rollout_corr/{name}": value for name, value in found.metrics.items()}
            batch = batch.replace(weights_T=found.weights_T)
            if found.trained_T is not None:
                batch = batch.keep(found.trained_T)
        if masks or (self.correction.active and self.correction.rollout_rs):
            metrics["rollout/trained_token_fraction"] = batch.num_trained_tokens / max(1, before)
        return batch, metrics
