"""The end of every phase of an actor rank, as on a GPU: what it loads, and what it has given back. Real FSDP2 over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from rank_processes import Layout, RankProcesses, actor_group, assert_equal_bits, make_batch, make_model

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.types import Batch
from grpo_rl.workers.specs import ActorSpec, PolicySpec, SenderSpec

IN = ["weights to device", "moments to device"]
OUT = ["weights to host", "moments to host"]


class Phases(RankProcesses):
    """The ranks, of which each call notes its moves."""

    noted: dict[str, tuple[list[str], list[str]]]

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        if method in ("update", "logprobs"):
            answers = self._send("answer_and_moves", [(method, *some) for some in arguments])
            self.noted[method] = answers[0][1]
            return [answer for answer, _ in answers]
        return super().call_each(method, arguments)

    call_for_two = call_each


def spec_of(path: Path, dtype: str | None = None, **offload: bool) -> ActorSpec:
    model = ModelConfig(path=str(path), enable_gradient_checkpointing=True)
    policy = PolicySpec(model, temperature=1.0, dtype="float32", train=True)
    sender = SenderSpec(dtype=dtype, bucket_bytes=4096)
    return ActorSpec(policy, Objective(), OptimConfig(lr=1e-3), 100, seed=1, sender=sender, **offload)


def train(processes: RankProcesses, spec: ActorSpec, batches: list[Batch], *, as_on_a_gpu: bool) -> dict[str, torch.Tensor]:
    processes.build(spec)
    if as_on_a_gpu:
        processes.call("as_on_a_gpu")
    config = ActorConfig(ppo_mini_batch_size=2)
    actor = actor_group(processes, config, MicroBatchRule(None, 3), Objective(), updates_per_step=2)
    for batch in batches:
        actor.update(actor.old_logprobs(batch))
    return processes.call("parameters")[0]


BATCHES = [make_batch(seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def phases() -> Any:
    made = {size: Phases(size) for size in (1, 2)}
    for processes in made.values():
        processes.noted = {}
    yield made
    for processes in made.values():
        processes.shutdown()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_phases_load_what_they_read_and_end_with_shards_only(phases, tmp_path, size, tied):
    path = make_model(tmp_path, tied=tied)
    offloaded = spec_of(path, param_offload=True, optimizer_offload=True)
    there = train(phases[size], replace(offloaded, param_offload=False, optimizer_offload=False), BATCHES, as_on_a_gpu=False)
    moved = train(phases[size], offloaded, BATCHES, as_on_a_gpu=True)
    noted = phases[size].noted
    assert noted["logprobs"] == ([IN[0], *OUT], []), "a pass without gradients reads no optimizer state"
    assert noted["update"] == ([*IN, *OUT], []), "nothing is left whole, and nothing waits for the weight transfer"
    assert phases[size].call("same_objects") == [True] * size
    assert_equal_bits(there, moved)


def test_a_weight_transfer_loads_nothing_and_casts_before_it_gathers(phases, tmp_path):
    phases[2].build(spec_of(make_model(tmp_path, tied=True), "bfloat16", param_offload=True, optimizer_offload=True))
    phases[2].call("as_on_a_gpu")
    travelled, types = phases[2].call("sends_weights")[0]
    assert travelled == ["torch.bfloat16"] and types == ["bfloat16"]
    assert phases[2].call("moves_of", "begin_weight_sync")[0] == ([], [])
    assert phases[2].call("moves_of", "end_weight_sync")[0] == (OUT, [])


def test_an_engine_gets_the_device_for_itself_and_ranks_come_back_as_they_were(phases, tmp_path):
    path = make_model(tmp_path, tied=True)
    train(phases[2], spec_of(path), BATCHES[:1], as_on_a_gpu=True)
    before = phases[2].call("parameters")[0]
    assert phases[2].call("moves_of", "vacate")[0] == (OUT, [])
    assert phases[2].call("moves_of", "occupy")[0] == (IN, [])
    assert_equal_bits(before, phases[2].call("parameters")[0])
    phases[2].build(spec_of(path, param_offload=True, optimizer_offload=True))
    phases[2].call("as_on_a_gpu")
    assert phases[2].call("moves_of", "occupy")[0] == ([], []), "what is kept in host memory stays there"


@pytest.mark.parametrize("size", [1, 2])
def test_steps_in_host_memory_are_the_same_to_the_last_bit_and_no_phase_moves_anything(phases, path, size):
    plain = Layout(size, MicroBatchRule(None, 2))
    specs = [rank_processes.spec_for(path, replace(plain, in_host_memory=there), Objective()) for there in (False, True)]
    one, two = (rank_processes.train(phases, spec, plain, BATCHES) for spec in specs)
    assert_equal_bits(one.parameters, two.parameters)
    assert one.metrics == two.metrics
    assert phases[size].call("same_objects") == [True] * size, (
        "the optimizer's parameters are the model's, head and embedding one"
    )
    assert phases[size].call("offloads_and_moves") == [(True, 0)] * size
    phases[size].build(specs[0])
    ((offloads, moves), *_) = phases[size].call("offloads_and_moves")
    assert not offloads and moves >= 4
