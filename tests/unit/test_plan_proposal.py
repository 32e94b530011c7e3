"""What a plan proposes for a machine that is too small fits when it is planned again, and how long a step is said to take."""

from __future__ import annotations

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan
from grpo_rl.plan.memory import Fit, fit_of
from grpo_rl.plan.proposal import propose

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = ["recipe=gsm8k/qwen2.5-7b", "trainer.dry_run=true"]
PPO = ["algorithm.adv_estimator=gae", f"{A}.use_kl_loss=false"]
TOO_SMALL = {
    "7B on consumer GPUs": [f"{M}.path=Qwen/Qwen2.5-7B", "machine=8xRTX4090-24GB"],
    "7B with a critic": [f"{M}.path=Qwen/Qwen2.5-7B", "machine=8xL40S-48GB", *PPO],
    "7B, nothing recomputed": [f"{M}.path=Qwen/Qwen3-8B", "machine=8xH100-80GB", f"{M}.enable_gradient_checkpointing=false"],
    "14B, an engine that stays": [f"{M}.path=Qwen/Qwen2.5-14B", "machine=8xH100-80GB", f"{R}.free_cache_engine=false"],
    "14B by rollouts": [
        f"{M}.path=Qwen/Qwen2.5-14B",
        "machine=8xA100-40GB",
        f"{A}.ppo_micro_batch_size_per_gpu=32",
        f"~{A}.ppo_max_token_len_per_gpu",
    ],
    "32B": [f"{M}.path=Qwen/Qwen2.5-32B", "machine=8xH100-80GB"],
    "72B, which needs more machines": [f"{M}.path=Qwen/Qwen2.5-72B-Instruct", "machine=8xH100-80GB"],
    "a mixture": [f"{M}.path=Qwen/Qwen3-30B-A3B", "machine=8xH100-80GB"],
    "little host memory": [f"{M}.path=Qwen/Qwen2.5-32B", "machine=8xH100-80GB", "trainer.machine_host_gib=300"],
}


def planned(*words: str) -> Plan:
    return make_plan(compose([*BASE, *words]))


def judged(plan: Plan) -> Fit:
    assert plan.model is not None
    fit = fit_of(plan, plan.model)
    assert fit is not None
    return fit


@pytest.mark.parametrize("name", TOO_SMALL)
def test_what_is_proposed_fits_when_it_is_planned_again(name) -> None:
    plan = planned(*TOO_SMALL[name])
    assert plan.model is not None and not judged(plan).fits
    found = propose(plan, plan.model)
    assert found is not None and found.changes
    words = found.words()
    given = [
        word
        for word in TOO_SMALL[name]
        if not any(word.startswith("machine=") for _ in words if words[0].startswith("machine="))
    ]
    again = planned(*given, *words)
    assert judged(again).fits
    page = plan.render()
    assert "does not fit" in page and all(f"\n  {word}\n" in page for word in words)
    assert "fits         yes" in again.render()


def test_a_run_that_fits_is_left_alone() -> None:
    page = planned("machine=8xH100-80GB").render()
    assert "fits         yes" in page and "instead" not in page and "not run" in page


def test_the_proposal_changes_as_little_as_it_can() -> None:
    plan = planned("machine=8xH100-80GB", f"{A}.ppo_max_token_len_per_gpu=131072")
    assert plan.model is not None
    found = propose(plan, plan.model)
    assert found is not None and set(found.changes) == {f"{A}.ppo_max_token_len_per_gpu"}
    # Twice as many tokens would not have fitted.
    tokens = 2 * found.changes[f"{A}.ppo_max_token_len_per_gpu"]
    assert not judged(planned("machine=8xH100-80GB", f"{A}.ppo_max_token_len_per_gpu={tokens}")).fits


def test_nothing_is_proposed_where_nothing_fits() -> None:
    page = planned(f"{M}.path=Qwen/Qwen2.5-72B", "machine=1xL4-24GB", "trainer.machine_host_gib=8").render()
    assert "no configuration was found that fits" in page


def test_host_memory_counts_what_is_kept_off_the_gpus() -> None:
    offload = [f"{A}.fsdp_config.param_offload=true", f"{A}.fsdp_config.optimizer_offload=true"]
    plain, away = (planned("machine=8xH100-80GB", *words) for words in ([], offload))
    there = [next(need.needed for need in judged(plan).needs if need.what.startswith("host")) for plan in (plain, away)]
    # All eight ranks are on the one machine: the whole model's weights and moments.
    assert there[1] - there[0] == pytest.approx(7_615_616_512 * 12, rel=1e-6)
    small = planned("machine=8xH100-80GB", "trainer.machine_host_gib=16")
    assert not judged(small).fits and "host memory of a machine" in small.render()


def test_the_engine_needs_room_for_its_weights_and_one_sequence_in_its_share() -> None:
    fit = judged(planned("machine=8xH100-80GB", f"{R}.gpu_memory_utilization=0.15"))
    assert [need.what for need in fit.needs if need.needed > need.there] == ["engine, in its share"]
    more, fewer = (judged(planned("machine=8xH100-80GB", f"{R}.gpu_memory_utilization={share}")) for share in (0.7, 0.5))
    # 0.2 of 79.1 GiB at 56 KiB a token: 2 x 28 layers x 4 heads x 128 numbers of two bytes.
    assert more.cache_tokens - fewer.cache_tokens == pytest.approx(0.2 * 79.1 * 2**30 / (2 * 28 * 4 * 128 * 2), rel=1e-3)
