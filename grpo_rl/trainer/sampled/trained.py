"""From scored rollouts to what is trained: failures, baselines, advantages, masks and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.advantages.contract import RolloutAdvantages, check_rewards
from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, token_rewards
from grpo_rl.algos.correction import RolloutCorrection, correct
from grpo_rl.algos.kl import KlController, kl_estimate
from grpo_rl.algos.segments import Segments
from grpo_rl.algos.shaping import overlong_penalty
from grpo_rl.columns import RemoteColumn, values
from grpo_rl.config.function_options import ESTIMATOR, chosen_options
from grpo_rl.config.schema.tree import AlgorithmConfig, OverlongBufferConfig
from grpo_rl.errors import ConfigError, DivergedError
from grpo_rl.protocols import Rewarder
from grpo_rl.registry import needs_of, options_of
from grpo_rl.rewards.contract import summary
from grpo_rl.types import GREEDY, Batch, Metrics, Rollout

BASELINE_FAILED = "baseline_failed"  # the failure of a rollout whose prompt's greedy response has no reward


def is_trained(rollout: Rollout) -> bool:
    """Return whether the rollout has a reward, perhaps reward.failure_value, and the baseline that it is compared with."""
    return rollout.reward is not None and rollout.failure != BASELINE_FAILED


def with_reward(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if is_trained(rollout)]


def scored(rewarder: Rewarder, rollouts: Sequence[Rollout], warn: Callable[[str], None]) -> list[Rollout]:
    waited = rewarder.wait(rollouts)
    failures = [(rollout.failure, rollout.failure_cause or "") for rollout in waited if rollout.failure is not None]
    # Truncated episodes are dropped because the configuration says so: they have a metric, and need no warning.
    if failures := [failure for failure in failures if not failure[0].startswith("truncated_")]:
        warn(summary(failures, len(waited)))
    return waited


def penalize_overlong(rollouts: Sequence[Rollout], config: OverlongBufferConfig, max_length: int) -> None:
    """Add the penalty for long responses to rewards, unless these failed, and as a part `overlong`."""
    rollouts = [rollout for rollout in rollouts if rollout.failure is None]
    if config.len is None or not config.enable:
        return
    lengths_N = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    penalties = overlong_penalty(lengths_N, max_length, config.len, config.penalty_factor).tolist()
    for rollout, penalty in zip(rollouts, penalties, strict=True):
        assert rollout.reward is not None
        rollout.reward += penalty
        rollout.reward_parts = {**rollout.reward_parts, "overlong": penalty}


def with_baselines(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the sampled rollouts with the reward of their prompt's greedy response, if any, as `baseline`.

    If a greedy one's reward failed, so have all that are compared with it. Raises ValueError if a prompt
    alone has none.
    """
    greedy = {rollout.prompt.uid: rollout for rollout in rollouts if rollout.sample_index == GREEDY}
    if not greedy:
        return list(rollouts)
    sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
    for rollout in sampled:
        if rollout.prompt.uid not in greedy:
            raise ValueError(f"prompt {rollout.prompt.uid} has no greedy response, and others of the step have")
        baseline = greedy[rollout.prompt.uid]
        rollout.baseline = baseline.reward
        if baseline.reward is None and rollout.failure is None:
            rollout.failure, rollout.failure_cause = BASELINE_FAILED, f"{baseline.failure}: {baseline.failure_cause}"
    return sampled


def estimator_options(config: AlgorithmConfig, factors: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the keywords for the configured estimator; one that reads the reward's parts gets their `factors`."""
    estimate = ADVANTAGES.get(config.adv_estimator)
    options = chosen_options(ESTIMATOR, config, options_of(estimate))
    if "parts" in needs_of(estimate) and "weights" in options_of(estimate) and not config.reward_parts:
        options["weights"] = list((factors or {}).values())
    return options


class Advantage:
    """The configured estimator, with the KL penalty in the reward if it is wanted."""

    def __init__(self, config: AlgorithmConfig, factors: Mapping[str, float] | None = None, *, of_turns: bool = False) -> None:
        """`of_turns`: the rollouts are episodes, whose steps are turns and add up to the reward."""
        self.config = config
        self.estimate = ADVANTAGES.get(config.adv_estimator)
        self.options = estimator_options(config, factors)
        self.needs = needs_of(self.estimate)
        self.parts = tuple(config.reward_parts or factors or ()) if "parts" in self.needs else ()
        """Parts of the reward that the estimator reads."""
        self.places_turns = of_turns and "steps" not in self.needs and bool({"gamma", "lam"} & self.options.keys())
        """True if an estimator that follows rewards from token to token gets those of turns where turns end."""
        control = config.kl_ctrl
        target_kl = control.target_kl if control.type == "adaptive" else None
        self.kl_controller = KlController(control.kl_coef, target_kl, control.horizon)

    def __call__(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with `advantages_N` or `advantages_T` (and `returns_T` if there is a critic), and metrics."""
        check_finite(batch)
        check_rewards(batch.rewards_N)
        metrics: Metrics = {}
        kl_T = self._kl(batch, metrics) if self.config.use_kl_in_reward else None
        step_ends_K = _step_ends(batch)
        step_rewards_K = batch.step_rewards_K if self.places_turns else None
        rewards_T: Tensor | None = None
        if kl_T is not None or step_rewards_K is not None:
            rewards_N = batch.rewards_N if step_rewards_K is None else torch.zeros_like(batch.rewards_N)
            kl_coef = metrics.get("actor/reward_kl_penalty_coeff", 0.0)
            rewards_T = token_rewards(rewards_N, batch.trained_lengths_N, kl_T, kl_coef)
            if step_rewards_K is not None and step_ends_K is not None:
                rewards_T.index_add_(0, step_ends_K, step_rewards_K)
        inputs = AdvantageInput(
            rewards_T,
            lengths_N=batch.trained_lengths_N,
            group_N=batch.group_N,
            rewards_N=batch.rewards_N,
            values_T=None if batch.values_T is None else values(batch.values_T),
            baselines_N=batch.baselines_N,
            step_ends_K=step_ends_K,
            step_rewards_K=batch.step_rewards_K,
            step_states_K=batch.step_states_K,
            reward_parts_NP=batch.reward_parts_NP,
        )
        out = self.estimate(inputs, **self.options)
        if batch.values_T is not None and out.returns_T is None:
            raise ConfigError(
                f"algorithm.adv_estimator={self.config.adv_estimator}: gives no returns_T for the critic to learn"
            )
        batch = batch.replace(returns_T=None if batch.values_T is None else out.returns_T)
        if "states" in self.needs:
            metrics["advantage/shared_state_fraction"] = _shared_states(batch)
        if isinstance(out, RolloutAdvantages):
            batch = batch.replace(advantages_N=out.advantages_N)
        else:
            batch = batch.replace(advantages_T=out.advantages_T)
        return batch, metrics | _advantage_metrics(batch)

    def _kl(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Return each token's KL from old policy to reference, whose mean per response steers the controller."""
        assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None
        options = self.config.kl_penalty_options
        kl_T = kl_estimate(values(batch.old_logprobs_T), values(batch.ref_logprobs_T), self.config.kl_penalty, options=options)
        mean = float(Segments(batch.trained_lengths_N).mean(kl_T).mean())
        metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.kl_controller.value}
        self.kl_controller.update(mean, batch.num_rollouts)
        return kl_T


def check_finite(batch: Batch) -> None:
    """Raise DivergedError, with column and rollouts, for log-probs that are not finite."""
    columns = {
        "the engine's log-probs": batch.rollout_logprobs_T,
        "the reference's log-probs": batch.ref_logprobs_T,
        "the teacher's log-probs": batch.teacher_logprobs_T,
        "the old log-probs": batch.old_logprobs_T,
    }
    for name, column in columns.items():
        if column is None or (isinstance(column, RemoteColumn) and column.finite):
            continue
        column_T = values(column)
        bad = (~torch.isfinite(column_T)).nonzero().flatten()
        if not len(bad):
            continue
        rollouts = Segments(batch.trained_lengths_N).index_T[bad].unique().tolist()
        raise DivergedError(
            f"{name} are not finite at {len(bad)} of {len(column_T)} tokens, the first {float(column_T[bad[0]])} at token {int(bad[0])}, "
            f"in rollouts {rollouts[:8]} of {batch.num_rollouts}: the model that computed them is broken, or cannot produce what was sampled"
        )


def _step_ends(batch: Batch) -> Tensor | None:
    """Return the positions of the steps' last tokens among the trained tokens of the whole batch."""
    if batch.step_ends_K is None:
        return None
    assert batch.num_steps_N is not None
    starts_N = batch.trained_lengths_N.cumsum(0) - batch.trained_lengths_N
    return batch.step_ends_K + starts_N.repeat_interleave(batch.num_steps_N)


def _shared_states(batch: Batch) -> float:
    """Return the share of turns whose state is that of another turn of their group, too."""
    assert batch.step_states_K is not None and batch.num_steps_N is not None
    group_K = batch.group_N.repeat_interleave(batch.num_steps_N)
    counts = torch.unique(torch.stack([group_K, batch.step_states_K], dim=1), dim=0, return_counts=True)[1]
    return float(counts[counts > 1].sum()) / max(1, len(group_K))


def _advantage_metrics(batch: Batch) -> Metrics:
    lengths_N = batch.trained_lengths_N
    if batch.advantages_N is not None:
        sums_N = batch.advantages_N.double().abs() * lengths_N
    else:
        assert batch.advantages_T is not None
        sums_N = Segments(lengths_N).sum(batch.advantages_T.abs())
    zero_advantage_N = sums_N == 0
    num_groups = batch.group_N.unique().numel()
    live_groups = batch.group_N[~zero_advantage_N].unique().numel()
    return {
        "advantage/zero_group_fraction": 1.0 - live_groups / max(1, num_groups),
        "advantage/abs_mean": float(sums_N.double().sum()) / max(1, batch.num_trained_tokens),
    }


def trained_tokens(batch: Batch, config: AlgorithmConfig) -> tuple[Batch, Metrics]:
    """Return the batch of the trained tokens alone, with `weights_T` if they are weighed.

    The metrics `rollout_corr/*` say how far engine and trainer are apart; if nothing is corrected, the
    actor's ranks measure that.
    """
    metrics: Metrics = {}
    correction = RolloutCorrection.from_config(config.rollout_correction)
    whole_N = torch.ones(batch.num_rollouts, dtype=torch.bool)
    num_tokens = batch.num_trained_tokens
    if config.mask_truncated:
        assert batch.truncated_N is not None
        whole_N &= ~batch.truncated_N
    if batch.masked_N is not None:
        whole_N &= ~batch.masked_N
    masks = config.mask_truncated or batch.masked_N is not None
    if masks:
        metrics["rollout/masked_fraction"] = float((~whole_N).double().mean())
        batch = batch.keep(Segments(batch.trained_lengths_N).broadcast(whole_N))
    if batch.old_logprobs_T is not None and correction.active:
        assert batch.rollout_logprobs_T is not None, "these responses were sampled"
        # A response that was masked is in no mean of the correction.
        segments = Segments(batch.trained_lengths_N[whole_N])
        result = correct(correction, values(batch.old_logprobs_T), values(batch.rollout_logprobs_T), segments)
        metrics |= {f"rollout_corr/{name}": value for name, value in result.metrics.items()}
        batch = batch.replace(weights_T=result.weights_T)
        if result.trained_T is not None:
            batch = batch.keep(result.trained_T)
    if masks or (correction.active and correction.rollout_rs):
        metrics["rollout/trained_token_fraction"] = batch.num_trained_tokens / max(1, num_tokens)
    return batch, metrics
