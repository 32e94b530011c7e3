"""The model of cost: closed forms if lengths have no variance, and what must hold for any lengths and machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compositions import compose

from grpo_rl.commands.plan import words_of_lengths
from grpo_rl.errors import DataError
from grpo_rl.plan.cost import FORWARD, Lengths, Replica, StepTime, step_time
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan, plan_without_page
from grpo_rl.plan.model_folder import ModelSize
from grpo_rl.plan.proposal import Division, divisions

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = ["recipe=gsm8k/qwen2.5-7b", "trainer.dry_run=true"]
EQUAL, LONG_TAIL = Lengths(100, 0.0, 400), Lengths(100, 1.0, 2000)
# A model that costs nothing to compute: a decoding step takes its overhead, 10 ms, whatever the batch.
SIZE = ModelSize("llama", 1, 1, 1, 1, 1, 1, 1, num_params=2)
REPLICA = Replica(SIZE, 2, 1e18, 1e18, 0.01, slots=32, prompt=10, group=4)


def planned(*words: str) -> Plan:
    return plan_without_page(compose([*BASE, *words]).config)


def page_of(*words: str) -> str:
    return " ".join(make_plan(compose([*BASE, *words])).render().split())


def timed(*words: str) -> StepTime:
    plan = planned(*words)
    found = step_time(plan)
    assert found is not None
    return found


def divided(*words: str) -> dict[str, Division]:
    plan = planned(*words)
    assert plan.model is not None
    return {division.schedule: division for division in divisions(plan)}


@pytest.mark.parametrize(("mean", "spread"), [(100, 0.3), (100, 1.0), (900, 0.8), (500, 0.0), (999, 0.8)])
def test_lengths_have_the_mean_that_was_asked_for_after_the_cut(mean: float, spread: float) -> None:
    lengths = Lengths(mean, spread, 1000)
    tokens_K = np.linspace(0, 1000, 100_001)
    assert np.trapezoid(lengths.alive(tokens_K), tokens_K) == pytest.approx(mean, rel=0.01)
    assert lengths.longest_of(1e6) <= 1000 and lengths.longest_of(100) >= 0.99 * mean


@pytest.mark.parametrize("requests", [8, 32, 96, 3200])
def test_equal_lengths_take_a_round_of_the_slots_after_the_other(requests: int) -> None:
    seconds, filled = REPLICA.batch_s(EQUAL, requests)
    rounds = math.ceil(requests / 32)
    assert seconds == pytest.approx(rounds * 100 * 0.01, rel=0.05) and filled == pytest.approx(min(1, requests / 32), rel=0.05)


def test_a_batch_ends_with_its_longest_response_and_has_as_many_tokens_as_were_asked_for() -> None:
    few, _ = REPLICA.batch_s(LONG_TAIL, 16)
    assert few == pytest.approx(0.01 * LONG_TAIL.longest_of(16), rel=0.15)
    # If each sequence costs the same and nothing else does, only the tokens count, whatever the tail.
    busy = replace(REPLICA, overhead_s=0.0, flops=2 * 2 / 0.001)
    tokens, _ = busy.batch_s(LONG_TAIL, 200)
    assert tokens == pytest.approx(200 * 100 * 0.001 * SIZE.active_params / 2, rel=0.1)


def test_decoding_takes_the_longer_of_memory_and_computing() -> None:
    size = replace(SIZE, num_params=1000, layers=5)  # weights of 2,000 bytes; 20 bytes of cache a token
    replica = replace(REPLICA, size=size, bandwidth=1000.0, flops=1e18, overhead_s=1.0)
    assert replica.step_s(2, 50) == pytest.approx(1 + (2000 + 50 * size.kv_bytes_per_token(2)) / 1000)
    assert replace(replica, flops=100.0).step_s(8, 50) == pytest.approx(1 + 2 * size.active_params * 8 / 100)


def test_a_replica_that_always_has_work_has_no_tail_and_pays_for_what_it_reads_again() -> None:
    batch, _ = REPLICA.batch_s(LONG_TAIL, 32)
    steady, filled = REPLICA.steady_s(LONG_TAIL, 32, 64, reads_again=False)
    assert filled == 1 and steady == pytest.approx(100 * 0.01, rel=0.01) and batch > 3 * steady
    reading = replace(REPLICA, flops=1e4)
    again, kept = (reading.steady_s(LONG_TAIL, 32, 64, reads_again=reads)[0] for reads in (True, False))
    # All 32 that are unfinished, of a mean age of their own, and the prompts of 8 groups.
    assert again - kept == pytest.approx(reading.reading_s(32 * LONG_TAIL.age + 8 * 10))


# ---- a run on a machine -------------------------------------------------------------------------------------


def test_the_update_takes_a_third_of_the_peak_for_seven_billion_parameters_and_half_of_that_for_half_a_billion() -> None:
    words = ["machine=8xH100-80GB", f"{A}.use_prefix_grouper=false", f"{M}.enable_gradient_checkpointing=true"]
    shares = []
    for name, params in (("7B", 7_615_616_512 - 152064 * 3584), ("0.5B", 494_032_768)):
        found = timed(*words, f"{M}.path=Qwen/Qwen2.5-{name}")
        assert found.tokens == 8192 * 768 and found.total == pytest.approx(sum(found.phases.values()))
        # 8,192 rollouts of 256 + 512 tokens; 6 FLOPs a parameter without the embedding of an untied head.
        shares.append(8192 * 768 * 6 * params / 8 / 989e12 / found.phases["update"])
    assert shares[0] == pytest.approx(0.33, rel=0.15) and shares[1] == pytest.approx(shares[0] / 2, rel=0.3)


def test_the_estimate_moves_as_machines_and_work_do() -> None:
    base = timed("machine=8xH100-80GB").phases
    slow = timed("machine=8xA100-80GB").phases
    # Products alone would take 989/312 of the time; what moves between them takes 3350/2039.
    assert 3350 / 2039 < slow["update"] / base["update"] < 989 / 312
    assert slow["sampling"] > base["sampling"] and slow["reference"] > base["reference"]
    assert timed("machine=2x8xH100-80GB").phases["update"] < 0.6 * base["update"]
    assert timed("machine=8xH100-80GB", f"{A}.ppo_epochs=2").phases["update"] == pytest.approx(2 * base["update"], rel=0.05)
    offload = [f"{A}.fsdp_config.param_offload=true", f"{A}.fsdp_config.optimizer_offload=true"]
    assert timed("machine=8xH100-80GB", *offload).phases["switch and offload"] > base["switch and offload"]
    alone = timed("machine=8xH100-80GB", f"{A}.use_kl_loss=false").phases
    assert "reference" not in alone and "critic's update" not in alone
    critic = timed("machine=8xH100-80GB", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=false").phases
    assert critic["critic's update"] == pytest.approx(critic["update"], rel=0.1)
    assert critic["critic's values"] == pytest.approx(critic["critic's update"] * FORWARD / 4, rel=0.1)
    longer = timed("machine=8xH100-80GB", "trainer.mean_response_length=900").phases
    assert longer["update"] / base["update"] == pytest.approx(900 / 512, rel=0.15) and longer["sampling"] > base["sampling"]


def test_no_rank_is_faster_than_the_longest_sequence() -> None:
    words = ["trainer.mean_response_length=100", "data.train_batch_size=64", f"{R}.n=2", f"{A}.ppo_mini_batch_size=64"]
    one, many = (timed(f"machine={nodes}x8xH100-80GB", *words).phases["update"] for nodes in (2, 16))
    assert many > one / 4


def test_a_mixture_decodes_and_trains_by_the_experts_that_it_takes() -> None:
    words = ["machine=4x8xH100-80GB", f"{A}.fsdp_config.offload_policy=true", f"{R}.tensor_model_parallel_size=4"]
    moe, dense = (timed(f"{M}.path={path}", *words) for path in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B"))
    assert moe.phases["update"] < 0.5 * dense.phases["update"] and moe.phases["sampling"] < dense.phases["sampling"]


def test_schedules_divide_a_machine_and_say_what_limits() -> None:
    long = ["data.max_response_length=16384", "trainer.mean_response_length=4000", f"{A}.use_kl_loss=false"]
    long += ["data.train_batch_size=512", f"{R}.n=8", f"{A}.ppo_mini_batch_size=512", f"{A}.ppo_max_token_len_per_gpu=32768"]
    small, large = divided("machine=8xH100-80GB", *long), divided("machine=32x8xH100-80GB", *long)
    for found in (small, large):
        assert found["sync"].plan.colocated
        for name in ("sync, apart", "one_step_off", "async, 1 old"):
            assert not found[name].plan.colocated and found[name].time.gpus <= found["sync"].time.gpus
        assert found["one_step_off"].time.total < found["sync, apart"].time.total
        assert found["async, 4 old"].time.total <= found["async, 1 old"].time.total
    assert small["sync"].time.limit == "sampling" and small["sync"].time.total < small["sync, apart"].time.total / 1.5
    # So many engines that the longest response alone decides: only more batches in flight go on past it.
    assert large["sync"].time.limit == "long responses"
    assert large["async, 4 old"].time.total < 0.8 * large["one_step_off"].time.total


def test_the_keys_of_a_division_make_the_run_that_it_was_computed_for() -> None:
    found = divided("machine=2x8xH100-80GB")["async, 2 old"]
    again = timed("machine=2x8xH100-80GB", *(f"{key}={value}" for key, value in found.changes.items()))
    assert again.total == pytest.approx(found.time.total) and again.gpus == found.time.gpus
    assert again.total < sum(again.phases.values()), "sampling and training overlap"


def test_the_page_says_that_times_are_estimates_and_on_what_they_stand() -> None:
    page = page_of("machine=8xH100-80GB")
    assert "estimated and not measured" in page and "65% in products of matrices" in page and "NVIDIA H100 data sheet" in page
    assert (
        "512 tokens on average (50% of the longest)" in page and "fastest one_step_off: trainer.schedule=one_step_off" in page
    )
    assert "schedules on these GPUs" not in page_of("machine=1xH200-141GB", f"{M}.path=Qwen/Qwen2.5-0.5B")


def test_lengths_come_from_a_runs_log(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    with (folder / "step_000001.jsonl").open("w") as file:
        for length in (50, 200, 50, 200):
            file.write(json.dumps({"response_length": length}) + "\n")
    assert words_of_lengths(tmp_path) == [
        "trainer.mean_response_length=125",
        "trainer.response_length_spread=0.6931",  # log 2
    ]
    with pytest.raises(DataError, match="no log of rollouts"):
        words_of_lengths(tmp_path / "none")


def test_engines_that_share_a_gpu_sample_faster_only_if_their_python_sets_the_pace() -> None:
    shared = [f"{R}.engines_per_device=2", f"{R}.kv_cache_memory_bytes={8 << 30}", f"{R}.n=64"]
    small, large = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-14B-Instruct")
    gains = {}
    for path in (small, large):
        alone, both = (timed("machine=8xH100-80GB", f"{M}.path={path}", *words) for words in ([f"{R}.n=64"], shared))
        gains[path] = alone.phases["sampling"] / both.phases["sampling"]
    assert gains[small] > 1.3 > gains[large]
