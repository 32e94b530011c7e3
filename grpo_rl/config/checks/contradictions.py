"""Settings that contradict each other, or that the schedule cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config.convert import show
from grpo_rl.config.derived import (
    ASYNC,
    ITERATE,
    OFFLINE,
    REWARD_MODEL,
    collects,
    is_colocated,
    is_iterated,
    is_offline,
    max_staleness,
    overlaps,
    trains_only_reward_model,
    trains_pairs,
)
from grpo_rl.config.effects import SAMPLING, profilers_of
from grpo_rl.config.schema.fields import leaves, value_of
from grpo_rl.config.schema.tree import Config

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_OPTIMIZERS = (f"{_A}.optim", "critic.optim", "reward.reward_model.train.optim")
_RESUMABLE = ("model", "optimizer", "extra")
SUPERVISED_LOSS = "sft"


def problems(config: Config) -> Iterator[str]:
    """Yield contradictions between settings, and what does not go with the schedule."""
    yield from _training(config)
    yield from _sampling(config)
    yield from _run(config)
    yield from _lora(config)
    yield from _schedule(config)


def _training(config: Config) -> Iterator[str]:
    """Yield contradictions between the loss, the optimizer and the model."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "algorithm.use_kl_in_reward=true: the KL is in the loss already (actor_rollout_ref.actor.use_kl_loss=true, "
            "the default); set actor_rollout_ref.actor.use_kl_loss=false, or algorithm.use_kl_in_reward=false"
        )
    for key in _OPTIMIZERS:
        if len(betas := value_of(config, f"{key}.betas")) != 2:
            yield f"{key}.betas={show(betas)}: must be two numbers >= 0 and < 1, e.g. [0.9,0.999]"
    if actor.router_replay.mode == "R3":
        yield (
            "actor_rollout_ref.actor.router_replay.mode=R3: the engines do not report which experts a token took: vLLM 0.32 "
            "returns them from its newer model runner, which needs a GPU, and their way to the trainer is not built; use R2"
        )
    if algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield (
            "algorithm.filter_groups.enable=true: a group of one response never has a signal, and "
            "actor_rollout_ref.rollout.n=1; usual is 5 to 16"
        )
    if actor.adaptive_entropy.enable and actor.entropy_coeff < 0:
        yield (
            f"actor_rollout_ref.actor.entropy_coeff={actor.entropy_coeff:g}: adaptive_entropy starts from it, "
            "and its coefficient is never negative; 0 or more"
        )


def _sampling(config: Config) -> Iterator[str]:
    """Yield contradictions in sampling, and in validation by it."""
    rollout, key = config.actor_rollout_ref.rollout, _R
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
    trainer, data = config.trainer, config.data
    if not (data.val_files or data.val_prompt_files):
        if trainer.test_freq > 0:
            yield f"trainer.test_freq={trainer.test_freq}: there is nothing to validate on; give data.val_files, or test_freq=-1"
        if trainer.val_only:
            yield "trainer.val_only=true: there is nothing to validate on; give data.val_files"
        return
    values, key = rollout.val_kwargs, f"{_R}.val_kwargs"
    if values.top_k == 0:
        yield f"{key}.top_k=0: would leave no token; -1 takes all"
    if values.n > 1 and not (values.do_sample and values.temperature):
        yield f"{key}.n={values.n}: needs {key}.do_sample=true and a temperature above 0; validation is greedy, and all would be equal"


def _run(config: Config) -> Iterator[str]:
    """Yield contradictions between checkpoints, alarms and profiles."""
    trainer = config.trainer
    for name in ("save_freq", "test_freq"):
        if getattr(trainer, name) == 0:
            yield f"trainer.{name}=0: a number of steps >= 1, or -1 to switch it off"
    contents, key = config.actor_rollout_ref.actor.checkpoint.save_contents, "actor_rollout_ref.actor.checkpoint.save_contents"
    missing = [name for name in _RESUMABLE if name not in contents]
    if missing and trainer.save_freq > 0:
        yield f"{key}={show(contents)}: a run cannot resume without {' and '.join(missing)}; [model,optimizer,extra] and hf_model if wanted"
    if len(set(contents)) < len(contents):
        yield f"{key}={show(contents)}: something is named twice"
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


def _lora(config: Config) -> Iterator[str]:
    model, key = config.actor_rollout_ref.model, _M
    if model.lora_rank == 0:
        return
    if is_iterated(config):
        yield f"{key}.lora_rank={model.lora_rank}: trainer.schedule=iterate moves the reference, which under adapters is the base model"
    if not model.target_modules:
        yield f"{key}.target_modules=[]: no layer would have an adapter; all-linear, or names such as [q_proj,v_proj]"
    if "all-linear" in model.target_modules and len(model.target_modules) > 1:
        yield f"{key}.target_modules={show(model.target_modules)}: all-linear stands alone; exclude_modules takes layers out of it"
    if "quantization_config" in model.override_config:
        yield f"{key}.override_config.quantization_config: LoRA over quantized weights (QLoRA) is not here; leave it out"


def _schedule(config: Config) -> Iterator[str]:
    """Yield what does not go with the schedule."""
    loss, trainer = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.trainer
    key = f"{_A}.policy_loss.loss_mode"
    if trains_only_reward_model(config):
        yield from _reward_model(config)
        return
    if not is_offline(config):
        if trainer.schedule == OFFLINE:
            yield f"trainer.schedule={OFFLINE}: is chosen by data.responses=rows, which trains on the answers in data.train_files"
        if loss == SUPERVISED_LOSS and trainer.schedule in SAMPLING:
            yield (
                f"{key}={loss}: reads no advantages, so the reward would have no effect with trainer.schedule={trainer.schedule}; "
                f"data.responses=rows learns the answers in the data, {key}=reinforce weighs sampled ones"
            )
        if is_iterated(config):
            yield from _iterated(config)
        if overlaps(config):
            yield from _overlapping(config)
        return
    chosen = f"data.responses={config.data.responses}"
    if trainer.schedule != leaves()["trainer.schedule"].default:
        yield (
            f"trainer.schedule={show(trainer.schedule)}: says when responses are sampled, and with {chosen} they are fixed before "
            "training; leave it out"
        )
    if trains_pairs(config) and config.data.truncation != "error":
        yield (
            f"data.truncation={config.data.truncation}: {key}={loss} compares whole answers, and a cut one would be another; drop "
            "long rows with data.filter_overlong_prompts=true"
        )
    if collects(config) and trains_pairs(config) and config.actor_rollout_ref.rollout.n < 2:
        yield f"{_R}.n={config.actor_rollout_ref.rollout.n}: {chosen} compares the best and the worst of a group; 2 or more"
    mini, batch = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.data.train_batch_size
    if mini not in (batch, leaves()[f"{_A}.ppo_mini_batch_size"].default):
        yield (
            f"{_A}.ppo_mini_batch_size={mini}: {chosen} takes one optimizer step on each batch, "
            f"data.train_batch_size={batch}; leave it out"
        )
    if trainer.val_only:
        yield (
            f"trainer.val_only=true: {chosen} only trains; with data.responses=policy the answers to data.val_files are sampled "
            "and scored"
        )
    if collects(config) and config.data.train_weights:
        yield f"data.train_weights={show(config.data.train_weights)}: {chosen} answers every prompt alike; leave it out"
    yield from _early_stop(config)


def _overlapping(config: Config) -> Iterator[str]:
    """Yield what a schedule cannot do that samples while it trains."""
    key, own, correction = f"trainer.schedule={config.trainer.schedule}", config.trainer.asynchronous, config.algorithm
    if is_colocated(config) and not config.trainer.val_only:
        yield (
            f"{key}: samples while it trains, and with {_R}.nnodes=0 the engines share the actor's devices; give them their own: "
            f"{_R}.nnodes=1 {_R}.n_gpus_per_node=..., beside trainer.n_gpus_per_node"
        )
    groups = correction.filter_groups
    if groups.enable and groups.refill:
        yield (
            "algorithm.filter_groups.refill=true: samples further prompts until enough groups have a signal, and "
            f"{key} has sampled the next ones already; refill=false trains those of a batch that have one"
        )
    is_corrected = correction.rollout_correction.rollout_is or correction.rollout_correction.rollout_rs
    if max_staleness(config) and correction.rollout_correction.bypass_mode is False and not is_corrected:
        yield (
            f"algorithm.rollout_correction.bypass_mode=false: with {key} the weights that sampled a token may be older than "
            "those that it trains, and nothing would correct for that; leave it out, or set rollout_is=token beside it"
        )
    if config.trainer.schedule == ASYNC and own.sync_every > own.max_staleness + 1:
        yield (
            f"trainer.asynchronous.sync_every={own.sync_every}: the weights would be older than max_staleness={own.max_staleness} before they "
            "are sent; at most max_staleness + 1"
        )


def _reward_model(config: Config) -> Iterator[str]:
    """Yield what contradicts the schedule that trains a reward model alone."""
    if config.data.responses != "policy":
        yield (
            f"data.responses={config.data.responses}: says what a policy learns from, and trainer.schedule={REWARD_MODEL} trains none; "
            "leave it out"
        )
    if config.trainer.val_only:
        yield f"trainer.val_only=true: trainer.schedule={REWARD_MODEL} validates while it trains; leave it out"
    yield from _early_stop(config)


def _early_stop(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.early_stop_patience is not None and not (config.data.val_files and trainer.test_freq > 0):
        yield (
            f"trainer.early_stop_patience={trainer.early_stop_patience}: needs the loss on data.val_files every trainer.test_freq "
            "steps; give both"
        )


def _iterated(config: Config) -> Iterator[str]:
    """Yield what iterated training cannot do: its reward is the model's score, and the labels are those of the rules."""
    key, iterate, reward = f"trainer.schedule={ITERATE}", config.trainer.iterate, config.reward
    trains_model = iterate.reward_model_steps > 0
    if not reward.reward_model.enable:
        yield f"{key}: trains on the score of a reward model; give reward.reward_model.enable=true and its model_path"
    if not reward.functions:
        yield f"{key}: needs reward.functions, whose reward labels the reward model's pairs and shows the true accuracy"
    if reward.judge.base_url is not None:
        yield f"reward.judge.base_url: with {key} the reward is the reward model's score alone; leave the judge out"
    if config.trainer.critic_warmup:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: counts first steps, which with {key} may be the reward model's"
    if trains_model and config.actor_rollout_ref.rollout.n < 2:
        yield f"{_R}.n={config.actor_rollout_ref.rollout.n}: {key} compares the best and the worst of a group; 2 or more"
    if trains_model and reward.reward_model.step_separator is not None:
        yield (
            f"reward.reward_model.step_separator={show(reward.reward_model.step_separator)}: {key} trains the reward model on pairs "
            "of whole responses; leave it out, or set trainer.iterate.reward_model_steps=0"
        )
    if trains_model and reward.reward_model.train.loss != "bradley_terry":
        yield (
            f"reward.reward_model.train.loss={reward.reward_model.train.loss}: {key} makes pairs of whole responses and no rated "
            "steps; bradley_terry"
        )
    if trains_model and config.trainer.val_only and (reward.reward_model.model_path or "").startswith("builtin:"):
        yield (
            f"trainer.val_only=true: reward.reward_model.model_path={reward.reward_model.model_path} has no head before {key} trains it; "
            "name a trained one, or validate by the rules alone, without this schedule and reward.reward_model"
        )
