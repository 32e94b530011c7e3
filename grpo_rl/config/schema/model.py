"""Options `actor_rollout_ref.*` and `critic.*`."""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import Literal

from grpo_rl.config.schema.kinds import *

_NOT_OFFLOADED = "offload_policy=false | {offload_policy}=true keeps everything in host memory all the time"
_SAMPLES = "do_sample=true | validation is greedy without {do_sample}=true"
_IS_WARM = "temperature above 0 | validation is greedy at temperature 0"

POLICY_KEY = "actor_rollout_ref.model.path"


@frozen
class ModelConfig:
    path: str = ""
    """A Hugging Face model folder (or hub name), or `builtin:NAME` for an embedded model."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer, if not the model's."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""
    override_config: Options = field(dict)
    """Changes to the model's Hugging Face config, e.g. {attention_dropout: 0.1}."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about 30 % more work. null: false if the plan
    finds the memory (on GPUs, or without any), else true."""
    enable_activation_offload: bool = field(False, needs=["enable_gradient_checkpointing=true or null", ON_GPUS], harmless=True)
    """GPU: keep the inputs of recomputed layers in host memory until the backward pass."""
    flash_attention: Literal["auto", "torch", "FA3", "FA4"] = field("auto", needs=ON_GPUS, harmless=True)
    """GPU: attention in half precision. auto: flash-attn 2 if installed, else torch's own; torch: its own;
    FA3, FA4: that of torch's registry, whose package must be installed."""
    lm_head_precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Rounding of inputs of the LM head's products; sums and results are float32. auto: tf32 on GPUs, whose
    log-probs are 8 times closer to float64 than bfloat16's (docs/gpus.md), float32 on CPUs."""
    lm_head_chunk_tokens: Tokens | None = None
    """Trained tokens whose logits exist at once: speed against memory. null: 2048, or as many as have 64 MiB
    of logits, and up to 16,384 on GPUs that have the memory by the plan."""
    lora_rank: AdapterRankOrOff = 0
    """Rank of LoRA adapters, trained instead of the model's weights (docs/models.md); 0: all weights."""
    lora_alpha: AdapterAlpha = field(16, needs="lora_rank above 0")
    """LoRA: lora_alpha / lora_rank scales what an adapter adds."""
    target_modules: list[str] = field(lambda: ["all-linear"], needs="lora_rank above 0")
    """LoRA: layers by ends of names, e.g. [q_proj,v_proj]; all-linear: all linear layers but the head."""
    exclude_modules: list[str] = field(list, needs="lora_rank above 0")
    """LoRA: layers to leave out of target_modules."""
    lora_adapter_path: str | None = field(None, needs="lora_rank above 0")
    """LoRA: peft folder of the initial adapter, of the same rank, alpha and layers."""


@frozen
class OptimConfig:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for matrices of transformer blocks, AdamW for the rest, at one learning rate."""
    lr: LearningRate = 1e-6
    """Peak learning rate."""
    betas: list[Decay] = field(lambda: [0.9, 0.999])
    """AdamW's decay rates; the first is Muon's momentum, usually 0.95."""
    eps: Epsilon = 1e-8
    """AdamW's epsilon."""
    weight_decay: WeightDecay = 0.01
    """Decoupled weight decay of matrices, not of vectors (norms, biases)."""
    lr_warmup_steps: CountOrOff = -1
    """Optimizer steps of linear warm-up; -1: lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = field(0.0, needs="lr_warmup_steps=-1")
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    min_lr_ratio: Fraction = field(0.0, needs="lr_scheduler_type=linear or cosine")
    """End of the linear and cosine course, as a share of lr."""
    clip_grad: GradientNorm = 1.0
    """Largest global gradient norm; larger gradients are scaled down."""


@frozen
class HeadOptimConfig(OptimConfig):
    lr: LearningRate = 1e-5
    """Peak learning rate."""


@frozen
class RefFsdpConfig:
    param_offload: bool = field(False, needs=[ON_GPUS, _NOT_OFFLOADED], harmless=True)
    """GPU: keep parameters in host memory while the role is idle."""
    dtype: Dtype = "auto"
    """Compute type of the layers; auto: bfloat16 on GPU, float32 on CPU. Master weights and LM head are
    float32."""
    fsdp_size: CountOrOff = field(-1, harmless=True)
    """Ranks that the model is sharded over, with a replica per such group; -1: all. Must divide the ranks."""
    offload_policy: bool = field(False, needs=ON_GPUS, harmless=True)
    """GPU: parameters and optimizer stay in host memory, where it steps; the GPU has layers in use only.
    Replaces other offloads."""
    forward_prefetch: bool = False
    """Gather a layer's parameters while the layer before it is computed."""
    use_torch_compile: bool = False
    """torch.compile the decoder layers: faster after minutes of compilation, equal up to rounding."""


@frozen
class FsdpConfig(RefFsdpConfig):
    optimizer_offload: bool = field(False, needs=[ON_GPUS, _NOT_OFFLOADED], harmless=True)
    """GPU: keep the optimizer state in host memory while the rollout engine runs."""
    reshard_after_forward: bool = True
    """Free a gathered layer after its forward pass: less memory, one more all-gather."""


@frozen
class ProfilerConfig:
    enable: bool = field(False, needs="global_profiler.tool")
    """Use global_profiler.tool on this role."""
    all_ranks: bool = field(False, needs="enable=true")
    """Use it on all ranks of the role."""
    ranks: list[Ranks] = field(list, needs=["enable=true", "all_ranks=false"])
    """Use it on these ranks; none without all_ranks: rank 0."""


@frozen
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Registered policy loss, or your own file.py:function; docs/algorithms.md."""
    options: Options = field(dict)
    """Options of the loss, e.g. {tau_pos: 2.0}; docs/algorithms.md."""


@frozen
class RouterReplayConfig:
    mode: Literal["disabled", "R2"] = "disabled"
    """Models with experts. R2: in updates tokens take the experts of the pass for old log-probs. R3 (the
    engine's) is not available (docs/models.md)."""


@frozen
class AdaptiveEntropyConfig:
    enable: bool = False
    """Steer the entropy bonus, from entropy_coeff on, to keep the entropy above a target (Skywork-OR1)."""
    target: Nats = 0.2
    """Entropy per trained token, in nats, below which the bonus grows; above, there is none."""
    delta: Nats = 0.005
    """Rise of the weight after a step below the target, and fall after one above."""


@frozen
class CheckpointConfig:
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = field(lambda: ["model", "optimizer", "extra"])
    """Resuming needs the first three; hf_model adds a Hugging Face folder."""
    async_save: bool = True
    """Write checkpoints, which count once whole, during training, from a copy in host memory (12 bytes per
    parameter, shared by the ranks); false: training waits for the disk."""


@frozen
class ActorConfig:
    strategy: Literal["fsdp", "fsdp2"] = "fsdp2"
    """Both names run FSDP2."""
    ppo_mini_batch_size: Prompts = 256
    """Prompts per optimizer step, over all ranks. train_batch_size must be a multiple of it."""
    ppo_micro_batch_size_per_gpu: Rollouts | None = field(None, harmless=True)
    """Rollouts per pass on one rank. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of rollouts; null: unless ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: Tokens = 16384
    """Most tokens, with prompts, in a rank's micro-batch; a sequence-parallel group has as many times more."""
    ulysses_sequence_parallel_size: Devices = 1
    """Ranks that compute each micro-batch together, a slice of its tokens each, for long sequences. Never
    changes the gradient. Must divide the ranks and the model's attention heads."""
    use_prefix_grouper: bool | None = None
    """Compute a prompt once for all its responses in a micro-batch, in every pass of actor, reference and
    critic; its tokens count once in ppo_max_token_len_per_gpu. Never changes the gradient. null: unless the
    model drops at random in training."""
    ppo_epochs: Count = field(1, part="policy")
    """Passes over the rollouts of one training step."""
    shuffle: bool = field(False, part="policy")
    """Deal a step's prompts to mini-batches in a new seeded order in every pass."""
    data_loader_seed: Seed = field(42, part="policy", needs="shuffle=true")
    """Seed of that order."""
    clip_ratio: Ratio | None = None
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]; null: the loss's default, 0.2 for ours."""
    clip_ratio_low: Ratio | None = None
    """Lower side of the clip range, if it differs from clip_ratio."""
    clip_ratio_high: Ratio | None = None
    """Upper side of the clip range, if it differs from clip_ratio (DAPO: 0.28)."""
    clip_ratio_c: RatioAboveOne | None = field(None, harmless=True)
    """vanilla: dual clip, the loss's bound in multiples of a negative advantage (Ye et al. 2020); null: 3."""
    policy_loss: PolicyLossConfig = field(PolicyLossConfig)
    loss_agg_mode: str = "token-mean"
    """How token losses become one number; denominators are those of the whole mini-batch."""
    loss_agg_options: Options = field(dict)
    """Options of your own average."""
    loss_scale_factor: Positive | None = None
    """seq-mean-token-sum-norm: its divisor; null: data.max_response_length."""
    entropy_coeff: Factor = 0.0
    """Weight of the entropy bonus."""
    adaptive_entropy: AdaptiveEntropyConfig = field(AdaptiveEntropyConfig, needs="adaptive_entropy.enable=true")
    use_kl_loss: bool = True
    """Add KL(policy || reference) to the loss, as GRPO does; starts the reference."""
    kl_loss_coef: Coefficient = field(0.001, part="kl_loss")
    """Weight of the KL term in the loss (beta)."""
    kl_loss_type: str = field("low_var_kl", part="kl_loss", needs=["use_kl_loss=true", "kl_loss_coef above 0"])
    """Estimator (kl or k1, abs, mse or k2, low_var_kl or k3), or your own file.py:function. With a + it has
    the KL's gradient, k3_unbiased off-policy too; `full` is the exact sum over the vocabulary."""
    kl_loss_options: Options = field(dict, part="kl_loss", needs=["use_kl_loss=true", "kl_loss_coef above 0"])
    """Options of your own estimator."""
    router_aux_loss_coef: Coefficient = 0.0
    """Models with experts: weight of the loss for even use of experts, over the mini-batch's trained tokens
    (docs/models.md). Costs a forward pass per optimizer step, unless router_replay.mode=R2."""
    router_replay: RouterReplayConfig = field(RouterReplayConfig)
    optim: OptimConfig = field(OptimConfig)
    fsdp_config: FsdpConfig = field(FsdpConfig)
    profiler: ProfilerConfig = field(ProfilerConfig)
    checkpoint: CheckpointConfig = field(CheckpointConfig, needs="trainer.save_freq above 0 or trainer.keep_best=true")


@frozen
class RefConfig:
    log_prob_micro_batch_size_per_gpu: Rollouts | None = None
    """Rollouts per forward pass on one rank."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut passes by tokens; null: as actor.use_dynamic_bsz, unless the size before is set."""
    log_prob_max_token_len_per_gpu: Tokens | None = None
    """Most tokens per forward pass; null: as actor.ppo_max_token_len_per_gpu."""
    ulysses_sequence_parallel_size: Devices | None = None
    """Ranks that compute each pass together; null: as the actor."""
    fsdp_config: RefFsdpConfig = field(RefFsdpConfig)
    profiler: ProfilerConfig = field(ProfilerConfig)


@frozen
class ValSamplingConfig:
    temperature: TemperatureOrGreedy = field(0.0, needs=[_SAMPLES, _IS_WARM])
    """Temperature of sampling for validation; 0 is greedy."""
    top_p: PositiveFraction = field(1.0, needs=[_SAMPLES, _IS_WARM])
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: TopK = field(-1, needs=[_SAMPLES, _IS_WARM])
    """Sample from so many likeliest tokens; -1: all."""
    n: Responses = 1
    """Responses per validation prompt."""
    do_sample: bool = field(False, needs=_IS_WARM)
    """false: greedy; temperature must be 0 then, and n 1."""


@frozen
class WeightSyncConfig:
    backend: Literal["auto", "object_store"] = "auto"
    """Transport of weights. auto: CUDA IPC if colocated, NCCL if apart, shared memory on CPU; object_store:
    host memory, if those do not work."""
    update_weights_bucket_megabytes: Megabytes = 512
    """Size of pieces of weights."""
    verify_checksum: bool | None = None
    """Compare a digest of each tensor on both sides after every transfer. null: on GPUs."""


@frozen
class HfEngineConfig:
    batched: bool = True
    """false: each response has its own forward passes: many times slower, the same to the last bit whatever
    is sampled beside it, on any replica."""


TruncationRule = Literal["keep", "drop", "mask", "punish"]


@frozen
class EnvironmentConfig:
    name: str | None = None
    """Registered environment, or your own file.py:Class; null: tools alone (docs/agents.md)."""
    options: Options = field(dict, needs="name")
    """Options of its constructor."""
    reward_weight: Factor = 1.0
    """Factor of the episode's own reward (by environment and tools) in the reward."""
    num_workers: Processes | None = None
    """Processes per node; null: half of the cores that ranks and engines leave, at most 32."""
    step_timeout_s: Seconds = 60.0
    """Longest answer to one turn, tool calls included; then the episode ends as truncated by time."""
    tool_timeout_s: Seconds = field(30.0, needs="tools or tool_config_path")
    """Longest tool call; then the policy reads that it took too long, and goes on."""
    memory_limit_gb: ProcessGib | None = 8.0
    """Address space of a process, in GiB; null: no limit."""
    retries: Tries = 2
    """Further tries of an episode whose process was lost."""


@frozen
class TruncationConfig:
    turns: TruncationRule = field("keep", needs="max_assistant_turns or max_user_turns")
    """Episodes that end by the limit on turns. keep: train; drop: leave out of the group; mask: compare, and
    train no token; punish: take truncation.penalty off the reward."""
    tokens: TruncationRule = "keep"
    """The same by data.max_response_length or the engine's max_model_len."""
    time: TruncationRule = "drop"
    """The same by a deadline."""
    penalty: Coefficient = field(1.0, needs="turns=punish or tokens=punish or time=punish")
    """What punish takes off the reward."""


@frozen
class MultiTurnConfig:
    enable: bool = False
    """Sample episodes of several turns, with an environment or tools, instead of single responses."""
    max_assistant_turns: Turns | None = None
    """Most turns of the policy in one episode; null: until data.max_response_length is full."""
    max_user_turns: Turns | None = None
    """Most answers of tools or environment; one more turn of the policy may follow. null: no limit."""
    tool_config_path: str | None = None
    """YAML file of tools in verl's form: `tools:`, a list of class_name, config, tool_schema."""
    interaction_config_path: str | None = None
    """Instead of environment.name: YAML file in verl's form, `interaction:`, a list of name, class_name, config."""
    tools: Options = field(dict)
    """Tools by registered name or file.py:Class, with options: {calculator: {}}."""
    format: str = field("hermes", needs="tools or tool_config_path")
    """Form of tool calls: hermes (Qwen too), llama3_json, or your own parser file.py:function."""
    max_parallel_calls: Requests = field(1, needs="tools or tool_config_path")
    """Most tool calls of one turn, run side by side; further ones are left out."""
    max_tool_response_length: Length = field(256, needs="tools or tool_config_path")
    """Most characters of a tool's answer that the policy reads."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = field("middle", needs="tools or tool_config_path")
    """What longer answers lose: the end (left, as in verl), the middle, or the beginning."""
    episode_timeout_s: Seconds | None = None
    """Longest time of one episode, from its first turn; null: none."""
    turn_discount: Fraction = field(1.0, needs="environment.reward_weight")
    """Discount of a turn's reward for each turn before it, in the episode's reward."""
    environment: EnvironmentConfig = field(EnvironmentConfig)
    truncation: TruncationConfig = field(TruncationConfig)


@frozen
class RolloutConfig:
    name: str = "vllm"
    """Engine: vllm, or hf (plain transformers: slower, for debugging and if vLLM is missing)."""
    n: Responses = field(8, part="samples")
    """Responses per prompt: GRPO's group."""
    function: str | None = field(None, part="policy")
    """Your own rollouts, `file.py:play`, a function of a Sampler and the prompts (docs/agents.md)."""
    temperature: Temperature = field(1.0, part="samples")
    """Temperature of sampling and of the trainer's log-probs."""
    top_p: PositiveFraction = field(1.0, part="samples")
    """Sample from the smallest set of tokens with at least this probability, as the trainer's log-probs do."""
    top_k: TopK = field(-1, part="samples")
    """Sample from so many likeliest tokens; -1: all. As top_p. vllm: bounds the sets of top_p and min_p."""
    min_p: Fraction = field(0.0, part="samples")
    """Sample tokens with at least this share of the likeliest one's probability. As top_p."""
    fp32_lm_head: bool = field(False, needs="name=vllm")
    """vllm: float32 logits though `dtype` is less, as the trainer's."""
    seed: Seed = field(0, harmless=True)
    """Each response's seed derives from this, the step, the prompt and its number."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute type of the engine; auto: bfloat16 on GPU, float32 on CPU."""
    tensor_model_parallel_size: Devices = 1
    """Devices per engine replica."""
    engines_per_device: Devices = 1
    """Engines that share each device: with a small model one's Python runs beside another's kernels. On GPUs
    it needs kv_cache_memory_bytes: engines that start side by side cannot measure what is left."""
    num_replicas: Devices | None = None
    """Initial engine replicas; null: as many as the devices hold. With fewer the last devices have none."""
    min_replicas: Devices | None = field(None, needs=["trainer.recover=auto", "trainer.val_only=false"])
    """Fewest replicas after `grpo-rl engines RUN --remove`, or a node's leaving; null: num_replicas."""
    max_replicas: Devices | None = field(None, needs=["trainer.recover=auto", "trainer.val_only=false"])
    """Most replicas after `grpo-rl engines RUN --add`, or a node's joining; null: num_replicas."""
    quantization: Literal["fp8"] | None = field(
        None, needs=["name=vllm", "trainer.device=cuda | it needs a GPU of compute capability 8.9 or newer"]
    )
    """vllm on GPUs: quantize the engine's weights and activations (fp8); training stays in dtype and float32.
    See rollout/logprob_diff_mean and algorithm.rollout_correction."""
    nnodes: NodesOrNone = 0
    """Nodes of a pool for rollout; 0: engines share the actor's devices, and sleep while it trains."""
    n_gpus_per_node: Devices | None = field(
        None,
        needs="nnodes above 0 | with {nnodes}=0 engines share the actor's devices; {nnodes} gives them their own",
    )
    """Devices per node of that pool; null: as trainer.n_gpus_per_node."""
    gpu_memory_utilization: MemoryShare = field(0.5, needs=["name=vllm", ON_GPUS], harmless=True)
    """GPU: share of memory for a device's engines."""
    kv_cache_memory_bytes: CacheBytes | None = field(None, needs=["name=vllm", ON_GPUS], harmless=True)
    """GPU: bytes of the key-value cache per device, vLLM's argument; null: what gpu_memory_utilization leaves
    beside weights and activations, as vLLM measures at its start."""
    kv_cache_gib: Gib = field(1.0, needs=["name=vllm", ON_CPUS], harmless=True)
    """CPU: most memory for the key-value cache, in GiB."""
    lora_sync: Literal["merged", "adapter"] = field("merged", needs="model.lora_rank above 0")
    """LoRA: what engines get. merged: whole weights with adapters added; adapter: adapters alone, a
    hundredth, to add to the weights of the model's files."""
    free_cache_engine: bool = field(
        True,
        needs=["name=vllm", ON_GPUS, "nnodes=0 | engines have devices of their own, and keep their memory"],
        harmless=True,
    )
    """GPU, colocated: free the engine's memory while the actor trains."""
    enforce_eager: bool | None = field(None, needs="name=vllm", harmless=True)
    """No compilation and CUDA graphs; null: true on CPU, false on GPU."""
    use_torch_compile: bool = field(
        True,
        needs=["name=vllm", ON_GPUS, "enforce_eager=false or null | {enforce_eager}=true compiles nothing"],
        harmless=True,
    )
    """vllm on GPUs: compile the model as well; false: CUDA graphs alone, and a quicker start."""
    separate_process: bool = field(
        False,
        needs=["name=vllm", "tensor_model_parallel_size=1 | vLLM's workers have processes of their own"],
        harmless=True,
    )
    """vllm: scheduling and sampling in a child process, ahead of what reads the tokens."""
    max_num_seqs: Rollouts | None = None
    """Most responses sampled at once by a replica; null: 1024 on GPUs, as vLLM on large ones, 256 on CPUs."""
    max_num_batched_tokens: Tokens = 8192
    """Most tokens in one forward pass of the engine."""
    max_model_len: Tokens | None = None
    """Longest prompt plus response; null: max_prompt_length + max_response_length."""
    enable_prefix_caching: bool = field(True, needs="name=vllm", harmless=True)
    """Compute a prompt once for all its responses."""
    ignore_eos: bool = field(False, part="samples")
    """Go on to max_response_length (for benchmarks)."""
    cpu_threads: ThreadsOrAuto = field(0, needs=ON_CPUS, harmless=True)
    """CPU: an engine's OpenMP threads; 0: by cores and replicas."""
    log_prob_micro_batch_size_per_gpu: Rollouts | None = field(None, part="policy", harmless=True)
    """Rollouts per pass for old log-probs."""
    log_prob_use_dynamic_bsz: bool | None = field(None, part="policy", harmless=True)
    """Cut passes for old log-probs by tokens; null: as actor.use_dynamic_bsz, unless the size before is given."""
    log_prob_max_token_len_per_gpu: Tokens | None = field(None, part="policy", harmless=True)
    """Most tokens per pass for old log-probs; null: as actor.ppo_max_token_len_per_gpu."""
    val_kwargs: ValSamplingConfig = field(ValSamplingConfig, harmless=True)
    checkpoint_engine: WeightSyncConfig = field(WeightSyncConfig, harmless=True)
    hf: HfEngineConfig = field(HfEngineConfig, needs="name=hf")
    multi_turn: MultiTurnConfig = field(MultiTurnConfig, needs="multi_turn.enable=true")
    engine_kwargs: Options = field(dict, harmless=True)
    """Settings of speed and memory for the engine's constructor: {vllm: {block_size: 32}}; others are refused."""


@frozen
class ActorRolloutRefConfig:
    model: ModelConfig = field(ModelConfig)
    actor: ActorConfig = field(ActorConfig)
    ref: RefConfig = field(RefConfig, part="policy", harmless=True)
    rollout: RolloutConfig = field(RolloutConfig, part="sampling")


@frozen
class CriticModelConfig:
    path: str = ""
    """Causal LM whose body the critic starts from, with the actor's vocabulary; empty: the actor's model."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about 30 % more work."""
    enable_activation_offload: bool = field(False, needs=["enable_gradient_checkpointing=true", ON_GPUS], harmless=True)
    """GPU: as actor_rollout_ref.model.enable_activation_offload."""


@frozen
class CriticConfig:
    enable: bool | None = None
    """null: as adv_estimator needs; true and false are refused if they contradict it."""
    model: CriticModelConfig = field(CriticModelConfig, harmless=True)
    optim: HeadOptimConfig = field(HeadOptimConfig)
    fsdp: FsdpConfig = field(FsdpConfig)
    profiler: ProfilerConfig = field(ProfilerConfig)
    ppo_mini_batch_size: Prompts | None = None
    """Prompts per optimizer step, over all ranks; null: as actor_rollout_ref.actor.ppo_mini_batch_size."""
    ppo_epochs: Count | None = None
    """Passes over the rollouts of one training step; null: as actor_rollout_ref.actor.ppo_epochs."""
    ppo_micro_batch_size_per_gpu: Rollouts | None = field(None, harmless=True)
    """Rollouts per pass on one rank. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; null: as the actor, unless a size here is set."""
    ppo_max_token_len_per_gpu: Tokens | None = None
    """Most tokens, prompts included, in a rank's micro-batch; null: as the actor's."""
    ulysses_sequence_parallel_size: Devices = 1
    """Ranks that compute each micro-batch together, as for the actor."""
    cliprange_value: Positive = 0.5
    """Largest move of a value during the update, in the value loss."""
