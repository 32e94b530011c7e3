"""Every option of the program: key, type, range, default, meaning. The only place where any of them is said.

Keys and meanings are verl's wherever verl has one that is right. `docs/configuration.md` is generated
from this file; `compose.py` builds these frozen classes from what Hydra composed, `checks.py` holds the
rules between keys. A key that nothing reads does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, used as `Annotated[float, Range(gt=0)]`. NaN is never inside."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


Count = Annotated[int, Range(ge=1)]
CountOrZero = Annotated[int, Range(ge=0)]
CountOrOff = Annotated[int, Range(ge=-1)]
"""-1 switches it off, as in verl."""
Positive = Annotated[float, Range(gt=0, lt=float("inf"))]
NonNegative = Annotated[float, Range(ge=0, lt=float("inf"))]
Fraction = Annotated[float, Range(ge=0, le=1)]

KlType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
    "k3_unbiased", "full",
]  # fmt: skip
RejectionMode = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip


# ---- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CustomClsConfig:
    path: str | None = None
    """Python file (or module) with your own data set class, which gets the names in train_files or val_files; docs/data.md."""
    name: str | None = None
    """Name of the class."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Training data: files (parquet, json, jsonl, arrow; .json.gz, .jsonl.gz), folders, `hf:owner/name?split=train`, `task:NAME?option=value`, `reasoning_gym:NAME?option=value` (docs/data.md, docs/tasks.md)."""
    train_weights: list[float] = field(default_factory=list)
    """Share of each entry of train_files in every batch, e.g. [0.7,0.3]; empty: all rows alike, one epoch sees each once."""
    dynamic_weights: bool = False
    """Multiply train_weights by how near the pass rate of each source is to one half: 4p(1-p), at least curriculum_floor."""
    val_files: list[str] = field(default_factory=list)
    """Validation data, like train_files. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column with the chat messages (a list of {role, content}) or a plain string."""
    reward_fn_key: str = "data_source"
    """Column whose value chooses the rule-based reward."""
    data_source: str | None = None
    """The value of it for all rows, where the data have no such column; null: take the column."""
    ground_truth_key: str = "reward_model.ground_truth"
    """Column with what the reward compares with, a path with dots where it lies in another column."""
    extra_info_key: str = "extra_info"
    """Column with an object that is handed to the reward; it may be missing."""
    system_prompt: str | None = None
    """Put before the messages of every prompt that has no system message of its own."""
    chat_template: str | None = None
    """Jinja template, or a file with one, in place of the tokenizer's."""
    custom_cls: CustomClsConfig = field(default_factory=CustomClsConfig)
    on_bad_row: Literal["error", "skip"] = "error"
    """A bad row ends the run with its place, or is left out and listed in the run folder's bad_rows_*.jsonl."""
    check_rows: CountOrZero = 50_000
    """Training data of at most so many rows are checked whole before the start; of more 2,000 rows are, the others when drawn."""
    cache_dir: str | None = None
    """Folder for the unpacked copies of parquet, Arrow and .gz files while the run lasts; null: the system's temporary folder."""
    allow_change: bool = False
    """Resume although the training data have changed since the checkpoint; the run goes on at the beginning of the next epoch."""
    train_batch_size: Count = 1024
    """Prompts per training step. The number of rollouts is this times rollout.n."""
    gen_batch_size: Count | None = None
    """Prompts sampled at a time while groups without signal are replaced (algorithm.filter_groups); null: train_batch_size."""
    retire_above: Annotated[float, Range(gt=0, le=1)] | None = None
    """Do not sample a prompt in later epochs once this share of its responses passes, or more (ScaleRL: 0.9); null: sample all."""
    retire_metric: str = "score"
    """What a response passes by: named as algorithm.filter_groups.metric is."""
    retire_score: float = 1.0
    """The least value of it with which a response passes."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens; what happens to longer ones: filter_overlong_prompts, truncation."""
    max_response_length: Count = 512
    """Longest response in tokens; sampling stops there with finish reason `length`."""
    filter_overlong_prompts: bool = False
    """Drop rows whose prompt is longer than max_prompt_length, and say how many."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For longer prompts that were not filtered: refuse them, or cut tokens off on that side."""
    shuffle: bool = True
    """Draw the training rows of every epoch in a new seeded order."""
    curriculum: Literal["none", "difficulty", "pass_rate"] = "none"
    """Order by difficulty_key, easiest first in every epoch; or prefer prompts whose latest pass rate is near one half."""
    difficulty_key: str = "extra_info.difficulty"
    """curriculum=difficulty: column with a number, a path with dots where it lies in another column."""
    curriculum_floor: Annotated[float, Range(gt=0, le=1)] = 0.1
    """curriculum=pass_rate and dynamic_weights: least weight, of what is always or never solved; half solved has 1."""
    seed: CountOrZero = 1
    """Seed of that order."""
    train_max_samples: CountOrOff = -1
    """Use only the first so many training rows; -1: all."""
    val_max_samples: CountOrOff = -1
    """Use only the first so many validation rows; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed on to the tokenizer's apply_chat_template, e.g. {enable_thinking: false}."""


# ---- model, actor, reference, rollout ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str = ""
    """A Hugging Face model folder (or a hub name where a hub can be reached), or `builtin:NAME` for an embedded model."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer, if not the model's."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's Hugging Face config, e.g. {attention_dropout: 0.1}; unknown names are refused."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about 30 % more work."""
    lm_head_chunk_tokens: Count = 2048
    """Trained tokens whose logits exist at the same time; more is faster, less takes less memory."""


@dataclass(frozen=True, slots=True)
class OptimConfig:
    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.01
    """AdamW's decoupled weight decay, applied to matrices and not to vectors (norms, biases)."""
    lr_warmup_steps: CountOrOff = -1
    """Optimizer steps of linear warm-up; -1: take lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a share of lr."""
    clip_grad: Positive = 1.0
    """Largest global gradient norm; larger gradients are scaled down."""


@dataclass(frozen=True, slots=True)
class FsdpConfig:
    param_offload: bool = False
    """GPU: keep parameters in host memory while the rollout engine runs."""
    optimizer_offload: bool = False
    """GPU: keep the optimizer state in host memory while the rollout engine runs."""
    reshard_after_forward: bool = True
    """Free the gathered layer after its forward pass (less memory, one more all-gather)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the layers; auto: bfloat16 on GPU, float32 on CPU. Master weights and LM head are float32."""


@dataclass(frozen=True, slots=True)
class RefFsdpConfig:
    param_offload: bool = False
    """GPU: keep the reference's parameters in host memory while it is not asked."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type of the layers; auto: bfloat16 on GPU, float32 on CPU."""


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Registered policy loss, or your own as file.py:function; docs/algorithms.md has all of them and their options."""
    tau_pos: Positive | None = None
    """sapo: temperature of the gate where the advantage is positive; null, as for the options below: the loss's own default."""
    tau_neg: Positive | None = None
    """sapo: temperature of the gate elsewhere."""
    clip_cov_ratio: Fraction | None = None
    """clip_cov: share of the tokens that are left out."""
    clip_cov_lb: float | None = None
    """clip_cov: they have a covariance above this."""
    clip_cov_ub: float | None = None
    """clip_cov: and below this."""
    kl_cov_ratio: Fraction | None = None
    """kl_cov: share of the tokens that are held back."""
    ppo_kl_coef: NonNegative | None = None
    """kl_cov: weight of the penalty on these."""
    dro_beta: NonNegative | None = None
    """dro: weight of the pull towards the policy that sampled."""
    max_ratio: Positive | None = None
    """dppo_tv, dppo_kl: largest weight of a token."""


@dataclass(frozen=True, slots=True)
class AdaptiveEntropyConfig:
    enable: bool = False
    """Steer the weight of the entropy bonus, from entropy_coeff on, so that the entropy does not fall below a target (Skywork-OR1)."""
    target: Positive = 0.2
    """Entropy per trained token, in nats, that it holds; above it there is no bonus."""
    delta: Positive = 0.005
    """By how much the weight rises after a step below the target, and falls after one above."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = field(
        default_factory=lambda: ["model", "optimizer", "extra"]
    )
    """What a checkpoint holds. Resuming needs the first three; hf_model adds a Hugging Face folder."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory (12 bytes per parameter, shared by the ranks); a checkpoint counts once it is whole. false: training waits for the disk."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Sharding of the trained model. Both names run FSDP2."""
    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step, over all ranks. train_batch_size must be a multiple of it."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rollouts per forward/backward pass on one rank. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu) instead of by rollouts; null: yes, unless ppo_micro_batch_size_per_gpu is given."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Most tokens, prompts included, in one micro-batch of one rank."""
    ppo_epochs: Count = 1
    """Passes over the rollouts of one training step."""
    shuffle: bool = False
    """Deal the prompts of a step to mini-batches in a new seeded order in every pass."""
    data_loader_seed: CountOrZero = 42
    """Seed of that order."""
    clip_ratio: Positive = 0.2
    """Clip range of the probability ratio on both sides: [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Positive | None = None
    """Lower side, if it differs from clip_ratio."""
    clip_ratio_high: Positive | None = None
    """Upper side, if it differs from clip_ratio (DAPO: 0.28)."""
    clip_ratio_c: Annotated[float, Range(gt=1, lt=float("inf"))] = 3.0
    """Dual clip: bound of the loss for negative advantages, as a multiple of -advantage (Ye et al. 2020)."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    loss_agg_mode: str = "token-mean"
    """How token losses become one number; the denominators are those of the whole mini-batch."""
    loss_scale_factor: Positive | None = None
    """seq-mean-token-sum-norm: the constant that it divides by; null: data.max_response_length."""
    entropy_coeff: Annotated[float, Range(gt=float("-inf"), lt=float("inf"))] = 0.0
    """Weight of the entropy bonus."""
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    use_kl_loss: bool = True
    """Add KL(policy || reference) to the loss, as GRPO does. Starts the reference worker."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of that term (beta)."""
    kl_loss_type: KlType = "low_var_kl"
    """Its estimator. With a + it has the gradient of the KL, k3_unbiased off-policy too; `full` is the exact sum over the vocabulary."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(frozen=True, slots=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Rollouts per forward pass on one rank."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut by tokens; null: as actor.use_dynamic_bsz, unless log_prob_micro_batch_size_per_gpu is given."""
    log_prob_max_token_len_per_gpu: Count | None = None
    """Most tokens per forward pass; null: as actor.ppo_max_token_len_per_gpu."""
    fsdp_config: RefFsdpConfig = field(default_factory=RefFsdpConfig)


@dataclass(frozen=True, slots=True)
class ValSamplingConfig:
    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: CountOrOff = -1
    """Sample from the so many likeliest tokens; -1: all."""
    n: Count = 1
    """Responses per validation prompt."""
    do_sample: bool = False
    """false is greedy, and then temperature must be 0 and n 1."""


@dataclass(frozen=True, slots=True)
class WeightSyncConfig:
    backend: Literal["auto", "object_store", "ipc", "nccl"] = "auto"
    """How weights reach the engines: auto takes CUDA IPC when colocated, NCCL when apart, Ray's shared memory on CPU."""
    update_weights_bucket_megabytes: Count = 512
    """Size of the pieces they travel in."""
    verify_checksum: bool = False
    """After every transfer compare a digest of each tensor on both sides."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    name: str = "vllm"
    """Engine: vllm, or hf (transformers generate; slow, for debugging)."""
    n: Count = 8
    """Responses per prompt: the group of GRPO."""
    temperature: Positive = 1.0
    """Of sampling; the trainer's log-probs are taken at the same temperature."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with at least this probability; the trainer's log-probs are of the same set."""
    top_k: CountOrOff = -1
    """Sample from the so many likeliest tokens; -1: all. Likewise. vllm: also bounds the sets of top_p and min_p."""
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    """Sample only tokens with at least this share of the likeliest one's probability. Likewise."""
    fp32_lm_head: bool = False
    """vllm: logits in float32 though `dtype` is less, as the trainer's always are."""
    seed: CountOrZero = 0
    """Seed of sampling; each response has its own, derived from this, the step, the prompt and its number."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute type of the engine; auto: bfloat16 on GPU, float32 on CPU."""
    tensor_model_parallel_size: Count = 1
    """Devices per engine replica."""
    nnodes: CountOrZero = 0
    """Nodes of a pool of its own for rollout; 0: engines share the actor's devices and sleep while it trains."""
    n_gpus_per_node: Count | None = None
    """Devices per node of that pool; null: as trainer.n_gpus_per_node."""
    gpu_memory_utilization: Annotated[float, Range(gt=0, lt=1)] = 0.5
    """GPU: share of the device's memory for the engine."""
    kv_cache_gib: Positive = 1.0
    """CPU: most memory for the engine's key-value cache, in GiB."""
    free_cache_engine: bool = True
    """GPU, colocated: the engine gives its memory back while the actor trains."""
    enforce_eager: bool | None = None
    """No compilation and CUDA graphs; null: true on CPU, false on GPU."""
    max_num_seqs: Count = 256
    """Most responses that one replica samples at once."""
    max_num_batched_tokens: Count = 8192
    """Most tokens in one forward pass of the engine."""
    max_model_len: Count | None = None
    """Longest prompt plus response; null: max_prompt_length + max_response_length."""
    enable_prefix_caching: bool = True
    """Compute a prompt once for all its responses."""
    ignore_eos: bool = False
    """Go on to max_response_length whatever is sampled (for benchmarks)."""
    cpu_threads: CountOrZero = 0
    """CPU: OpenMP threads of an engine; 0: chosen by the number of cores and replicas."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Rollouts per forward pass when the actor recomputes old log-probs."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut these by tokens; null: as actor.use_dynamic_bsz, unless log_prob_micro_batch_size_per_gpu is given."""
    log_prob_max_token_len_per_gpu: Count | None = None
    """Most tokens per such pass; null: as actor.ppo_max_token_len_per_gpu."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    checkpoint_engine: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed on to the engine's constructor, by engine name: {vllm: {...}}."""


@dataclass(frozen=True, slots=True)
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


# ---- critic ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CriticModelConfig:
    path: str = ""
    """Folder of the causal LM whose body the critic starts from, with the actor's vocabulary; empty: the actor's model."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about 30 % more work."""


@dataclass(frozen=True, slots=True)
class CriticOptimConfig(OptimConfig):
    lr: Positive = 1e-5
    """Peak learning rate of AdamW."""


@dataclass(frozen=True, slots=True)
class CriticConfig:
    enable: bool | None = None
    """Whether there is a critic; null: where algorithm.adv_estimator needs one. Any other answer than that is refused."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step, over all ranks; null: as actor_rollout_ref.actor.ppo_mini_batch_size."""
    ppo_epochs: Count | None = None
    """Passes over the rollouts of one training step; null: as actor_rollout_ref.actor.ppo_epochs."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rollouts per forward/backward pass on one rank. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; null: as the actor, unless one of the sizes here is given."""
    ppo_max_token_len_per_gpu: Count | None = None
    """Most tokens, prompts included, in one micro-batch of one rank; null: as actor_rollout_ref.actor.ppo_max_token_len_per_gpu."""
    cliprange_value: Positive = 0.5
    """Farthest that a value may move from what it was before the update, in the value loss."""


# ---- algorithm, reward, trainer ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KlControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep kl_coef, or steer it to target_kl (Ziegler et al. 2019, section 2.2)."""
    kl_coef: NonNegative = 0.001
    """Weight of the KL penalty in the reward, at the start."""
    horizon: Count = 10000
    """Rollouts over which the adaptive controller works."""
    target_kl: Positive = 0.1
    """KL that it steers to: the mean over responses of their tokens' mean."""


@dataclass(frozen=True, slots=True)
class RolloutCorrectionConfig:
    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by the ratio of the trainer's old policy to the engine's: of each token, or of its whole response."""
    rollout_is_threshold: Annotated[float, Range(gt=1, lt=float("inf"))] | None = None
    """Larger weights are cut to this; null: 2, or not cut where rollout_rs bounds the same ratio."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: list[RejectionMode] = field(default_factory=list)
    """What is compared with the bounds below; outside, the token (token_*) or the whole response (seq_*) is not trained."""
    rollout_rs_threshold: list[Positive] = field(default_factory=list)
    """Upper bound for each entry of rollout_rs: of a ratio for k1, of a divergence for k2 and k3."""
    rollout_rs_threshold_lower: list[Positive] = field(default_factory=list)
    """Lower bound for each k1 entry of rollout_rs; empty: 1/upper."""
    bypass_mode: bool = False
    """Take the engine's log-probs as the old ones, so that the ratio of the loss is the correction."""


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
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """Registered advantage estimator, or your own as file.py:function; docs/algorithms.md has all of them."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false: Dr. GRPO's advantages. Only for adv_estimator=grpo."""
    gamma: Fraction = 1.0
    """Discount of rewards from token to token, for estimators that discount."""
    lam: Fraction = 1.0
    """Decay of GAE, for estimators that have it."""
    adv_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the estimator, e.g. {std: batch}; their defaults are in docs/algorithms.md."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward (instead of use_kl_loss)."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"
    """Estimator of that penalty."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    mask_truncated: bool = False
    """Do not train responses that were cut off at max_response_length; they still count in their group's mean."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)


@dataclass(frozen=True, slots=True)
class CustomRewardConfig:
    path: str | None = None
    """A Python file with your own reward function; short for reward.functions=[path:name]."""
    name: str = "compute_score"
    """The function in it: (data_source, solution_str, ground_truth, extra_info) -> float or {score: float, ...}."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""


@dataclass(frozen=True, slots=True)
class OverlongBufferConfig:
    len: Count | None = None
    """Soft penalty for long training responses: it grows over so many tokens before data.max_response_length (DAPO); null: none."""
    penalty_factor: Positive = 1.0
    """Penalty of a response of the full length."""


@dataclass(frozen=True, slots=True)
class RewardModelConfig:
    enable: bool = False
    """Add the score of a reward model to the reward; it runs in a worker group of its own. See docs/model_rewards.md."""
    model_path: str | None = None
    """Its Hugging Face folder: a decoder with a sequence- or token-classification head of one label."""
    tokenizer_path: str | None = None
    """Folder of its tokenizer; null: model_path."""
    trust_remote_code: bool = False
    """Run Python code that lies in its folder."""
    weight: float = 1.0
    """Factor of its score in the reward."""
    step_separator: str | None = None
    """Cut responses into steps at this text and score the end of each: process rewards, for adv_estimator=grpo_process; `\\n` is a line break; null: one score per response."""
    rerender: Literal["auto", "always", "never"] = "auto"
    """Render prompts with its own chat template and tokenizer; auto: only where they differ from the policy's."""
    max_token_len_per_gpu: Count = 16384
    """Most tokens in one forward pass of one rank, and in one rollout."""
    enable_resource_pool: bool = False
    """Give it devices of its own; false: it shares the actor's."""
    nnodes: CountOrZero = 0
    """Nodes of its own pool."""
    n_gpus_per_node: Count | None = None
    """Ranks per node of its own pool; null: as trainer.n_gpus_per_node."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What its layers compute in; auto: bfloat16 on GPUs, float32 on CPUs. Scores are float32."""
    param_offload: bool = False
    """Keep its weights on the host between scorings."""


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    base_url: str | None = None
    """An OpenAI-compatible endpoint (.../v1) whose model judges each response; null: no judge. See docs/model_rewards.md."""
    model: str | None = None
    """The model's name there."""
    template: str | None = None
    """What it is asked: a text, or a file (.txt, .md), with {prompt}, {response} and {ground_truth}; null: a built-in one that asks for 0 to 10."""
    system: str | None = None
    """System message before it."""
    parser: str = "score"
    """How its answer becomes a number: score (the last `score: x`), last_number, json:KEY, or path.py:function(text) -> float."""
    min_score: float | None = None
    """A lower score is invalid; null: any is valid."""
    max_score: float | None = None
    """A higher score is invalid; null: any is valid."""
    weight: float = 1.0
    """Factor of its score in the reward."""
    max_tokens: Count = 512
    """Longest answer."""
    temperature: NonNegative = 0.0
    """Of its answers."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, e.g. {response_format: {type: json_object}}."""
    max_concurrency: Count = 16
    """Requests at the same time."""
    requests_per_minute: Count | None = None
    """Most requests in a minute, tries again included; null: no limit."""
    timeout_s: Positive = 60.0
    """Longest time for one request."""
    retries: CountOrZero = 4
    """Further tries after a timeout, a broken connection or answer, and the states 408, 425, 429 and 5xx."""
    backoff_s: Positive = 1.0
    """Wait before the first further try, doubled for each one after; the wait is drawn between half of it and all of it."""
    deadline_s: Positive = 300.0
    """Longest time for one judgement, all tries and waits included."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself is in no file and no log."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    functions: list[str] = field(default_factory=lambda: ["auto"])
    """Rewards that are summed: registered names or path.py:function, each with a factor if wanted (`0.2*format`). `auto` takes the rule that belongs to the row's data_source. May be empty beside a reward model or a judge."""
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    function_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of functions by their name: {my_function: {option: value}}."""
    batched: list[str] = field(default_factory=list)
    """Functions that are called once with all responses of a step: (data_sources, solution_strs, ground_truths, extra_infos), lists, -> list."""
    num_workers: Count = 2
    """Processes that compute rewards."""
    timeout_s: Positive = 10.0
    """Longest time for one response through all functions, and for one call of a batched one; then its process is killed and replaced."""
    memory_limit_gb: Positive | None = 2.0
    """Address space of a reward process, in GiB; null: no limit, for functions that load large libraries."""
    on_failure: Literal["drop", "value", "stop"] = "drop"
    """When a reward fails (too slow, an error, no number): drop leaves the rollout out of its group, value gives failure_value, stop ends the run."""
    failure_value: float | None = None
    """The reward of a failed one with on_failure=value."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    project_name: str = "grpo_rl"
    """Folder of the runs, and project of W&B or MLflow."""
    experiment_name: str | None = None
    """Name of this run; null: a new one with the date. A named run resumes where it stopped (resume_mode)."""
    default_local_dir: str = "runs/${trainer.project_name}"
    """Where the run's folder is made."""
    logger: list[Literal["console", "tensorboard", "wandb", "mlflow"]] = field(
        default_factory=lambda: ["console", "tensorboard"]
    )
    """Where metrics go, beside metrics.jsonl in the run's folder, which is always written."""
    total_epochs: Count = 30
    """Passes over the training data."""
    total_training_steps: Count | None = None
    """Training steps; null: total_epochs of the data."""
    nnodes: Count = 1
    """Nodes of the actor's pool."""
    n_gpus_per_node: Count | None = None
    """Actor ranks per node: GPUs on a GPU machine, processes on a CPU one; null: all GPUs, or 1 process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where there is a GPU."""
    seed: CountOrZero = 1
    """Seed of everything in the trainer that is not data order or sampling (dropout, new weights)."""
    critic_warmup: CountOrZero = 0
    """First training steps in which only the critic learns."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: CountOrOff = -1
    """Validate every so many steps, and at the end; -1: only before and at the end."""
    save_freq: CountOrOff = -1
    """Write a checkpoint every so many steps, and at the end; -1: none."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written (disk full, read-only, failing): stop, or train on and try again at the next save point. Earlier checkpoints are untouched either way."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the newest checkpoint in the run's folder; resume_path: from resume_from_path."""
    resume_from_path: str | None = None
    """A checkpoint folder (.../checkpoints/step_N)."""
    max_actor_ckpt_to_keep: Count | None = None
    """Keep only the newest so many checkpoints; null: all."""
    export_at_end: bool = True
    """Write the trained policy to <run>/model, a Hugging Face folder."""
    save_rollouts: bool = True
    """Write every rollout to <run>/rollouts/step_N.jsonl."""
    dry_run: bool = False
    """Print the plan and stop."""
    start_timeout_s: Positive = 600.0
    """Longest time for workers to start (loading the model and the engine)."""
    step_timeout_s: Positive = 3600.0
    """Longest time for one phase of a step; then the workers that did not answer count as failed."""
    recover: Literal["auto", "memory", "checkpoint", "off"] = "auto"
    """When worker processes die or freeze: off ends the run; else they are started again. The actor's and the critic's
    state comes from a copy made in host memory after every update (memory) or from the newest checkpoint and the
    updates since, done again (checkpoint); auto: memory up to recover_memory_gib, else checkpoint."""
    recover_memory_gib: Positive = 0.5
    """recover=auto: the largest state of actor or critic, all ranks together, that is copied after every update."""
    heartbeat_s: Positive = 5.0
    """How often a worker process shows that it lives; one that misses three beats is ended and started again."""
    max_restarts: CountOrZero = 5
    """Restarts of one worker within restart_window_s; then the run stops and names all causes."""
    restart_window_s: Positive = 3600.0
    """How long a restart counts for max_restarts."""
    collective_timeout_s: Positive = 600.0
    """How long ranks of one role wait for each other in a collective operation; then their group counts as failed."""
    grace_s: Positive = 30.0
    """Seconds that SIGTERM, SIGINT or SIGUSR1 leave to finish or give up the step and to save; then the process ends."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """When loss or gradient are not finite: leave that update out on every rank and go on, or stop. The rollouts are kept in <run>/nonfinite_step_N.jsonl."""
    max_nonfinite_steps: CountOrZero = 3
    """skip: so many training steps in a row may leave an update out, then the run stops."""


@dataclass(frozen=True, slots=True)
class RayInitConfig:
    address: str | None = None
    """Address of a running cluster (`auto`, or ray://...); null: a local one, or the job's own under `ray job submit`."""
    num_cpus: Count | None = None
    """CPUs of a local cluster; null: all."""
    allow_insecure: bool = False
    """Use the cluster at `address` though it asks nobody for a token; whoever reaches its ports can run code there."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, checked; what every part of the program receives."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
