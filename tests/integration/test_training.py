"""The whole program: Ray, a rollout engine, FSDP2 actors and a reference in processes of their own, from the command line."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_runs import RUN_TIMEOUT_S, Run, arithmetic, assert_trains_like_its_engine, train, without_ray, without_times

from grpo_rl import testing
from grpo_rl.commands.export import main as export
from grpo_rl.models import builtin
from grpo_rl.schedules import offline, sync

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)
# The engine hf starts in a second; what vLLM does with the same settings is tried in tests/integration/rollout.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as it was initialised: no warm start."""
    return builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")


STEPS = """
def halves(data_source, solution_str, ground_truth, extra_info):
    middle, end = len(solution_str) // 2, len(solution_str)
    ends = sorted({place for place in (middle, end) if place > 0})
    steps = [(place, len(set(solution_str[:place])) / 10) for place in ends]
    return {"score": sum(reward for _, reward in steps), "steps": steps}
"""


def assert_advantages_of_steps(rollouts: list[dict[str, Any]]) -> None:
    """The advantages in the log are those of the steps' rewards beside them."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in rollouts:
        groups[record["uid"]].append(record)
        assert all(end < record["response_length"] for end, _ in record["steps"])
        assert record["reward"] == pytest.approx(sum(reward for _, reward in record["steps"]))
    assert any(record["advantage"] for records in groups.values() for record in records)
    for records in groups.values():
        rewards = [reward for record in records for _, reward in record["steps"]]
        spread = statistics.stdev(rewards)
        for record in records:
            # The log holds the last token's: of the step that ends there, if one does.
            last = [reward for end, reward in record["steps"] if end == record["response_length"] - 1]
            expected = (last[0] - statistics.fmean(rewards)) / (spread + 1e-6) if last and spread else 0.0
            assert record["advantage"] == pytest.approx(expected, abs=1e-5)


def test_two_ranks_with_engines_of_their_own_train_rewards_of_steps_over_the_tokens_that_could_be_sampled(model, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    run = train(
        tmp_path,
        "apart",
        *arithmetic(model),
        "algorithm.adv_estimator=grpo_process",
        "reward.functions=[steps.py:halves]",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        "trainer.val_before_train=false",
        # Rollouts and what they were sampled from are cut and put together again.
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_epochs=2",
        f"{actor}.shuffle=true",
        f"{actor}.ppo_micro_batch_size_per_gpu=3",
        f"{actor}.kl_loss_type=full",
        f"{actor}.entropy_coeff=0.01",
        f"{rollout}.name=hf",
        f"{rollout}.kv_cache_gib=1.0",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=2",
        f"{rollout}.top_p=0.8",
        f"{rollout}.top_k=8",
        f"{rollout}.min_p=0.02",
        f"{rollout}.temperature=1.2",
        f"{rollout}.checkpoint_engine.verify_checksum=true",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=1",
        "trainer.device_tflops=1",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"{actor}.profiler.enable=true",
        f"{actor}.profiler.ranks=[1]",
    )
    assert_trains_like_its_engine(run, last=2)
    for step, row in run.steps.items():
        assert row["actor/ratio_max"] > 1.001, "later mini-batches are off-policy"
        assert row["actor/kl_loss"] > 0
        assert 1 <= row["rollout/support_mean"] <= 8
        assert 0 < row["actor/entropy"] < math.log(8), "the entropy is of the tokens that could be sampled"
        assert_advantages_of_steps(run.rollouts(step))
    roles = {log.name for log in run.path.glob("logs/*.log")} - {"console.log", "ray.log", "functions0.log", "reward-0.log"}
    assert roles == {f"{role}{rank}.log" for role in ("actor", "reference", "rollout") for rank in (0, 1)}
    assert_measured_and_traced(run)


def assert_measured_and_traced(run: Run) -> None:
    """The figures to tune by are in every step, and the traces those of the chosen step on the chosen rank."""
    for row in run.steps.values():
        phases = sum(seconds for key, seconds in row.items() if key.startswith("timing_s/") and key != "timing_s/step")
        assert 0 < phases <= 1.01 * row["timing_s/step"], "no second is in two phases"
        assert 0 < row["perf/mfu/actor"] == row["perf/tflops/actor"] < 1
        assert 0 < row["perf/mfu/ref"] < 1
        for role, phase in (("actor", "update"), ("ref", "logprobs"), ("rollout", "sampling")):
            assert 0.05 < row[f"perf/memory/{role}/{phase}/resident_gib"] < 8
    traces = {str(file.relative_to(run.path / "profile")): file for file in run.path.rglob("*.json.gz")}
    assert all(name.startswith("step_000002/actor1.") for name in traces)
    events = json.loads(gzip.decompress(traces["step_000002/actor1.update.json.gz"].read_bytes()))["traceEvents"]
    names = " ".join(str(event.get("name")) for event in events)
    assert all(one in names for one in ("actor1.update", "Backward", "Optimizer.step"))


def test_dapo_refills_every_batch_and_a_resumed_run_repeats_the_steps_of_one_that_was_not_interrupted(model, tmp_path):
    actor = "actor_rollout_ref.actor"
    words = [
        *arithmetic(model),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "ray_kwargs.ray_init.num_cpus=1"),
        *("data.train_batch_size=4", "trainer.total_training_steps=3", "trainer.save_at_end=true"),
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        f"{actor}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.hf.batched=false",
        "actor_rollout_ref.rollout.kv_cache_gib=1.0",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=odd",
        "data.gen_batch_size=2",
        "reward.functions=[my_reward.py:odd,my_reward.py:variety]",
        "reward.overlong_buffer.len=6",
        f"{actor}.clip_ratio_high=0.28",
        # State of every kind: prompts without use, dropout, a schedule, shuffled mini-batches, two steered coefficients.
        "data.retire_above=0.5",
        "data.retire_metric=odd",
        "actor_rollout_ref.model.override_config={attention_dropout: 0.1}",
        f"{actor}.optim.lr_warmup_steps=5",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.shuffle=true",
        f"{actor}.adaptive_entropy.enable=true",
        f"{actor}.adaptive_entropy.target=10",
        f"{actor}.use_kl_loss=false",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=1000",
        "algorithm.kl_ctrl.kl_coef=0.1",
    ]
    # Whose bits are those of a command in which each role has one thread.
    whole = without_ray(sync.train, tmp_path, "whole", *words)
    assert_trains_like_its_engine(whole, last=3)
    assert_refilled(whole)
    assert len({row["actor/reward_kl_penalty_coeff"] for row in whole.steps.values()}) == 3
    # A random model is far from 10 nats: the weight rises with every step.
    assert [row["actor/entropy_coeff"] for row in whole.steps.values()] == pytest.approx([0.0, 0.005, 0.01])
    assert whole.steps[3]["data/retired_fraction"] > 0
    in_checkpoint = AutoModelForCausalLM.from_pretrained(whole.path / "checkpoints" / "step_3" / "huggingface")
    assert all(torch.equal(value, in_checkpoint.state_dict()[name]) for name, value in whole.weights().items())

    # As if the process had been killed behind step 3: the checkpoint of step 2 is all that it can go on from.
    killed = shutil.copytree(whole.path, whole.path.with_name("resumed"))
    for lost in ("checkpoints/step_3", "model"):
        shutil.rmtree(killed / lost)
    resumed = train(tmp_path, killed.name, *words)
    assert "resumed from" in resumed.output and "at step 2" in resumed.output
    assert sorted(resumed.steps) == [1, 2, 3]
    assert resumed.steps[3]["time"] > whole.steps[3]["time"], "it was trained again"
    assert without_times(resumed.steps[3]) == pytest.approx(without_times(whole.steps[3]), rel=1e-5, abs=1e-7)
    ours, theirs = ([(r["uid"], r["sample"], r["response"], r["reward"]) for r in x.rollouts(3)] for x in (resumed, whole))
    assert ours == theirs
    for name, weight in whole.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def assert_refilled(run: Run) -> None:
    """Every batch has the first four groups with a signal, sampled two prompts at a time until there were as many."""
    assert max(row["filter_groups/num_gen_batches"] for row in run.steps.values()) > 2
    for step, row in run.steps.items():
        groups = defaultdict(list)
        for record in run.rollouts(step):
            groups[record["uid"]].append(record)
        live = [group for group in groups.values() if len({record["reward_parts"]["odd"] for record in group}) > 1]
        trained = [group for group in groups.values() if group[0]["advantage"] is not None]
        assert trained == live[:4] and len(trained) == 4
        assert len(groups) == 2 * row["filter_groups/num_gen_batches"]
        assert row["filter_groups/kept_fraction"] == pytest.approx(len(live) / len(groups))


def sft_words(model: Path, folder: Path) -> list[str]:
    """Words of a training on rows, which needs no engine."""
    rows = [{"prompt": [{"role": "user", "content": f"{number}+1="}], "response": str(number + 1)} for number in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(f"actor_rollout_ref.model.path={model}", f"data.train_files={folder}/rows.jsonl", "data.train_batch_size=4"),
        *("data.responses=rows", "actor_rollout_ref.actor.policy_loss.loss_mode=sft"),
    ]


def test_a_finished_run_says_so_goes_on_from_its_end_and_is_never_rewound_in_silence(model, tmp_path, monkeypatch):
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95}))
    words = sft_words(model, tmp_path)
    # Whose bits are those of the command.
    with testing.session(*words, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=3") as session:
        offline.train(session)
        session.actor.export(tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    first = train(tmp_path, "run", *words, "trainer.total_training_steps=2")
    assert [path.name for path in (first.path / "checkpoints").iterdir()] == ["step_2"]
    assert "saved at a stop and at the end (" in " ".join(first.output.split())
    began = time.monotonic()
    again = train(tmp_path, "run", *words, "trainer.total_training_steps=2")
    print(f"said after {time.monotonic() - began:.1f} s: {again.output!r}")
    assert again.output.startswith("step 2 of 2 is done") and "starting" not in again.output

    longer = train(tmp_path, "run", *words, "trainer.total_training_steps=3")
    assert "at step 2" in longer.output and sorted(longer.steps) == [1, 2, 3]
    assert all(torch.equal(weight, longer.weights()[name]) for name, weight in whole.items())
    shutil.rmtree(first.path / "checkpoints" / "step_3")
    refused = train(tmp_path, "run", *words, "trainer.total_training_steps=4", exit_code=2)
    assert "has ended with step 3, and its newest checkpoint is of step 2" in refused.output
    path = [f"trainer.resume_from_path={first.path}/checkpoints/step_2", "trainer.resume_mode=resume_path"]
    monkeypatch.setenv("GRPO_FAULT", "ckpt.call:enospc@call=rename,file=model")
    told = train(tmp_path, "run", *words, "trainer.total_training_steps=3", *path, "trainer.save_at_end=false", exit_code=4)
    assert (told.path / "earlier" / "1" / "model" / "model.safetensors").is_file() and "earlier/1" in told.output
    # A policy whose export fails is kept in a checkpoint that is named.
    assert f"cannot write {told.path}/model: No space left on device (injected); it needs" in told.output
    assert f"what was trained is in {told.path}/checkpoints/step_3" in told.output and not told.path.joinpath("model").exists()
    monkeypatch.delenv("GRPO_FAULT")
    assert export([f"{told.path}@3", "--output", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "model.safetensors").is_file()
