"""Settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config.checks import reward_rules, schedule_rules
from grpo_rl.config.convert import show
from grpo_rl.config.derived import is_iterated, trains_only_reward_model
from grpo_rl.config.effects import profilers_of
from grpo_rl.config.schema.tree import Config, OptimConfig

_RESUMABLE = ("model", "optimizer", "extra")


def problems(config: Config) -> Iterator[str]:
    """Yield contradictions between settings."""
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


def _optimizer(config: Config) -> Iterator[str]:
    yield from _one_optimizer(config.actor_rollout_ref.actor.optim, "actor_rollout_ref.actor.optim")
    yield from _one_optimizer(config.critic.optim, "critic.optim")
    yield from _one_optimizer(config.reward.reward_model.train.optim, "reward.reward_model.train.optim")


def _one_optimizer(optim: OptimConfig, key: str) -> Iterator[str]:
    if len(optim.betas) != 2:
        yield f"{key}.betas={show(optim.betas)}: must be two numbers >= 0 and < 1, e.g. [0.9,0.999]"


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
