"""No key that is accepted does nothing without a word: a change changes the run, is refused, or is in the plan's notes."""

from __future__ import annotations

from typing import Any

import pytest
from config_tools import CPU, EIGHT_GPUS, RUNNABLE, A, R, config_of
from effects import CONTEXTS, READ, SPELLED_OUT, WITHOUT_EFFECT, footprint, silent_changes

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import leaves, sections
from grpo_rl.plan.make import make_plan

EVERY = 7
VALIDATED = {"data.val_files": "task:arithmetic?split=val"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_change_of_one_key_has_an_effect_or_is_refused_or_noted(context: str) -> None:
    # Each context takes another seventh of the keys.
    keys = list(leaves())[list(CONTEXTS).index(context) % EVERY :: EVERY]
    changes = list(silent_changes(context, keys))
    assert [change for change, is_silent in changes if is_silent] == []
    assert len(changes) > len(keys) / 4


def test_the_scan_finds_a_key_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(READ, f"{R}.ignore_eos")
    assert [is_silent for _, is_silent in silent_changes("default", [f"{R}.ignore_eos"])] == [True]
    assert footprint(config_of({}), CPU) == footprint(config_of({f"{R}.ignore_eos": True}), CPU)


def test_the_lists_of_the_scan_name_keys_that_exist() -> None:
    assert not {*WITHOUT_EFFECT, *SPELLED_OUT} - set(leaves())
    assert not {key for key in READ if key not in leaves() and key not in sections()}
    for key in SPELLED_OUT:
        assert leaves()[key].default in (None, "auto", 0)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({f"{R}.name": "hf", f"{R}.gpu_memory_utilization": 0.7}, f"{R}.gpu_memory_utilization"),
        ({f"{R}.name": "hf", f"{R}.kv_cache_gib": 2.0}, f"{R}.kv_cache_gib"),
        ({f"{R}.name": "hf", f"{R}.enable_prefix_caching": False}, f"{R}.enable_prefix_caching"),
        ({f"{R}.name": "hf", f"{R}.enforce_eager": True}, f"{R}.enforce_eager"),
        ({f"{R}.name": "hf", f"{R}.free_cache_engine": False}, f"{R}.free_cache_engine"),
        ({f"{R}.val_kwargs.do_sample": True, f"{R}.val_kwargs.temperature": 1.0}, f"{R}.val_kwargs.do_sample"),
        ({f"{R}.val_kwargs.do_sample": True, f"{R}.val_kwargs.temperature": 1.0}, f"{R}.val_kwargs.temperature"),
    ],
)
def test_a_setting_that_something_else_switches_off_is_refused(given: dict[str, Any], key: str) -> None:
    (problem,) = [problem for problem in check(config_of(given), CPU) if problem.startswith(f"{key}=")]
    assert "leave it out" in problem


def page(words: list[str], machine: Machine) -> str:
    return " ".join(make_plan(compose(words), machine).render().split())


@pytest.mark.parametrize(
    ("given", "machine", "key", "why"),
    [
        ({f"{A}.use_kl_loss": "false"}, CPU, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", "no reference runs"),
        ({}, CPU, f"{R}.log_prob_max_token_len_per_gpu=4096", "no pass computes old log-probs"),
        ({}, CPU, f"{R}.gpu_memory_utilization=0.7", "is for GPUs"),
        ({}, EIGHT_GPUS, f"{R}.kv_cache_gib=2.0", "is for CPUs"),
        ({}, EIGHT_GPUS, f"{R}.cpu_threads=3", "is for CPUs"),
        ({}, CPU, "trainer.val_before_train=false", "nothing to validate on"),
        ({f"{A}.use_dynamic_bsz": "true"}, CPU, f"{A}.ppo_micro_batch_size_per_gpu=4", "cut by tokens"),
        (
            {f"{R}.log_prob_use_dynamic_bsz": "true", f"{A}.ppo_mini_batch_size": "16"},
            CPU,
            f"{R}.log_prob_micro_batch_size_per_gpu=4",
            "cut by tokens",
        ),
        (VALIDATED, CPU, f"{R}.val_kwargs.temperature=0.6", "greedy without"),
        (VALIDATED, CPU, f"{R}.val_kwargs.top_p=0.7", "greedy without"),
        (VALIDATED, CPU, f"{R}.val_kwargs.do_sample=true", "greedy at temperature 0"),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, CPU, f"{A}.clip_ratio_c=10.0", "clips no second time"),
        (
            {f"{A}.use_kl_loss": "false", "algorithm.kl_ctrl.kl_coef": "0"},
            CPU,
            "algorithm.use_kl_in_reward=true",
            "the penalty is 0",
        ),
        ({"reward.overlong_buffer.enable": "false"}, CPU, "reward.overlong_buffer.len=64", "enable=false"),
        ({}, CPU, "reward.overlong_buffer.enable=false", "there is no reward.overlong_buffer.len"),
    ],
)
def test_a_habit_without_an_effect_is_noted_in_the_plan(given: dict[str, Any], machine: Machine, key: str, why: str) -> None:
    words = [f"{name}={value}" for name, value in {**RUNNABLE, **given}.items()]
    note = f"{key}: has no effect in this run: "
    text = page([*words, key], machine)
    assert note in text and why in text.partition(note)[2][:100]
    assert note not in page(words, machine)


def test_a_pass_that_exists_is_not_noted() -> None:
    words = [f"{name}={value}" for name, value in RUNNABLE.items() if name != f"{A}.ppo_mini_batch_size"]
    words += [f"{A}.ppo_mini_batch_size=16", f"{R}.log_prob_max_token_len_per_gpu=4096"]
    assert "has no effect in this run" not in page(words, CPU)
