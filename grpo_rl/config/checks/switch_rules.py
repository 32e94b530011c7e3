"""Settings that contradict each other, or that another setting has switched off and that would silently do nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

from grpo_rl.config.checks import data_rules, reward_rules, schedule_rules
from grpo_rl.config.convert import show
from grpo_rl.config.derived import (
    collects,
    critic_rule,
    has_kl_in_loss,
    is_iterated,
    is_offline,
    logprob_rule,
    trains_only_reward_model,
    update_rule,
)
from grpo_rl.config.schema.critic import CriticModelConfig
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.model import ModelConfig
from grpo_rl.config.schema.tree import Config, OptimConfig, ProfilerConfig

_RESUMABLE = ("model", "optimizer", "extra")


def problems(config: Config) -> Iterator[str]:
    """Yield contradictions, and every setting without an effect."""
    yield from _kl(config)
    yield from _sampling(config)
    yield from _optimizer(config)
    yield from _experts(config)
    yield from _selection(config)
    yield from _validation(config)
    yield from _checkpoints(config)
    yield from _lora(config)
    yield from _profiler(config)
    yield from _head(config)
    yield from schedule_rules.problems(config)
    yield from reward_rules.episode_problems(config)
    yield from _without_effect(config)


def _kl(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "algorithm.use_kl_in_reward=true: the KL is in the loss already (actor_rollout_ref.actor.use_kl_loss=true, "
            "the default); set actor_rollout_ref.actor.use_kl_loss=false, or algorithm.use_kl_in_reward=false"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.top_k == 0:
        yield f"{key}.top_k=0: would leave no token; -1 takes all"
    cuts = [
        f"{key}.{name}={getattr(rollout, name):g}"
        for name, off in (("top_p", 1.0), ("min_p", 0.0))
        if getattr(rollout, name) != off
    ]
    if rollout.name == "vllm" and rollout.top_k == -1 and cuts:
        yield (
            f"{' and '.join(cuts)}: needs {key}.top_k: the trainer needs the tokens that could be sampled, and vllm reports "
            "the top_k likeliest ones; set top_k, e.g. 100, or rollout.name=hf"
        )
    if rollout.quantization is not None and rollout.name != "vllm":
        yield f"{key}.quantization={rollout.quantization}: needs rollout.name=vllm, and it is {rollout.name}; leave it out"
    if rollout.quantization is not None and rollout.dtype == "float32":
        yield f"{key}.quantization={rollout.quantization}: quantizes weights of 16 bits; set {key}.dtype=bfloat16, or leave it out"
    if rollout.fp32_lm_head and rollout.name != "vllm":
        yield f"{key}.fp32_lm_head=true: needs rollout.name=vllm, and it is {rollout.name}; leave it out"


def _experts(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.router_replay.mode == "R3":
        yield (
            "actor_rollout_ref.actor.router_replay.mode=R3: the engines do not report which experts a token took: vLLM 0.32 "
            "returns them from its newer model runner, which needs a GPU, and their way to the trainer is not built; use R2"
        )


def _head(config: Config) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    if model.use_fused_kernels and model.lm_head_precision == "bfloat16":
        yield (
            "actor_rollout_ref.model.use_fused_kernels=true: torch's fused head would round its logits to bfloat16 too; "
            "set actor_rollout_ref.model.lm_head_precision=tf32 or float32"
        )


def _profiler(config: Config) -> Iterator[str]:
    own, profilers = config.global_profiler, profilers_of(config)
    enabled = [key for key, profiler in profilers.items() if profiler.enable]
    if own.tool is not None and not enabled:
        yield (
            f"global_profiler.tool={own.tool}: profiles no role; switch one on: {', '.join(f'{key}.enable=true' for key in profilers)}"
        )
    if own.tool is None:
        yield from (f"{key}.enable=true: needs global_profiler.tool: torch or torch_memory" for key in enabled)
    for key, profiler in profilers.items():
        if profiler.all_ranks and profiler.ranks:
            yield f"{key}.ranks={show(profiler.ranks)}: contradicts {key}.all_ranks=true; give one of them"


def profilers_of(config: Config) -> dict[str, ProfilerConfig]:
    """Return the profilers of all roles that have one, by their key."""
    return {
        "actor_rollout_ref.actor.profiler": config.actor_rollout_ref.actor.profiler,
        "actor_rollout_ref.ref.profiler": config.actor_rollout_ref.ref.profiler,
        "critic.profiler": config.critic.profiler,
    }


def _optimizer(config: Config) -> Iterator[str]:
    yield from _one_optimizer(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")
    yield from _one_optimizer(config.critic.optim, "critic.optim")
    yield from _one_optimizer(config.reward.reward_model.train.optim, "reward.reward_model.train.optim")


def _one_optimizer(optim: OptimConfig, key: str) -> Iterator[str]:
    if len(optim.betas) != 2:
        yield f"{key}.betas={show(optim.betas)}: must be two numbers >= 0 and < 1, e.g. [0.9,0.999]"
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        yield (
            f"{key}.lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio:g}: has no effect with "
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps}; give one of them (lr_warmup_steps=-1 takes the ratio)"
        )


def _selection(config: Config) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if config.algorithm.filter_groups.enable and rollout.n == 1:
        yield (
            "algorithm.filter_groups.enable=true: a group of one response never has a signal, and "
            "actor_rollout_ref.rollout.n=1; usual is 5 to 16"
        )
    if actor.adaptive_entropy.enable and actor.entropy_coeff < 0:
        yield (
            f"actor_rollout_ref.actor.entropy_coeff={actor.entropy_coeff:g}: adaptive_entropy starts from it, "
            "and its coefficient is never negative; 0 or more"
        )


def _validation(config: Config) -> Iterator[str]:
    trainer, data = config.trainer, config.data
    if not (data.val_files or data.val_prompt_files):
        if trainer.test_freq > 0:
            yield f"trainer.test_freq={trainer.test_freq}: there is nothing to validate on; give data.val_files, or test_freq=-1"
        if trainer.val_only:
            yield "trainer.val_only=true: there is nothing to validate on; give data.val_files"
        return
    values, key = config.actor_rollout_ref.rollout.val_kwargs, "actor_rollout_ref.rollout.val_kwargs"
    if values.top_k == 0:
        yield f"{key}.top_k=0: would leave no token; -1 takes all"
    if values.n > 1 and not (values.do_sample and values.temperature):
        yield f"{key}.n={values.n}: needs {key}.do_sample=true and a temperature above 0; validation is greedy, and all would be equal"


def _checkpoints(config: Config) -> Iterator[str]:
    trainer = config.trainer
    for name in ("save_freq", "test_freq"):
        if getattr(trainer, name) == 0:
            yield f"trainer.{name}=0: a number of steps >= 1, or -1 to switch it off"
    if trainer.stop_on and trainer.on_alarm == "go_back" and (trainer.save_freq < 1 or trainer.max_actor_ckpt_to_keep == 1):
        yield (
            "trainer.on_alarm=go_back: needs a checkpoint from before the illness; set trainer.save_freq, and "
            "trainer.max_actor_ckpt_to_keep to 2 or more, or leave it out"
        )
    contents, key = config.actor_rollout_ref.actor.checkpoint.save_contents, "actor_rollout_ref.actor.checkpoint.save_contents"
    missing = [name for name in _RESUMABLE if name not in contents]
    if missing and trainer.save_freq > 0:
        yield f"{key}={show(contents)}: a run cannot resume without {' and '.join(missing)}; [model,optimizer,extra] and hf_model if wanted"
    if len(set(contents)) < len(contents):
        yield f"{key}={show(contents)}: something is named twice"


def _lora(config: Config) -> Iterator[str]:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model"
    if model.lora_rank == 0:
        return
    if is_iterated(config):
        yield f"{key}.lora_rank={model.lora_rank}: trainer.schedule=iterate moves the reference, which under adapters is the base model"
    if trains_only_reward_model(config):
        yield f"{key}.lora_rank={model.lora_rank}: has no effect with trainer.schedule=reward_model, which trains no policy; leave it out"
    if not model.target_modules:
        yield f"{key}.target_modules=[]: no layer would have an adapter; all-linear, or names such as [q_proj,v_proj]"
    if "all-linear" in model.target_modules and len(model.target_modules) > 1:
        yield f"{key}.target_modules={show(model.target_modules)}: all-linear stands alone; exclude_modules takes layers out of it"
    if "quantization_config" in model.override_config:
        yield f"{key}.override_config.quantization_config: LoRA over quantized weights (QLoRA) is not here; leave it out"


def _has_effect(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys that need another setting: whether it is there, and the reason to give where it is not."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    algorithm = config.algorithm
    adaptive = algorithm.kl_ctrl.type == "adaptive"
    saves = config.trainer.save_freq > 0
    rules = [update_rule(config), logprob_rule(config, "ref"), logprob_rule(config, "rollout"), critic_rule(config)]
    by_tokens = any(rule.max_tokens == actor.ppo_max_token_len_per_gpu * rule.sequence_ranks for rule in rules)
    both_sides = actor.clip_ratio_low is not None and actor.clip_ratio_high is not None
    needs_kl_loss = "needs actor_rollout_ref.actor.use_kl_loss=true"
    groups, entropy = algorithm.filter_groups, actor.adaptive_entropy
    needs_filter = "needs algorithm.filter_groups.enable=true"
    needs_kl_in_reward = "needs algorithm.use_kl_in_reward=true"
    a, r = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        **data_rules.switches(config),
        **_engine_switches(config),
        **_lora_switches(config),
        **_layer_switches(config),
        **_run_switches(config),
        **reward_rules.episode_switches(config),
        "trainer.stop_on": (not config.trainer.val_only, "nothing is trained with trainer.val_only=true"),
        "trainer.on_alarm": (bool(config.trainer.stop_on), "needs trainer.stop_on=[...], the alarms that end the run"),
        "data.gen_batch_size": (
            collects(config) or (groups.enable and groups.refill),
            "needs algorithm.filter_groups.enable=true, with refill",
        ),
        f"{a}.data_loader_seed": (actor.shuffle, f"needs {a}.shuffle=true"),
        f"{a}.clip_ratio": (not both_sides, f"has no effect with both {a}.clip_ratio_low and clip_ratio_high"),
        f"{a}.kl_loss_coef": (actor.use_kl_loss or actor.kl_loss_coef == 0, needs_kl_loss),
        f"{a}.kl_loss_type": (has_kl_in_loss(config), needs_kl_loss + ", with a kl_loss_coef above 0"),
        f"{a}.kl_loss_options": (has_kl_in_loss(config), needs_kl_loss + ", with a kl_loss_coef above 0"),
        f"{a}.ppo_max_token_len_per_gpu": (by_tokens, "has no effect where micro-batches are cut by rollouts"),
        f"{a}.optim.min_lr_ratio": (
            actor.optim.lr_scheduler_type != "constant",
            f"needs {a}.optim.lr_scheduler_type=linear or cosine",
        ),
        "critic.optim.min_lr_ratio": (
            config.critic.optim.lr_scheduler_type != "constant",
            "needs critic.optim.lr_scheduler_type=linear or cosine",
        ),
        f"{a}.checkpoint.save_contents": (saves, "needs trainer.save_freq"),
        f"{a}.checkpoint.async_save": (saves, "needs trainer.save_freq"),
        f"{a}.adaptive_entropy.target": (entropy.enable, f"needs {a}.adaptive_entropy.enable=true"),
        f"{a}.adaptive_entropy.delta": (entropy.enable, f"needs {a}.adaptive_entropy.enable=true"),
        "algorithm.filter_groups.metric": (groups.enable, needs_filter),
        "algorithm.filter_groups.refill": (groups.enable, needs_filter),
        "algorithm.filter_groups.max_num_gen_batches": (groups.enable and groups.refill, needs_filter + ", with refill"),
        "algorithm.kl_penalty": (algorithm.use_kl_in_reward, needs_kl_in_reward),
        "algorithm.kl_penalty_options": (algorithm.use_kl_in_reward, needs_kl_in_reward),
        "algorithm.kl_ctrl.type": (algorithm.use_kl_in_reward, needs_kl_in_reward),
        "algorithm.kl_ctrl.kl_coef": (algorithm.use_kl_in_reward or algorithm.kl_ctrl.kl_coef == 0, needs_kl_in_reward),
        "algorithm.kl_ctrl.horizon": (adaptive, "needs algorithm.kl_ctrl.type=adaptive"),
        "algorithm.kl_ctrl.target_kl": (adaptive, "needs algorithm.kl_ctrl.type=adaptive"),
        f"{r}.hf.batched": (rollout.name == "hf", f"needs {r}.name=hf, and it is {rollout.name}"),
        f"{r}.engine_kwargs": (
            set(rollout.engine_kwargs) <= {rollout.name} or rollout.name in rollout.engine_kwargs,
            f"names engines other than {r}.name={rollout.name}",
        ),
    }


def _layer_switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the same for what is done to decoder layers."""
    models: dict[str, ModelConfig | CriticModelConfig] = {
        "actor_rollout_ref.model": config.actor_rollout_ref.model,
        "critic.model": config.critic.model,
    }
    return {
        f"{key}.enable_activation_offload": (
            model.enable_gradient_checkpointing,
            f"needs {key}.enable_gradient_checkpointing=true: it moves the inputs of layers that are recomputed",
        )
        for key, model in models.items()
    }


def _engine_switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the same for sampling: what only vLLM has, and what only validation reads."""
    r, rollout = "actor_rollout_ref.rollout", config.actor_rollout_ref.rollout
    of_vllm = (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_gib",
        "free_cache_engine",
        "enforce_eager",
        "enable_prefix_caching",
    )
    of_validation = [key for key in leaves() if key.startswith(f"{r}.val_kwargs.")]
    prompts = "val_prompt_files" if is_offline(config) else "val_files"
    return {
        **{f"{r}.{name}": (rollout.name != "hf", f"needs {r}.name=vllm, and it is hf") for name in of_vllm},
        **{
            key: (bool(getattr(config.data, prompts)), f"needs data.{prompts}: only validation reads it")
            for key in of_validation
        },
    }


def _lora_switches(config: Config) -> dict[str, tuple[bool, str]]:
    key = "actor_rollout_ref.model"
    has_adapters = (config.actor_rollout_ref.model.lora_rank > 0, f"needs {key}.lora_rank above 0")
    return {f"{key}.{name}": has_adapters for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")}


def _run_switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the same for rewards, the run and Ray."""
    trainer, scorer = config.trainer, config.reward.reward_model.train
    saves = trainer.save_freq > 0
    has_address = bool(config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS"))
    return _profiler_switches(config) | {
        "trainer.on_save_error": (saves, "needs trainer.save_freq"),
        "reward.custom_reward_function.name": (config.reward.custom_reward_function.path is not None, _NEEDS_REWARD_FILE),
        "reward.custom_reward_function.reward_kwargs": (
            config.reward.custom_reward_function.path is not None,
            _NEEDS_REWARD_FILE,
        ),
        "reward.reward_model.train.optim.min_lr_ratio": (
            scorer.optim.lr_scheduler_type != "constant",
            "needs reward.reward_model.train.optim.lr_scheduler_type=linear or cosine",
        ),
        "reward.reward_model.train.center_coef": (
            scorer.loss == "bradley_terry",
            "needs reward.reward_model.train.loss=bradley_terry",
        ),
        "reward.failure_value": (config.reward.on_failure == "value", "needs reward.on_failure=value"),
        "reward.overlong_buffer.penalty_factor": (
            config.reward.overlong_buffer.len is not None,
            "needs reward.overlong_buffer.len",
        ),
        "trainer.max_actor_ckpt_to_keep": (saves, "needs trainer.save_freq"),
        "trainer.on_out_of_memory": (trainer.recover != "off", "needs trainer.recover=auto: ranks are started again"),
        "trainer.max_restarts": (trainer.recover != "off", "needs trainer.recover=auto"),
        "trainer.restart_window_s": (trainer.recover != "off", "needs trainer.recover=auto"),
        "trainer.max_nonfinite_steps": (trainer.on_nonfinite == "skip", "needs trainer.on_nonfinite=skip"),
        "ray_kwargs.ray_init.num_cpus": (
            config.ray_kwargs.ray_init.address is None,
            "is for a local cluster, not for ray_init.address",
        ),
        "ray_kwargs.ray_init.object_store_memory": (
            config.ray_kwargs.ray_init.address is None,
            "is for a local cluster, not for ray_init.address",
        ),
        "ray_kwargs.ray_init.wait_for_nodes_s": (
            has_address,
            "needs ray_kwargs.ray_init.address; a local cluster has one node",
        ),
        "ray_kwargs.ray_init.allow_insecure": (
            has_address,
            "needs ray_kwargs.ray_init.address; a local cluster always asks for a token",
        ),
    }


def _profiler_switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the same for traces and memory snapshots."""
    tool = config.global_profiler.tool
    of_roles = {
        f"{key}.{name}": (profiler.enable, f"needs {key}.enable=true")
        for key, profiler in profilers_of(config).items()
        for name in ("all_ranks", "ranks")
    }
    return of_roles | {
        "global_profiler.steps": (tool is not None, "needs global_profiler.tool"),
        "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries": (
            tool == "torch_memory",
            "needs global_profiler.tool=torch_memory",
        ),
    }


_NEEDS_REWARD_FILE = "needs reward.custom_reward_function.path"


def _without_effect(config: Config) -> Iterator[str]:
    for key, (has_effect, reason) in {**_has_effect(config), **schedule_rules.switches(config)}.items():
        value = value_of(config, key)
        if not has_effect and value != (default := leaves()[key].default):
            yield f"{key}={show(value)}: {reason}; leave it out, or set it to {show(default)} where the recipe has it"


def value_of(config: object, key: str) -> object:
    """Return the value of a dotted key, in the configuration or in a section of it."""
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
