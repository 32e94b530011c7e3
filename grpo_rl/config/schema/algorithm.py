"""Options `algorithm.*` and `distillation.*`."""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import Literal

from grpo_rl.config.schema.kinds import *


@frozen
class KlControlConfig:
    type: Literal["fixed", "adaptive"] = field("fixed", needs="use_kl_in_reward=true")
    """Keep kl_coef, or steer it to target_kl (Ziegler et al. 2019, section 2.2)."""
    kl_coef: Coefficient = 0.001
    """Initial weight of the KL penalty in the reward."""
    horizon: Count = field(10000, needs="type=adaptive")
    """Rollouts over which the adaptive controller works."""
    target_kl: Positive = field(0.1, needs="type=adaptive")
    """The KL that the controller steers to: mean over responses of the mean over tokens."""


@frozen
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by the ratio of old policy to engine: of each token, or of the whole response."""
    rollout_is_threshold: RatioAboveOne | None = field(None, needs="rollout_is")
    """Upper bound of these weights; null: 2, or none if rollout_rs bounds the same ratio."""
    rollout_is_batch_normalize: bool = field(False, needs="rollout_is")
    """Divide the weights by their mean."""
    rollout_rs: list[RejectionMode] = field(list)
    """Values with bounds, outside of which the token (token_*) or the response (seq_*) is not trained."""
    rollout_rs_threshold: list[Ratio] = field(list)
    """Upper bound for each entry of rollout_rs: of a ratio for k1, of a divergence for k2 and k3."""
    rollout_rs_threshold_lower: list[Ratio] = field(list)
    """Lower bound for each k1 entry of rollout_rs; empty: 1/upper."""
    bypass_mode: bool | None = None
    """Take the engine's log-probs as the old ones, so that the loss's ratio is the correction; null: only if
    weights may be stale (trainer.schedule=one_step_off or async) and nothing else here corrects for that."""


@frozen
class FilterGroupsConfig:
    enable: bool = False
    """Do not train groups whose responses all have the same metric: they have no signal (DAPO, ScaleRL)."""
    metric: str = "score"
    """score (sum of rewards), seq_reward (with the overlong penalty), a part of the reward by its name, such
    as auto or acc, or your own `file.py:keep`, a function keep(group) -> bool of a prompt's rollouts."""
    refill: bool = True
    """Sample further prompts until data.train_batch_size groups have a signal; false: train those that do."""
    max_num_gen_batches: Count = field(10, needs="refill=true")
    """Most batches of data.gen_batch_size prompts for a step; if they do not suffice, the run stops."""


@frozen
class ReplayConfig:
    max_age: Staleness = 0
    """Steps for which groups with rare successes replace groups without a signal, by the ratio to the policy
    that sampled them; 0: never."""
    max_success: Fraction = field(0.25, needs="max_age above 0")
    """Largest share of a group's responses with its highest reward that counts as rare."""
    share: MinorShare = field(0.75, needs="max_age above 0")
    """Largest replayed share of a step's groups. With filter_groups.refill fewer prompts are sampled."""


@frozen
class RejectionConfig:
    min_reward: Factor = 1.0
    """Least reward of a response to train on. Pairs are the best and the worst of each group."""
    max_per_prompt: Count | None = None
    """Most responses to a prompt that are kept, the first sampled; null: all."""
    deduplicate: bool = True
    """Keep each response to a prompt once."""


@frozen
class AlgorithmConfig:
    adv_estimator: str = field("grpo", part="rewards")
    """Registered advantage estimator, or your own file.py:function; docs/algorithms.md."""
    norm_adv_by_std_in_grpo: bool = field(True, part="rewards")
    """Divide by the group's standard deviation; false: adv_options.std=none (Dr. GRPO's advantages)."""
    gamma: Fraction | None = field(None, part="rewards")
    """Discount of rewards from token to token, or step to step; null: the estimator's default, 1 for ours."""
    lam: Fraction | None = field(None, part="rewards")
    """Decay of GAE; null: the estimator's default, 1."""
    adv_options: Options = field(dict, part="rewards")
    """Further options of the estimator, e.g. {std: batch}; docs/algorithms.md has defaults."""
    reward_parts: list[str] = field(list, part="rewards")
    """Parts of the reward for adv_estimator=gdpo, as named by reward functions; empty: each one's score."""
    use_kl_in_reward: bool = field(False, part="rewards")
    """Subtract the KL to the reference from the reward, instead of use_kl_loss."""
    kl_penalty: str = field("kl", part="rewards", needs="use_kl_in_reward=true")
    """Estimator of the penalty: kl or k1, abs, mse or k2, low_var_kl or k3, or your own file.py:function."""
    kl_penalty_options: Options = field(dict, part="rewards", needs="use_kl_in_reward=true")
    """Options of your own estimator."""
    kl_ctrl: KlControlConfig = field(KlControlConfig, part="rewards")
    rollout_correction: RolloutCorrectionConfig = field(RolloutCorrectionConfig, part="advantages")
    mask_truncated: bool = field(False, part="advantages")
    """Do not train responses cut off at max_response_length; they still count in their group's mean."""
    filter_groups: FilterGroupsConfig = field(FilterGroupsConfig, part="policy", needs="filter_groups.enable=true")
    replay: ReplayConfig = field(ReplayConfig, part="policy")
    rejection: RejectionConfig = field(RejectionConfig, needs="data.responses=initial_policy")


@frozen
class DistillationLossConfig:
    loss_mode: str = "k3"
    """Distance to the teacher: an estimate by the sampled token (k1, k3, ...), a divergence over the
    teacher's top k (forward_kl, reverse_kl, jsd, verl's forward_kl_topk), or your own file.py:function;
    docs/teachers.md."""
    topk: TopK = 32
    """Divergences: the teacher's so many likeliest tokens, all others as one; -1: the whole vocabulary."""
    jsd_beta: Fraction = field(0.5, needs="loss_mode=jsd")
    """The teacher's share in the mixture; 0 is forward_kl, 1 is reverse_kl."""
    use_task_rewards: bool = True
    """Also train on the task, by rewards or the answers of rows; false: on the teacher alone."""
    distillation_loss_coef: Coefficient = 1.0
    """Weight of the teacher beside the task."""
    use_policy_gradient: bool = False
    """Each token's distance is a negative advantage, with loss_mode=k1; false: a loss of its own."""
    discount: Fraction = field(0.0, needs="use_policy_gradient=true")
    """Weight of a later token's distance in an earlier one's advantage, per token; 0: its own alone."""
    loss_max_clamp: Positive | None = None
    """Bound of distances on both sides; null: none."""


@frozen
class DistillationConfig:
    enabled: bool = False
    """Learn from teachers: frozen models, or the policy itself with another prompt (docs/teachers.md)."""
    teacher_models: Options = field(dict)
    """Teachers by name, each with model_path (null: the policy itself), key (the data_source that it teaches;
    null: any), weight (share of the prompts among teachers of a key), context (text that only it reads),
    dtype, and ema_decay (of the policy itself: teach with a moving average of its weights)."""
    nnodes: NodesOrNone = 0
    """Nodes of the teachers' own pool; 0: they share the actor's devices."""
    n_gpus_per_node: Devices | None = field(None, needs="nnodes above 0")
    """Ranks per node of that pool; null: as trainer.n_gpus_per_node."""
    param_offload: bool = False
    """GPU: keep the teachers' parameters in host memory while they are not used."""
    distillation_loss: DistillationLossConfig = field(DistillationLossConfig)


@frozen
class TeacherConfig:
    model_path: str | None = None
    """A folder with the policy's tokenizer, or an embedded model; None: the policy of each step."""
    key: str | None = None
    """The data_source that it teaches; None: all without a teacher of their own."""
    weight: Positive = 1.0
    """Share of the prompts among teachers of a key: a hash of a prompt's uid draws one."""
    context: str | None = None
    """Text before the prompt, or in its system message, with {ground_truth} and {extra_info.NAME}."""
    dtype: Dtype = "auto"
    """Compute type of its layers."""
    ema_decay: OpenFraction | None = None
    """Of the policy itself: share of the average that an optimizer step keeps, as 0.99."""
