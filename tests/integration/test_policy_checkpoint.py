"""A policy's checkpoint, written and read by real FSDP2 ranks: bit for bit, and by another number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from rank_processes import (
    ALONE,
    Layout,
    RankProcesses,
    actor_group,
    assert_close,
    assert_equal_bits,
    make_batch,
    make_model,
    state,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_rl.algos.objective import Objective
from grpo_rl.checkpoint.files import entry_of
from grpo_rl.checkpoint.tensors import Shards
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.errors import CheckpointError
from grpo_rl.workers.specs import ActorSpec

BATCHES = [make_batch(seed) for seed in range(5)]
CONFIG = ActorConfig(ppo_mini_batch_size=2, shuffle=True)


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.campaign), False], ids=["tied", "untied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=request.param)


def spec_for(path: Path, layout: Layout = ALONE, **optim: Any) -> ActorSpec:
    """Dropout on, so that the random state matters; a rate that changes in every step, so that the schedule does; a moving average."""
    objective = Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.01)
    spec = rank_processes.spec_for(path, layout, objective, override_config={"attention_dropout": 0.2})
    settings = {"lr": 1e-3, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine", **optim}
    return replace(spec, optim=OptimConfig(**settings), total_optimizer_steps=12, seed=3, ema_decay=0.9)


def start(processes: RankProcesses, spec: ActorSpec) -> Any:
    processes.build(spec)
    return actor_group(processes, CONFIG, MicroBatchRule(None, 2), spec.objective)


def update(actor: Any, numbers: range) -> list[dict[str, float]]:
    return [actor.update(actor.old_logprobs(BATCHES[number])) for number in numbers]


@pytest.fixture(scope="module")
def saved(ranks: dict[int, RankProcesses], path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder that 2 ranks wrote after 3 batches, and the state that they had then."""
    folder = tmp_path_factory.mktemp("checkpoint")
    actor = start(ranks[2], spec_for(path))
    update(actor, range(3))
    actor.save(folder)
    assert len(set(ranks[2].call("next_random"))) == 2, "every rank draws numbers of its own"
    return folder, (state(ranks[2]), ranks[2].call("schedule"))


REPLICAS = Layout(4, shard_ranks=2)


@pytest.mark.parametrize("layout", [ALONE, Layout(2), REPLICAS], ids=["1", "2", "2 x 2"])
def test_weights_moments_and_schedule_come_back_bit_for_bit_in_any_layout(ranks, path, saved, layout):
    folder, (before, schedules) = saved
    processes = ranks[layout.ranks]
    actor = start(processes, spec_for(path, layout))
    actor.load(folder)
    assert_equal_bits(before, state(processes))
    assert processes.call("schedule") == schedules[:1] * layout.ranks
    assert (actor.version, actor.num_shuffles) == (3, 3)


def test_of_replicas_the_first_alone_writes_what_comes_back_in_another_layout(ranks, path, saved, tmp_path):
    folder, (before, _) = saved
    start(ranks[4], spec_for(path, REPLICAS)).load(folder)
    ranks[4].call("save", str(tmp_path))
    weights = [next(name for name in written if name.startswith("weights")) for written in ranks[4].call("saved", 0.0)]
    with Shards([tmp_path / name for name in weights[2:]]) as shards:
        assert not shards.shapes
    expected = ranks[4].call("save_bytes")
    start(ranks[2], spec_for(path, Layout(2)))
    ranks[2].call("load", str(tmp_path))
    assert_equal_bits(before, state(ranks[2]))
    assert sum(ranks[2].call("save_bytes")) == sum(expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit_with_dropout_and_shuffling(ranks, path, tmp_path, world_size):
    processes = ranks[world_size]
    actor = start(processes, spec_for(path))
    update(actor, range(2))
    actor.save(tmp_path)
    expected_metrics = update(actor, range(2, 4))
    expected = state(processes)

    actor = start(processes, spec_for(path))
    update(actor, range(4, 5))
    actor.old_logprobs(BATCHES[4])  # leaves whole copies of the weights, which loading has to drop
    actor.load(tmp_path)
    assert update(actor, range(2, 4)) == expected_metrics
    assert_equal_bits(expected, state(processes))


def test_the_weights_file_is_the_trained_model_by_its_hugging_face_names(ranks, path, saved, tmp_path):
    folder, (before, _) = saved
    actor = start(ranks[2], spec_for(path))
    actor.load(folder)
    actor.export(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    named = {f"lm.{name}": parameter.detach() for name, parameter in exported.named_parameters()}
    assert_equal_bits({name: before[name] for name in named}, named)
    shards = [load_file(folder / f"weights_rank{rank}.safetensors") for rank in range(2)]
    assert named.keys() == shards[0].keys() == shards[1].keys()
    whole = {name: torch.cat([shard[name] for shard in shards]) for name in named}
    assert_equal_bits(whole, named)


def test_a_checkpoint_of_another_model_is_refused(ranks, path, saved, tmp_path):
    folder, _ = saved
    tied = json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    other = make_model(tmp_path, tied=not tied)
    actor = start(ranks[1], spec_for(other))
    before = ranks[1].call("parameters")[0]
    with pytest.raises(CheckpointError, match=r"holds another model: (missing|.*unknown) \['lm.lm_head.weight'\]"):
        actor.load(folder)
    assert_equal_bits(before, ranks[1].call("parameters")[0])


def test_what_is_saved_in_the_background_is_the_state_of_the_moment_it_began(ranks, path, tmp_path):
    """Training goes on at once, and the files are those that a save at that moment writes."""
    at_once, meanwhile = tmp_path / "at_once", tmp_path / "meanwhile"
    at_once.mkdir()
    meanwhile.mkdir()
    actor = start(ranks[2], spec_for(path))
    update(actor, range(2))
    actor.save(at_once)
    expected = actor.saved(0.0)
    actor.save(meanwhile, in_background=True)
    update(actor, range(2, 4))
    while (found := actor.saved(1.0)) is None:
        pass
    assert found == expected == {path.name: entry_of(meanwhile / path.name) for path in meanwhile.iterdir()}
    assert sorted(found) == sorted(
        [f"{kind}_rank{rank}.safetensors" for kind in ("weights", "optimizer", "rng") for rank in range(2)]
        + ["training.json", "actor.json"]
    )


def test_a_loss_that_is_not_finite_on_one_rank_is_left_out_by_both(ranks, path):
    processes = ranks[2]
    actor = start(processes, spec_for(path))
    update(actor, range(1))
    before = state(processes), processes.call("schedule"), processes.call("next_random")
    for rank, fault in ((1, "actor.update.loss:nan@micro_batch=0,rank=1"), (0, "")):
        processes.call("arm", fault)
        [metrics] = update(actor, range(1, 2))
        assert metrics["actor/nonfinite"] == rank
        if rank:
            assert_equal_bits(before[0], state(processes))
            assert before[1] == processes.call("schedule")
    assert not all(torch.equal(value, before[0][name]) for name, value in state(processes).items())


def test_a_save_that_fails_in_the_background_is_told_when_it_is_asked_for(ranks, path, tmp_path):
    actor = start(ranks[2], spec_for(path))
    actor.save(tmp_path, in_background=True)
    while actor.saved(1.0) is None:
        pass
    # The same names again: nothing that is there is ever written over.
    (tmp_path / "actor.json").unlink()
    actor.save(tmp_path, in_background=True)
    with pytest.raises(CheckpointError, match=r"cannot write .*: File exists; it needs .* MiB, .* are free there"):
        while actor.saved(1.0) is None:
            pass


def test_muon_takes_the_same_steps_on_any_number_of_ranks_and_goes_on_bit_for_bit(ranks, path, tmp_path):
    spec = spec_for(path, optimizer="muon", betas=[0.95, 0.999])
    spec = replace(spec, policy=replace(spec.policy, model=ModelConfig(path=str(path))))
    weights = {}
    for world_size in (1, 2, 4):
        actor = start(ranks[world_size], spec)
        update(actor, range(3))
        if world_size == 2:
            actor.save(tmp_path)
        update(actor, range(3, 4))
        weights[world_size] = ranks[world_size].call("parameters")[0]
    for world_size in (2, 4):
        assert_close(weights[world_size], weights[1], 1e-6)
    actor = start(ranks[2], spec)
    actor.load(tmp_path)
    update(actor, range(3, 4))
    assert_equal_bits(weights[2], ranks[2].call("parameters")[0])
