"""Settings that a run cannot use and that are no mistake: they bear on speed and memory only, and are set by habit.

verl's commands give sizes for the reference and for old log-probs whether these passes exist or not. So such a setting
is not refused; the plan has one line for each. What bears on the mathematics is refused (`switch_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config.checks.algorithm_rules import without_dual_clip
from grpo_rl.config.checks.switch_rules import value_of
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine, has_kl_in_loss, is_colocated
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config

_A, _R, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def notes(
    config: Config, machine: Machine, *, reference: bool, old_logprobs: bool, base_reference: bool = False
) -> Iterator[str]:
    """Yield a line for each setting without an effect.

    `reference`: a reference has processes of its own; `base_reference`: the actor's ranks compute it, by the base model under
    the adapters; `old_logprobs`: the actor makes a pass for old log-probs.
    """
    idle: dict[str, str] = {}
    if base_reference:
        why = "the reference is the base model in the actor's ranks"
        own = (f"{_REF}.fsdp_config.", f"{_REF}.ulysses_sequence_parallel_size")
        idle |= {key: why for key in leaves() if key.startswith(own)}
    elif not reference:
        idle |= {key: "no reference runs" for key in leaves() if key.startswith(f"{_REF}.")}
    if not old_logprobs:
        why = "no pass computes old log-probs: a step has one update, for which they are the engine's"
        idle |= {key: why for key in leaves() if key.startswith(f"{_R}.log_prob_")}
    if machine.device == "cpu":
        idle |= {
            f"{_R}.{name}": "is for GPUs" for name in ("gpu_memory_utilization", "free_cache_engine", "kv_cache_memory_bytes")
        }
    else:
        idle |= {f"{_R}.{name}": "is for CPUs" for name in ("kv_cache_gib", "cpu_threads")}
    if not is_colocated(config):
        idle[f"{_R}.free_cache_engine"] = "engines have devices of their own, and keep their memory"
    if not (config.data.val_files or config.data.val_prompt_files):
        idle["trainer.val_before_train"] = "there is nothing to validate on"
    if not has_kl_in_loss(config):
        idle[f"{_A}.kl_loss_type"] = "the KL has no weight in the loss"
    if not {"wandb", "mlflow"} & set(config.trainer.logger):
        idle["trainer.log_val_generations"] = "neither wandb nor mlflow is among trainer.logger"
    if config.ray_kwargs.ray_init.address is not None:
        idle["ray_kwargs.ray_init.num_cpus"] = "it is for a local cluster"
        idle["ray_kwargs.ray_init.object_store_memory"] = "it is for a local cluster"
    idle |= _by_tokens(config) | _greedy(config)
    if without_dual_clip(config.actor_rollout_ref.actor.policy_loss.loss_mode):
        idle[f"{_A}.clip_ratio_c"] = f"the loss {config.actor_rollout_ref.actor.policy_loss.loss_mode} clips no second time"
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0:
        idle["algorithm.use_kl_in_reward"] = "algorithm.kl_ctrl.kl_coef=0, so the penalty is 0"
    if config.global_profiler.tool == "torch" and config.global_profiler.steps is None:
        idle["global_profiler.tool"] = "no step is named in global_profiler.steps"
    if config.reward.overlong_buffer.len is None:
        idle["reward.overlong_buffer.enable"] = "there is no reward.overlong_buffer.len"
    elif not config.reward.overlong_buffer.enable:
        idle |= {f"reward.overlong_buffer.{name}": "reward.overlong_buffer.enable=false" for name in ("len", "penalty_factor")}
    rollout = config.actor_rollout_ref.rollout
    if others := sorted(set(rollout.engine_kwargs) - {rollout.name}):
        yield f"{_R}.engine_kwargs.{','.join(others)}: has no effect in this run: the engine is {rollout.name}"
    for key, why in idle.items():
        value = value_of(config, key)
        if value != leaves()[key].default:
            yield f"{key}={show(value)}: has no effect in this run: {why}"


def _by_tokens(config: Config) -> dict[str, str]:
    """Return the sizes in rollouts of passes that are cut by tokens."""
    parts = config.actor_rollout_ref
    dynamic = {
        f"{_A}.ppo_micro_batch_size_per_gpu": parts.actor.use_dynamic_bsz,
        f"{_R}.log_prob_micro_batch_size_per_gpu": parts.rollout.log_prob_use_dynamic_bsz,
        f"{_REF}.log_prob_micro_batch_size_per_gpu": parts.ref.log_prob_use_dynamic_bsz,
        "critic.ppo_micro_batch_size_per_gpu": config.critic.use_dynamic_bsz,
    }
    return {key: "its passes are cut by tokens (use_dynamic_bsz=true)" for key, is_dynamic in dynamic.items() if is_dynamic}


def _greedy(config: Config) -> dict[str, str]:
    """Return the settings of sampled validation where it is greedy."""
    values, key = config.actor_rollout_ref.rollout.val_kwargs, f"{_R}.val_kwargs"
    if not values.do_sample:
        return {
            f"{key}.{name}": f"validation is greedy without {key}.do_sample=true" for name in ("temperature", "top_p", "top_k")
        }
    return (
        {}
        if values.temperature
        else {f"{key}.{name}": "validation is greedy at temperature 0" for name in ("do_sample", "top_p", "top_k")}
    )
