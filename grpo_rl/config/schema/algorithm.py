"""Options of advantages, corrections and what is selected: `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_rl.config.schema.kinds import Coefficient, Count, Factor, Fraction, Positive, Ratio, RatioAboveOne, RejectionMode


@dataclass(frozen=True, slots=True)
class KlControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef, or steer it to target_kl (Ziegler et al. 2019, section 2.2)."""
    kl_coef: Coefficient = 0.001
    """Weight of the KL penalty in the reward, at the start."""
    horizon: Count = 10000
    """Rollouts over which the adaptive controller works."""
    target_kl: Positive = 0.1
    """The KL that the adaptive controller steers to: the mean over responses of their tokens' mean."""


@dataclass(frozen=True, slots=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by the ratio of the trainer's old policy to the engine's: of each token, or of its whole response."""
    rollout_is_threshold: RatioAboveOne | None = None
    """Larger weights are cut to this; null: 2, or not cut where rollout_rs bounds the same ratio."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: list[RejectionMode] = field(default_factory=list)
    """Values compared with the bounds below; outside, the token (token_*) or the response (seq_*) is not trained."""
    rollout_rs_threshold: list[Ratio] = field(default_factory=list)
    """Upper bound for each entry of rollout_rs: of a ratio for k1, of a divergence for k2 and k3."""
    rollout_rs_threshold_lower: list[Ratio] = field(default_factory=list)
    """Lower bound for each k1 entry of rollout_rs; empty: 1/upper."""
    bypass_mode: bool | None = None
    """Take the engine's log-probs as the old ones, so that the ratio of the loss is the correction; null: only where weights
    may be stale (trainer.schedule=one_step_off or async) and nothing else here corrects for that."""


@dataclass(frozen=True, slots=True)
class FilterGroupsConfig:
    enable: bool = False
    """Do not train groups whose responses all have the same metric, as these have no signal (DAPO, ScaleRL)."""
    metric: str = "score"
    """score (the sum of the rewards), seq_reward (with the overlong penalty too), or a part of the reward by its name, such as auto or acc."""
    refill: bool = True
    """Sample further prompts until data.train_batch_size groups have a signal; false: train those that do."""
    max_num_gen_batches: Count = 10
    """Most batches of data.gen_batch_size prompts for one step; if too few groups have a signal then, the run stops."""


@dataclass(frozen=True, slots=True)
class RejectionConfig:
    min_reward: Factor = 1.0
    """data.responses=initial_policy: train on responses with at least this reward. Pairs are the best and the worst of each group."""
    max_per_prompt: Count | None = None
    """Most responses to one prompt that are kept, those sampled first; null: all."""
    deduplicate: bool = True
    """Keep each response to a prompt once."""


@dataclass(frozen=True, slots=True)
class GigpoConfig:
    step_advantage_w: Coefficient | None = None
    """Weight of the turns' advantages beside the episodes' with adv_estimator=gigpo; null: 1."""
    mode: Literal["mean_norm", "mean_std_norm"] | None = None
    """With adv_estimator=gigpo: leave deviations as they are, or divide them by their group's standard deviation; null: mean_norm."""


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """Registered advantage estimator, or your own as file.py:function; docs/algorithms.md has all of them."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false: adv_options.std=none (with grpo: Dr. GRPO's advantages)."""
    gamma: Fraction | None = None
    """Discount of rewards from token to token, or from step to step, for estimators that discount; null: the estimator's own default, 1 for all of ours."""
    lam: Fraction | None = None
    """Decay of GAE, for estimators that have it; null: the estimator's own default, 1."""
    adv_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the estimator, e.g. {std: batch}; their defaults are in docs/algorithms.md."""
    gigpo: GigpoConfig = field(default_factory=GigpoConfig)
    reward_parts: list[str] = field(default_factory=list)
    """Parts of the reward that adv_estimator=gdpo reads, by the keys of what a reward function returns; empty: each function's score."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward (instead of use_kl_loss)."""
    kl_penalty: str = "kl"
    """Estimator of the KL penalty: kl or k1, abs, mse or k2, low_var_kl or k3, or your own as file.py:function."""
    kl_penalty_options: dict[str, Any] = field(default_factory=dict)
    """Options of an estimator of your own."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    mask_truncated: bool = False
    """Do not train responses that were cut off at max_response_length; they still count in their group's mean."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
