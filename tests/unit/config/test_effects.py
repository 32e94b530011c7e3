"""No key does nothing without a word: one that was set changes what the run reads, is refused, or is in the plan's notes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from compositions import compose
from config_tools import CPU, EIGHT_GPUS, RUNNABLE, A, R, config_of

from grpo_rl.config import effects
from grpo_rl.config.convert import value_problem
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import leaves, replaced, value_of
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import decide
from grpo_rl.plan.make import make_plan

REF, VAL_KWARGS, SCORER = "actor_rollout_ref.ref", f"{R}.val_kwargs", "reward.reward_model"
VALIDATED = {"data.val_files": ["task:arithmetic?num_rows=16&split=val"]}
ASKED = {"data.val_prompt_files": ["task:arithmetic?num_rows=16&split=val"]}
ROWS = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "sft"}
PAIRS = {"data.responses": "rows", f"{A}.policy_loss.loss_mode": "dpo"}
COLLECTED = {"data.responses": "initial_policy", f"{A}.policy_loss.loss_mode": "sft"}
SAMPLED_PAIRS = {f"{A}.policy_loss.loss_mode": "dpo"}
SCORED = {"trainer.schedule": "reward_model", f"{SCORER}.model_path": "builtin:arithmetic"}
ITERATED = {"trainer.schedule": "iterate", f"{SCORER}.enable": True, f"{SCORER}.model_path": "builtin:arithmetic"}
EPISODES = {f"{R}.multi_turn.enable": True, f"{R}.multi_turn.environment.name": "game"}
ASYNC = {"trainer.schedule": "async", f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 1}
IN_REWARD = {f"{A}.use_kl_loss": False, "algorithm.use_kl_in_reward": True}
NO_FUNCTIONS = {"reward.functions": [], f"{SCORER}.enable": True, f"{SCORER}.model_path": "builtin:arithmetic"}
CONTEXTS: dict[str, tuple[dict[str, Any], Machine]] = {
    "default": ({}, CPU),
    "hf, without a reference": ({f"{R}.name": "hf", f"{A}.use_kl_loss": False}, CPU),
    "adaptive KL in the reward": (IN_REWARD | {"algorithm.kl_ctrl.type": "adaptive"}, CPU),
    "adapters": ({"actor_rollout_ref.model.lora_rank": 8}, CPU),
    "two updates, by rollouts": ({f"{A}.ppo_mini_batch_size": 16, f"{A}.ppo_micro_batch_size_per_gpu": 4}, CPU),
    "critic": ({"algorithm.adv_estimator": "gae"}, CPU),
    "sampled validation": (VALIDATED | {f"{VAL_KWARGS}.do_sample": True, f"{VAL_KWARGS}.temperature": 1.0}, CPU),
    "saving": ({"trainer.save_freq": 5, "trainer.experiment_name": "x"}, CPU),
    "groups": ({"algorithm.filter_groups.enable": True}, CPU),
    "replay": ({"algorithm.replay.max_age": 4}, CPU),
    "episodes with tools": (EPISODES | {f"{R}.multi_turn.tools": {"calculator": {}}}, CPU),
    "judge": ({"reward.judge.base_url": "http://localhost:1/v1", "reward.judge.model": "m"}, CPU),
    "GPUs": ({"trainer.device": "cuda"}, EIGHT_GPUS),
    "answers in rows": (ROWS, CPU),
    "answers in rows, validated": (ROWS | ASKED | {"trainer.test_freq": 5}, CPU),
    "pairs in rows": (PAIRS, CPU),
    "answers of the initial policy": (COLLECTED, CPU),
    "sampled pairs": (SAMPLED_PAIRS, CPU),
    "reward model": ({key: leaves()[key].default for key in RUNNABLE if not key.startswith("data.")} | SCORED, CPU),
    "iterated": (ITERATED, CPU),
    "asynchronous": (ASYNC, CPU),
}
"""Configurations in which every key is changed: what is added to the smallest runnable one, and the machine."""


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_key_that_is_set_is_read_or_refused_or_noted_and_what_is_noted_decides_nothing(context: str) -> None:
    given, machine = CONTEXTS[context]
    read = 0
    unchanged = config_of(given)
    assert list(effects.problems(unchanged, machine)) == []
    for key, leaf in leaves().items():
        for value in other_values(key) if key not in given else ():
            config = replaced(unchanged, {key: value})
            refused = any(line.startswith(f"{key}=") for line in effects.problems(config, machine))
            noted = any(line.startswith(f"{key}=") for line in notes(config, machine))
            run = effects.as_read(config, machine)
            kept = value_of(run, key) == value
            assert refused + noted + kept == 1, (key, value)
            # What the run reads of a key without an effect is what it reads if the key is not set at all.
            assert kept or value_of(run, key) == leaf.default
            read += kept
            if noted:
                assert decided(config, machine) == decided(run, machine), key
    assert read > 40


def notes(config: Any, machine: Machine) -> list[str]:
    return list(effects.notes(config, machine, reference="its own ranks", old_logprobs=True))


def decided(config: Any, machine: Machine) -> Any:
    """The decisions of a plan beside its configuration and the engine's settings."""
    try:
        plan = decide(config, machine)
    except ConfigError as error:
        return str(error)
    made = {
        "old": plan.recomputes_old_logprobs,
        "reference": plan.role("reference") is not None or plan.base_reference is not None,
        "critic": plan.role("critic") is not None,
    }
    passes = dataclasses.replace(plan.passes, **{name: plan.passes.update for name, is_made in made.items() if not is_made})
    of_policy = (passes, plan.objective.formula()) if plan.role("actor") else ()
    return plan.sizes, plan.roles, plan.pools, plan.reward, of_policy


@cache
def other_values(key: str) -> list[Any]:
    """Return a value that the key takes by itself and that is not its default, if one is known."""
    leaf = leaves()[key]
    kind = leaf.kind
    candidates: list[Any] = list(kind.choices) or ["text"]
    if kind.base is bool:
        candidates = [True, False]
    elif kind.item is not None:
        candidates = [[entry] for entry in kind.item.choices] or [["text"], [1], [0.5]]
    elif kind.base is dict:
        candidates = [{"option": 1}]
    elif kind.base in (int, float):
        candidates = [kind.base(number) for number in (2, 0.5, 0.001, 16, 2048, 2**30)]
    return [value for value in candidates if value != leaf.default and value_problem(key, value) is None][:1]


def test_the_rules_name_keys_and_parts_that_exist() -> None:
    parts = {leaf.part for leaf in leaves().values()}
    for given, machine in CONTEXTS.values():
        for _, names, _ in effects.rules_of(config_of(given), machine):
            for name in names.split():
                known = name in parts or name in leaves()
                assert known or (name.endswith("*") and any(key.startswith(name[:-1]) for key in leaves())), name


def test_what_a_key_needs_is_a_value_that_can_be_given() -> None:
    for section, need in {need for leaf in leaves().values() for need in leaf.needs}:
        key = ""
        for condition in effects.full_need(section, need)[0].split(" or "):
            key, _, wanted = condition.partition("=") if "." in condition else (key, "", condition)
            leaf = leaves()[key.removesuffix(" above 0")]
            value: Any = {"true": True, "false": False, "null": None}.get(wanted, wanted)
            given = [value] if leaf.kind.item is not None else value
            fits = (leaf.kind.optional and value is None) or value_problem(leaf.key, given) is None
            assert not wanted or fits, (section, need)


@pytest.mark.parametrize(
    ("given", "key", "value", "why"),
    [
        (ROWS, "algorithm.gamma", 0.9, "data.responses=rows trains on the answers"),
        (ROWS, "reward.num_workers", 7, "needs data.val_prompt_files"),
        (ROWS | {"data.max_length": 64}, "data.max_prompt_length", 9, "data.max_length is the longest row"),
        (ROWS, "data.chosen_key", "good", "loss_mode=sft reads rows with answers"),
        (ROWS, "algorithm.rejection.min_reward", 0.5, "data.responses=initial_policy"),
        (ROWS, "trainer.iterate.replay_share", 0.2, "trainer.schedule=iterate"),
        (PAIRS, "data.response_key", "answer", "loss_mode=dpo reads rows with pairs"),
        (COLLECTED | SAMPLED_PAIRS, "algorithm.rejection.min_reward", 0.5, "the best with the worst"),
        (COLLECTED, f"{A}.ppo_epochs", 2, "samples before training"),
        ({}, "data.max_length", 64, "data.responses=rows"),
        ({}, f"{SCORER}.train.optim.lr", 1e-4, "trainer.schedule=reward_model"),
        (ASYNC | {"trainer.asynchronous.partial_rollout": False}, "trainer.asynchronous.keep_cache", True, "partial_rollout"),
        (SAMPLED_PAIRS, "algorithm.adv_estimator", "rloo", "compares pairs and reads no advantages"),
        (SAMPLED_PAIRS, f"{A}.kl_loss_coef", 0.1, "no KL term"),
        (SCORED, f"{A}.optim.lr", 1e-4, "trains no policy"),
        (SCORED, "data.truncation", "left", "trains no policy"),
        (SCORED, f"{SCORER}.step_separator", "x", "train.loss=bradley_terry"),
        (SCORED | {f"{SCORER}.train.loss": "steps"}, "data.rejected_key", "worse", "train.loss=steps"),
        (SCORED | {f"{SCORER}.train.loss": "steps"}, f"{SCORER}.train.center_coef", 0.1, "train.loss=bradley_terry"),
        ({}, "critic.optim.lr", 1e-4, "needs no critic"),
        ({f"{A}.use_kl_loss": False}, f"{A}.kl_loss_coef", 0.5, "use_kl_loss=true"),
        ({f"{A}.kl_loss_coef": 0.0}, f"{A}.kl_loss_type", "k1", "kl_loss_coef above 0"),
        ({f"{A}.clip_ratio_low": 0.1, f"{A}.clip_ratio_high": 0.2}, f"{A}.clip_ratio", 0.1, "are both there"),
        ({"algorithm.filter_groups.enable": True, "algorithm.filter_groups.refill": False}, "data.gen_batch_size", 64, "refill"),
        ({"data.data_source": "x"}, "data.reward_fn_key", "y", "gives it for all rows"),
        ({}, f"{R}.n_gpus_per_node", 2, f"{R}.nnodes gives them their own"),
        (EPISODES, f"{R}.multi_turn.max_parallel_calls", 3, "tool_config_path"),
        (EPISODES, f"{R}.multi_turn.truncation.penalty", 2.0, "=punish"),
        (EPISODES | {f"{R}.multi_turn.environment.reward_weight": 0.0}, f"{R}.multi_turn.turn_discount", 0.5, "reward_weight"),
        ({}, "ray_kwargs.ray_init.wait_for_nodes_s", 9.0, "a local cluster"),
        ({f"{A}.ppo_micro_batch_size_per_gpu": 4}, f"{A}.ppo_max_token_len_per_gpu", 4096, "cut by rollouts"),
        *[
            (NO_FUNCTIONS, f"reward.{name}", value, "needs reward.functions or reward.audit")
            for name, value in {"timeout_s": 7.0, "num_workers": 3, "memory_limit_gb": 3.0, "batched": ["a"], "function_kwargs": {"a": {}}}.items()
        ],
    ],
)  # fmt: skip
def test_a_setting_that_another_one_switches_off_is_refused(given: dict[str, Any], key: str, value: Any, why: str) -> None:
    base = (
        {name: leaves()[name].default for name in RUNNABLE if not name.startswith("data.")}
        if given.items() >= SCORED.items()
        else {}
    )
    found = [line for line in effects.problems(config_of(base | given | {key: value}), CPU) if line.startswith(f"{key}=")]
    assert len(found) == 1 and why in found[0] and "leave it out" in found[0], found
    assert not [line for line in effects.problems(config_of(base | given), CPU) if line.startswith(f"{key}=")]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [({"trainer.total_training_steps": 3}, "trainer.total_epochs", 7), ({}, "global_profiler.save_path", "profiles")],
)
def test_habits_without_an_effect_are_noted(given: dict[str, Any], key: str, value: Any) -> None:
    config = config_of(given | {key: value})
    assert not [line for line in effects.problems(config, CPU) if key in line]
    (note,) = [line for line in effects.notes(config, CPU, reference="nobody", old_logprobs=True) if key in line.split("=")[0]]
    assert "has no effect in this run" in note


def page(words: list[str], machine: Machine) -> str:
    return " ".join(make_plan(compose(words), machine).render().split())


@pytest.mark.parametrize(
    ("given", "machine", "key", "why"),
    [
        ({f"{A}.use_kl_loss": "false"}, CPU, f"{REF}.log_prob_micro_batch_size_per_gpu=4", "no reference runs"),
        ({}, CPU, f"{R}.log_prob_max_token_len_per_gpu=4096", "no pass computes old log-probs"),
        ({}, CPU, f"{R}.gpu_memory_utilization=0.7", "it is for GPUs"),
        ({f"{R}.name": "hf"}, CPU, f"{R}.enforce_eager=true", "needs actor_rollout_ref.rollout.name=vllm"),
        ({}, EIGHT_GPUS, f"{R}.kv_cache_gib=2.0", "it is for CPUs"),
        ({}, CPU, "trainer.val_before_train=false", "nothing to validate on"),
        ({f"{A}.use_dynamic_bsz": "true"}, CPU, f"{A}.ppo_micro_batch_size_per_gpu=4", "cut by tokens"),
        ({}, CPU, f"{A}.fsdp_config.param_offload=true", "it is for GPUs"),
        ({f"{A}.fsdp_config.offload_policy": "true"}, EIGHT_GPUS, f"{A}.fsdp_config.optimizer_offload=true", "all the time"),
        ({"global_profiler.steps": "[1]"}, CPU, "global_profiler.tool=torch", "no role is profiled"),
        ({}, CPU, f"{A}.fsdp_config.fsdp_size=8", "a larger group is all of them, as in verl"),
        ({}, EIGHT_GPUS, f"{REF}.fsdp_config.fsdp_size=9", "there are 8 ranks"),
        ({"data.val_files": "task:arithmetic"}, CPU, f"{VAL_KWARGS}.temperature=0.6", "greedy without"),
        ({"data.val_files": "task:arithmetic"}, CPU, f"{VAL_KWARGS}.do_sample=true", "greedy at temperature 0"),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, CPU, f"{A}.clip_ratio_c=10.0", "clips no second time"),
        ({"reward.overlong_buffer.enable": "false"}, CPU, "reward.overlong_buffer.len=64", "enable=false"),
    ],
)  # fmt: skip
def test_a_habit_without_an_effect_is_noted_in_the_plan(given: dict[str, Any], machine: Machine, key: str, why: str) -> None:
    words = [f"{name}={value}" for name, value in {**RUNNABLE, **given}.items()]
    note = f"{key}: has no effect in this run: "
    text = page([*words, key], machine)
    assert note in text and why in text.partition(note)[2][:100]


def test_a_pass_that_exists_is_not_noted() -> None:
    words = [f"{name}={value}" for name, value in {**RUNNABLE, f"{A}.ppo_mini_batch_size": 16}.items()]
    assert "has no effect in this run" not in page([*words, f"{R}.log_prob_max_token_len_per_gpu=4096"], CPU)
