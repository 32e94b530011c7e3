"""The effect of a configuration on a run in a form that can be compared: a change of one key has to change something.

`footprint` holds the plan's decisions (roles, places, passes, sizes, the engine, the objective), each part only where
something reads it, and the values of those keys that are handed on as they are. A key that is in neither is found by the
scan as soon as it is accepted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from config_tools import CPU, EIGHT_GPUS, RUNNABLE, A, R, nested, value_at

from grpo_rl.config.checks import idle_keys
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.convert import convert, convert_or_explain
from grpo_rl.config.derived import Machine, plays_episodes
from grpo_rl.config.schema.fields import Leaf, leaves
from grpo_rl.config.schema.tree import Config
from grpo_rl.envs.setup import max_turns
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import Plan, decide

LEARNT: dict[str, Any] = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "sft"}
ASKED: dict[str, Any] = {"data.val_prompt_files": ["task:arithmetic?num_rows=16&split=val"]}
SCORER: dict[str, Any] = {
    **{key: leaves()[key].default for key in RUNNABLE if not key.startswith(("data.", "trainer."))},
    "trainer.schedule": "reward_model",
    "reward.reward_model.model_path": "builtin:arithmetic",
}
ITERATED: dict[str, Any] = {
    "trainer.schedule": "iterate",
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "builtin:arithmetic",
}
EPISODES: dict[str, Any] = {f"{R}.multi_turn.enable": True, f"{R}.multi_turn.environment.name": "game"}
APART: dict[str, Any] = {f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 1}
ASYNC: dict[str, Any] = {"trainer.schedule": "async"} | APART
CONTEXTS: dict[str, tuple[dict[str, Any], Machine]] = {
    "default": ({}, CPU),
    "hf": ({f"{R}.name": "hf"}, CPU),
    "no reference": ({f"{A}.use_kl_loss": False}, CPU),
    "KL without weight": ({f"{A}.kl_loss_coef": 0.0}, CPU),
    "KL in the reward": ({f"{A}.use_kl_loss": False, "algorithm.use_kl_in_reward": True}, CPU),
    "adaptive KL": (
        {f"{A}.use_kl_loss": False, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
        CPU,
    ),
    "adapters": ({"actor_rollout_ref.model.lora_rank": 8}, CPU),
    "adapters without a reference": ({"actor_rollout_ref.model.lora_rank": 8, f"{A}.use_kl_loss": False}, CPU),
    "two updates": ({f"{A}.ppo_mini_batch_size": 16}, CPU),
    "shuffled passes": ({f"{A}.ppo_epochs": 2, f"{A}.shuffle": True}, CPU),
    "by rollouts": ({f"{A}.ppo_micro_batch_size_per_gpu": 4}, CPU),
    "critic": ({"algorithm.adv_estimator": "gae"}, CPU),
    "critic apart": ({"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 4}, CPU),
    "validation": ({"data.val_files": ["task:arithmetic?num_rows=16&split=val"], "trainer.test_freq": 5}, CPU),
    "sampled validation": (
        {
            "data.val_files": ["task:arithmetic?num_rows=16&split=val"],
            f"{R}.val_kwargs.do_sample": True,
            f"{R}.val_kwargs.temperature": 1.0,
        },
        CPU,
    ),
    "saving": ({"trainer.save_freq": 5, "trainer.experiment_name": "x"}, CPU),
    "no recovery": ({"trainer.recover": "off"}, CPU),
    "stops": ({"trainer.on_nonfinite": "stop", "reward.on_failure": "value", "reward.failure_value": 0.0}, CPU),
    "groups": ({"algorithm.filter_groups.enable": True}, CPU),
    "groups kept": ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.refill": False}, CPU),
    "entropy": ({f"{A}.adaptive_entropy.enable": True}, CPU),
    "cosine": ({f"{A}.optim.lr_scheduler_type": "cosine"}, CPU),
    "correction": ({"algorithm.rollout_correction.rollout_is": "token"}, CPU),
    "episodes": (EPISODES, CPU),
    "episodes with tools": (EPISODES | {f"{R}.multi_turn.tools": {"calculator": {}}}, CPU),
    "judge": ({"reward.judge.base_url": "http://localhost:1/v1", "reward.judge.model": "m"}, CPU),
    "by pass rate": ({"data.curriculum": "pass_rate"}, CPU),
    "retiring": ({"data.retire_above": 0.9}, CPU),
    "in order": ({"data.shuffle": False}, CPU),
    "two ranks": ({"trainer.n_gpus_per_node": 2}, CPU),
    "GPUs": ({"trainer.device": "cuda"}, EIGHT_GPUS),
    "GPUs apart": ({"trainer.device": "cuda", "trainer.n_gpus_per_node": 4, f"{R}.nnodes": 1}, EIGHT_GPUS),
    "GPUs, hf": ({"trainer.device": "cuda", f"{R}.name": "hf"}, EIGHT_GPUS),
    "answers in rows": (LEARNT, CPU),
    "answers in rows, validated": (LEARNT | ASKED | {"trainer.test_freq": 5}, CPU),
    "pairs in rows": (LEARNT | {f"{A}.policy_loss.loss_mode": "dpo"}, CPU),
    "answers of the initial policy": (LEARNT | {"data.responses": "initial_policy"}, CPU),
    "pairs of the initial policy": (LEARNT | {"data.responses": "initial_policy", f"{A}.policy_loss.loss_mode": "dpo"}, CPU),
    "sampled pairs": ({f"{A}.policy_loss.loss_mode": "dpo"}, CPU),
    "reward model": (SCORER, CPU),
    "iterated": (ITERATED, CPU),
    "one step off": ({"trainer.schedule": "one_step_off"} | APART, CPU),
    "asynchronous": (ASYNC, CPU),
    "asynchronous, no partial rollouts": (ASYNC | {"trainer.asynchronous.partial_rollout": False}, CPU),
    "asynchronous, without staleness": (ASYNC | {"trainer.asynchronous.max_staleness": 0}, CPU),
    "asynchronous, decoupled": (ASYNC | {"algorithm.rollout_correction.rollout_is": "token"}, CPU),
}
"""Configurations that one key is changed in: what is added to the smallest runnable one, and the machine."""

Reader = Callable[[Config, Plan], bool]


def _role(name: str) -> Reader:
    return lambda config, plan: plan.role(name) is not None  # type: ignore[arg-type]


def _if(condition: Callable[[Config], Any]) -> Reader:
    return lambda config, plan: bool(condition(config))


def _punishes(config: Config) -> bool:
    rules = config.actor_rollout_ref.rollout.multi_turn.truncation
    return plays_episodes(config) and "punish" in (rules.turns, rules.tokens, rules.time)


READ: dict[str, Reader] = {
    f"{A}.optim": _role("actor"),
    f"{A}.optim.min_lr_ratio": _if(lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type != "constant"),
    f"{A}.optim.lr_warmup_steps_ratio": _if(lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps < 0),
    f"{A}.fsdp_config": _role("actor"),
    f"{A}.checkpoint": _if(lambda c: c.trainer.save_freq > 0),
    f"{A}.data_loader_seed": _if(lambda c: c.actor_rollout_ref.actor.shuffle),
    f"{A}.shuffle": _if(lambda c: True),
    f"{A}.adaptive_entropy.enable": _if(lambda c: True),
    f"{A}.adaptive_entropy": _if(lambda c: c.actor_rollout_ref.actor.adaptive_entropy.enable),
    "actor_rollout_ref.model": _role("actor"),
    "actor_rollout_ref.ref.fsdp_config": _role("reference"),
    "critic": _role("critic"),
    f"{R}.multi_turn": _if(plays_episodes),
    f"{R}.multi_turn.truncation.penalty": _if(_punishes),
    f"{R}.multi_turn.truncation.turns": _if(
        lambda c: plays_episodes(c) and max_turns(c.actor_rollout_ref.rollout.multi_turn) is not None
    ),
    "critic.optim.min_lr_ratio": _if(lambda c: c.critic.optim.lr_scheduler_type != "constant"),
    "critic.optim.lr_warmup_steps_ratio": _if(lambda c: c.critic.optim.lr_warmup_steps < 0),
    "critic.ppo_mini_batch_size": _if(lambda c: False),
    "critic.ppo_epochs": _if(lambda c: False),
    "critic.ppo_micro_batch_size_per_gpu": _if(lambda c: False),
    "critic.ppo_max_token_len_per_gpu": _if(lambda c: False),
    "critic.use_dynamic_bsz": _if(lambda c: False),
    f"{R}.val_kwargs": _if(lambda c: c.data.val_files),
    "algorithm.kl_ctrl": _if(lambda c: c.algorithm.use_kl_in_reward),
    "algorithm.kl_ctrl.horizon": _if(lambda c: c.algorithm.kl_ctrl.type == "adaptive"),
    "algorithm.kl_ctrl.target_kl": _if(lambda c: c.algorithm.kl_ctrl.type == "adaptive"),
    "algorithm.kl_penalty": _if(lambda c: c.algorithm.use_kl_in_reward),
    "algorithm.filter_groups.enable": _if(lambda c: True),
    "algorithm.filter_groups": _if(lambda c: c.algorithm.filter_groups.enable),
    "algorithm.filter_groups.max_num_gen_batches": _if(
        lambda c: c.algorithm.filter_groups.enable and c.algorithm.filter_groups.refill
    ),
    "data.gen_batch_size": _if(
        lambda c: c.data.responses == "initial_policy" or (c.algorithm.filter_groups.enable and c.algorithm.filter_groups.refill)
    ),
    "data.seed": _if(lambda c: c.data.shuffle),
    "data.difficulty_key": _if(lambda c: c.data.curriculum == "difficulty"),
    "data.curriculum_floor": _if(lambda c: c.data.curriculum == "pass_rate" or c.data.dynamic_weights),
    "data.retire_metric": _if(lambda c: c.data.retire_above or c.data.curriculum == "pass_rate" or c.data.dynamic_weights),
    "data.retire_score": _if(lambda c: c.data.retire_above or c.data.curriculum == "pass_rate" or c.data.dynamic_weights),
    "data.val_max_samples": _if(lambda c: c.data.val_files),
    "trainer.val_before_train": _if(lambda c: c.data.val_files or c.data.val_prompt_files),
    "trainer.test_freq": _if(lambda c: c.data.val_files or c.data.val_prompt_files),
    "reward.failure_value": _if(lambda c: c.reward.on_failure == "value"),
    "reward.overlong_buffer": _if(lambda c: c.reward.overlong_buffer.len is not None),
    "reward.custom_reward_function": _if(lambda c: c.reward.custom_reward_function.path),
    "reward.reward_model.enable": _if(lambda c: True),
    "reward.reward_model": _if(lambda c: c.reward.reward_model.enable or c.trainer.schedule == "reward_model"),
    "reward.reward_model.train": _if(lambda c: c.trainer.schedule in ("reward_model", "iterate")),
    "trainer.iterate": _if(lambda c: c.trainer.schedule == "iterate"),
    "trainer.asynchronous": _if(lambda c: c.trainer.schedule == "async"),
    "trainer.early_stop_patience": _if(lambda c: c.data.val_files),
    "algorithm.rejection": _if(lambda c: c.data.responses == "initial_policy"),
    "data.responses": _if(lambda c: True),
    "data.response_key": _if(lambda c: c.data.responses == "rows"),
    "data.messages_key": _if(lambda c: c.data.responses == "rows"),
    "data.tools_key": _if(lambda c: c.data.responses == "rows"),
    "data.enable_thinking_key": _if(lambda c: c.data.responses == "rows"),
    "data.chosen_key": _if(lambda c: c.data.responses == "rows" or c.trainer.schedule == "reward_model"),
    "data.rejected_key": _if(lambda c: c.data.responses == "rows" or c.trainer.schedule == "reward_model"),
    "data.max_length": _if(lambda c: True),
    "data.val_prompt_files": _if(lambda c: True),
    "reward.judge.base_url": _if(lambda c: True),
    "reward.judge": _if(lambda c: c.reward.judge.base_url),
    "trainer.on_save_error": _if(lambda c: c.trainer.save_freq > 0),
    "trainer.max_actor_ckpt_to_keep": _if(lambda c: c.trainer.save_freq > 0),
    "trainer.max_restarts": _if(lambda c: c.trainer.recover != "off"),
    "trainer.restart_window_s": _if(lambda c: c.trainer.recover != "off"),
    "trainer.max_nonfinite_steps": _if(lambda c: c.trainer.on_nonfinite == "skip"),
    "trainer.on_alarm": _if(lambda c: c.trainer.stop_on),
    "trainer.critic_warmup": _role("critic"),
    "trainer.device_tflops": _role("actor"),
    "trainer.deterministic": _if(lambda c: True),
    "global_profiler.tool": _if(lambda c: True),
    "global_profiler": _if(lambda c: c.global_profiler.tool is not None),
    f"{A}.profiler": _role("actor"),
    "actor_rollout_ref.ref.profiler": _role("reference"),
    "critic.profiler": _role("critic"),
    "ray_kwargs.ray_init.num_cpus": _if(lambda c: not c.ray_kwargs.ray_init.address),
    "ray_kwargs.ray_init.object_store_memory": _if(lambda c: not c.ray_kwargs.ray_init.address),
    "ray_kwargs.ray_init": _if(lambda c: c.ray_kwargs.ray_init.address),
    "ray_kwargs.ray_init.address": _if(lambda c: True),
    "data.reward_fn_key": _if(lambda c: c.data.data_source is None),
    # Handed on as they are, in every run.
    **{
        f"data.{name}": _if(lambda c: True)
        for name in (
            "prompt_key", "data_source", "ground_truth_key", "extra_info_key", "system_prompt", "chat_template", "on_bad_row",
            "check_rows", "cache_dir", "retire_above", "truncation", "filter_overlong_prompts", "shuffle", "curriculum",
            "train_max_samples", "control_tokens_in_text", "apply_chat_template_kwargs", "max_prompt_length", "max_response_length", "train_files",
            "val_files", "train_weights", "dynamic_weights", "allow_change", "custom_cls",
        )
    },
    **{
        f"reward.{name}": _if(lambda c: True)
        for name in ("functions", "function_kwargs", "batched", "num_workers", "timeout_s", "memory_limit_gb", "on_failure")
    },
    **{
        f"trainer.{name}": _if(lambda c: True)
        for name in (
            "project_name", "experiment_name", "default_local_dir", "logger", "total_epochs", "total_training_steps", "seed",
            "val_only", "save_freq", "resume_mode", "resume_from_path", "export_at_end", "save_rollouts", "rollout_data_format", "dry_run",
            "machine", "machine_host_gib", "mean_response_length", "response_length_spread",
            "log_token_groups", "page_freq",
            "start_timeout_s", "step_timeout_s", "recover", "heartbeat_s", "collective_timeout_s", "grace_s", "on_nonfinite",
            "on_out_of_memory", "stop_on",
        )
    },
    "trainer.log_val_generations": _if(lambda c: bool({"wandb", "mlflow"} & set(c.trainer.logger))),
    **{f"{R}.{name}": _if(lambda c: True) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "n")},
    f"{A}.loss_agg_mode": _if(lambda c: True),
    "algorithm": _if(lambda c: True),
}  # fmt: skip
"""Keys (or groups, by the longest match) whose value is handed on as it is, and when something reads it."""

OF_SAMPLING = (
    f"{R}.", "algorithm.", "reward.functions", "reward.function_kwargs", "reward.batched", "reward.num_workers",
    "reward.timeout_s", "reward.memory_limit_gb", "reward.on_failure", "data.reward_fn_key", "data.data_source",
    "data.ground_truth_key", "data.extra_info_key",
)  # fmt: skip
"""Keys, and beginnings of keys, that nothing reads where nothing is sampled."""

ENGINE_READS = {
    ("hf", "cpu"): {"threads"},
    ("hf", "cuda"): set[str](),
    ("vllm", "cpu"): {"threads", "kv_cache_gib", "enforce_eager", "enable_prefix_caching", "fp32_lm_head"},
    ("vllm", "cuda"): {
        "deterministic",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "sleep_mode",
        "enforce_eager",
        "enable_prefix_caching",
        "fp32_lm_head",
    },
}
"""Fields of the engine's spec that not every engine reads on every device."""

WITHOUT_EFFECT: dict[str, str] = {
    f"{A}.strategy": "both of its values mean FSDP2; the key is there so that verl's commands run",
    "critic.enable": "says what the estimator says already; any other answer is refused",
    f"{A}.use_kl_loss": "with kl_loss_coef=0 the KL is off already",
}
"""Keys that may be changed without an effect, with the reason."""

SPELLED_OUT: dict[str, str] = {
    "algorithm.rollout_correction.bypass_mode": "null is false, and true where stale weights are corrected by nothing else",
    "trainer.device": "auto is the device that the machine has",
    "trainer.n_gpus_per_node": "null is all GPUs, or one process",
    f"{A}.use_dynamic_bsz": "null is true, unless ppo_micro_batch_size_per_gpu is given",
    f"{A}.use_prefix_grouper": "null is true, unless the model drops at random in training",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "null is as the actor",
    f"{R}.log_prob_use_dynamic_bsz": "null is as the actor",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "null is as the actor",
    "critic.use_dynamic_bsz": "null is as the actor",
    "critic.ppo_epochs": "null is as the actor",
    "critic.ppo_mini_batch_size": "null is as the actor",
    f"{R}.num_replicas": "null is as many as the devices hold",
    f"{R}.dtype": "auto is float32 on CPUs, bfloat16 on GPUs",
    f"{R}.enforce_eager": "null is true on CPUs, false on GPUs",
    f"{R}.cpu_threads": "0 is as many as the cores of each replica",
    f"{R}.checkpoint_engine.backend": "auto is the one way that fits the places",
}
"""Keys that may be changed from null, auto or 0 to the value which that stands for."""


def footprint(config: Config, machine: Machine) -> dict[str, Any]:
    """Return everything that is handed to the parts of a run, each only where it is read."""
    plan = decide(config, machine)
    old, reference, critic = plan.recomputes_old_logprobs, plan.role("reference"), plan.role("critic")
    shared = set().union(*ENGINE_READS.values())
    device = machine.device
    sampling = (plan.collection or plan).engine
    engine = {
        name: value
        for name, value in ({} if sampling is None else dataclasses.asdict(sampling)).items()
        if name not in shared - ENGINE_READS.get((sampling.name, device), shared)
    }
    passes = {
        "update": plan.passes.update,
        "old": plan.passes.old if old else None,
        "reference": plan.passes.reference if reference or plan.base_reference else None,
        "critic": plan.passes.critic if critic else None,
        # Where no pass can be replayed, the plan's maker refuses replay.
        "which": (plan.passes.old_logprobs, plan.passes.old_readers, plan.passes.splits, plan.passes.replays_routing),
    }
    sizes = {
        name: value
        for name, value in dataclasses.asdict(plan.sizes).items()
        if critic is not None or not name.startswith("critic")
    }
    values = {key: value_at(config, key) for key in leaves() if _is_read(key, config, plan)}
    return {
        "roles": [
            (role.name, role.pool, role.num_workers, role.devices_per_worker)
            for role in (*plan.roles, *(plan.collection.roles if plan.collection else ()))
        ],
        "pools": (plan.collection or plan).pools,
        "passes": passes,
        "sizes": sizes,
        "engine": engine,
        "objective": re.sub(r"0x[0-9a-f]+", "", repr(plan.objective)),
        "reward": plan.reward,
        "values": values,
    }


def _is_read(key: str, config: Config, plan: Plan) -> bool:
    samples = plan.engine is not None or plan.collection is not None
    if not samples and key.startswith(OF_SAMPLING):
        return False
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        reader = READ.get(".".join(parts[:length]))
        if reader is not None:
            return reader(config, plan)
    return False


def other_values(leaf: Leaf, value: Any) -> list[Any]:
    """Return a few further values that the key takes by itself."""
    kind = leaf.kind
    if kind.choices:
        values: list[Any] = list(kind.choices)
    elif kind.base is bool:
        values = [True, False]
    elif kind.base in (int, float) and kind.item is None:
        assert kind.range is not None
        start = value if value is not None else 1
        values = [start * 2, start // 2 if kind.base is int else start / 2, start + 1, kind.range.ge, 16, 2048, 0.5]
        values = [int(number) if kind.base is int else float(number) for number in values if number is not None]
    elif kind.base is str:
        values = {"algorithm.filter_groups.metric": ["auto"], "data.retire_metric": ["auto"]}.get(leaf.key, [])
    else:
        values = []
    values += [None] if kind.optional else []
    return [other for other in dict.fromkeys(values) if other != value and _fits(leaf.key, other)]


def _fits(key: str, value: Any) -> bool:
    return not convert_or_explain(nested({key: value}))[1]


def silent_changes(context: str, keys: list[str]) -> Iterator[tuple[str, bool]]:
    """Change each of `keys` alone, to a few values; yield each accepted change and whether it did nothing without a word."""
    given, machine = CONTEXTS[context]
    base = convert(nested(RUNNABLE | given))
    assert check(base, machine) == [], context
    before = footprint(base, machine)
    for key in keys:
        if key in given:
            continue
        for value in other_values(leaves()[key], value_at(base, key)):
            config = convert(nested(RUNNABLE | given | {key: value}))
            if check(config, machine):
                continue
            try:
                after = footprint(config, machine)
                plan = decide(config, machine)
            except ConfigError:
                continue
            told = idle_keys.notes(
                config,
                machine,
                reference=plan.role("reference") is not None,
                base_reference=plan.base_reference is not None,
                old_logprobs=plan.recomputes_old_logprobs,
            )
            is_spelled_out = key in SPELLED_OUT and value_at(base, key) in (None, "auto", 0)
            is_noted = any(note.startswith(f"{key}=") for note in told)
            is_silent = before == after and key not in WITHOUT_EFFECT and not is_spelled_out and not is_noted
            yield f"{context}: {key}={value}", is_silent
