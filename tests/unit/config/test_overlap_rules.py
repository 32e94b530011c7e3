"""What schedules that sample while they train refuse, what they settle for, and what their plan says."""

from __future__ import annotations

from typing import Any

import pytest
from config_tools import CPU, EIGHT_GPUS, A, R, config_of

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, max_staleness, settled
from grpo_rl.errors import ConfigError
from grpo_rl.plan.decisions import decide
from grpo_rl.plan.make import make_plan
from grpo_rl.rollout.vllm.vllm_engine import engine_arguments

APART = {f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": 1}
ASYNC = {"trainer.schedule": "async"} | APART
CORRECTION = "algorithm.rollout_correction"
OWN = "trainer.asynchronous"


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_engines_need_devices_of_their_own(schedule: str) -> None:
    [problem] = check(config_of({"trainer.schedule": schedule}), CPU)
    assert problem.startswith(f"trainer.schedule={schedule}: samples while it trains")
    assert f"{R}.nnodes=1 {R}.n_gpus_per_node" in problem
    assert check(config_of({"trainer.schedule": schedule} | APART), CPU) == []
    apart = {"trainer.schedule": schedule, "trainer.device": "cuda", "trainer.n_gpus_per_node": 4, f"{R}.nnodes": 1}
    assert check(config_of(apart), EIGHT_GPUS) == []


def test_engines_and_ranks_of_pools_apart_share_the_cores_under_every_schedule() -> None:
    threads = {}
    for schedule in ("sync", "one_step_off", "async"):
        plan = decide(config_of({"trainer.schedule": schedule} | APART), CPU)
        threads[schedule] = [role.threads for role in plan.roles]
        assert plan.overlaps == (schedule != "sync") and not plan.colocated
    assert threads == {"sync": [1, 1, 1], "one_step_off": [1, 1, 1], "async": [1, 1, 1]}
    many = decide(config_of(ASYNC | {f"{R}.n_gpus_per_node": 3}), Machine(0, 16, "cpu"))
    assert [role.threads for role in many.roles] == [4, 4, 4]


@pytest.mark.parametrize(
    ("given", "old"),
    [
        ({}, "engine"),
        ({f"{OWN}.max_staleness": 0}, "none"),
        ({f"{CORRECTION}.rollout_is": "token"}, "actor"),
        ({f"{CORRECTION}.bypass_mode": True}, "engine"),
        ({f"{CORRECTION}.bypass_mode": False, f"{CORRECTION}.rollout_is": "sequence"}, "actor"),
        ({f"{A}.policy_loss.loss_mode": "dpo"}, "none"),
    ],
)
def test_the_ratio_is_never_taken_against_another_policy_than_the_one_that_sampled(given: dict[str, Any], old: str) -> None:
    config = config_of(ASYNC | given)
    assert check(config, CPU) == [] and decide(config, CPU).passes.old_logprobs == old


def test_a_ratio_against_the_wrong_policy_is_refused() -> None:
    given = {f"{CORRECTION}.bypass_mode": False}
    [problem] = check(config_of(ASYNC | given), CPU)
    assert problem.startswith(f"{CORRECTION}.bypass_mode=false: ") and "rollout_is=token" in problem
    assert check(config_of(ASYNC | given | {f"{OWN}.max_staleness": 0}), CPU) == []
    words = ["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=builtin:arithmetic", "data.train_batch_size=4"]
    words += [f"{A}.ppo_mini_batch_size=4", f"{A}.policy_loss.loss_mode=gpg", *(f"{k}={v}" for k, v in ASYNC.items())]
    with pytest.raises(ConfigError, match=r"rollout_correction.rollout_is=null: .* has no ratio that corrects for that"):
        make_plan(compose(words), CPU)
    plan = make_plan(compose([*words, f"{CORRECTION}.rollout_is=token"]), CPU)
    assert plan.recomputes_old_logprobs
    said = " ".join(plan.render().split())
    assert "async: 2 batches of prompts in flight, no token more than 1 version old" in said
    assert "the policy of at most 1 training step before" in said


@pytest.mark.parametrize(
    ("more", "passed", "said"),
    [
        ([], {"async_scheduling": False}, "vLLM's async scheduling is off"),
        ([f"{OWN}.partial_rollout=false"], {}, None),
        ([f"+{R}.engine_kwargs.vllm.async_scheduling=true"], {"async_scheduling": True}, "they end before each update"),
    ],
)
def test_engines_that_get_weights_under_unfinished_requests_hand_tokens_over_at_once(more, passed, said) -> None:
    words = ["data.train_files=task:arithmetic", "actor_rollout_ref.model.path=builtin:arithmetic", "trainer.schedule=async"]
    words += ["trainer.n_gpus_per_node=4", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=4", *more]
    plan = make_plan(compose(words), EIGHT_GPUS)
    assert plan.engine is not None
    assert {key: value for key, value in engine_arguments(plan.engine).items() if key == "async_scheduling"} == passed
    text = " ".join(plan.render().split())
    assert text.count("async scheduling is off") + text.count("they end before each update") == (said is not None)
    assert said is None or said in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({f"{OWN}.sync_every": 3}, f"{OWN}.sync_every=3: the weights would be older than max_staleness=1"),
        ({f"{OWN}.partial_rollout": False, f"{OWN}.keep_cache": True}, f"{OWN}.keep_cache"),
        ({f"{OWN}.max_staleness": 0, f"{OWN}.keep_cache": True}, f"{OWN}.keep_cache"),
        ({"trainer.schedule": "one_step_off", f"{OWN}.max_staleness": 2}, f"{OWN}.max_staleness=2"),
        ({"trainer.schedule": "sync", f"{OWN}.max_staleness": 2}, f"{OWN}.max_staleness=2"),
    ],
)
def test_what_would_have_no_effect_or_break_the_bound_is_refused(given: dict[str, Any], said: str) -> None:
    [problem] = check(config_of(ASYNC | given), CPU)
    assert problem.startswith(said)


def test_the_engines_log_probs_are_the_old_ones_only_where_weights_may_be_stale() -> None:
    assert settled(config_of({})).algorithm.rollout_correction.bypass_mode is None
    assert settled(config_of(ASYNC)).algorithm.rollout_correction.bypass_mode is True
    staleness = [max_staleness(config_of(given)) for given in ({}, {"trainer.schedule": "one_step_off"}, ASYNC)]
    assert staleness == [0, 1, 1]
