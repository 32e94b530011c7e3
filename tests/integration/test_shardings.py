"""Where parameters lie: replicas of shards, host memory, layers gathered early. The same training as plainly sharded, over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rank_processes import actor_group, make_batch
from test_layout_invariance import ALONE, Layout, Trained, assert_same, grpo, several_turns, spec_for, train

from grpo_rl.checkpoint.tensors import Shards
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig

PAIRS = MicroBatchRule(None, 2)
REPLICAS = Layout(4, PAIRS, checkpointing=True, shard_ranks=2)
BATCHES = [make_batch(1), several_turns(2)]


@pytest.fixture(scope="module")
def alone(ranks, path) -> Trained:
    return train(ranks, path, ALONE, grpo("token-mean"), BATCHES)


@pytest.mark.parametrize(
    "layout",
    [
        REPLICAS,
        Layout(4, PAIRS, shard_ranks=1),
        Layout(4, replace(PAIRS, sequence_ranks=2), shard_ranks=2),
        Layout(2, PAIRS, in_host_memory=True, checkpointing=True),
        Layout(4, PAIRS, in_host_memory=True, shard_ranks=2, prefetch=True),
    ],
    ids=["2 x 2", "4 replicas", "2 x 2, sequences split", "host memory", "all together"],
)
def test_it_trains_like_one_rank(ranks, path, alone, layout):
    assert_same(alone, train(ranks, path, layout, grpo("token-mean"), BATCHES))


@pytest.mark.parametrize("size", [1, 2])
def test_steps_in_host_memory_are_the_same_to_the_last_bit(ranks, path, size):
    plain = Layout(size, PAIRS)
    one, two = (
        train(ranks, path, layout, grpo("token-mean"), BATCHES) for layout in (plain, replace(plain, in_host_memory=True))
    )
    for name, parameter in one.parameters.items():
        assert torch.equal(two.parameters[name], parameter), name
    assert one.metrics == two.metrics
    assert ranks[size].call("same_objects") == [True] * size, (
        "the optimizer's parameters are the model's, head and embedding one"
    )
    assert ranks[size].call("offloads_and_moves") == [(True, 0)] * size
    ranks[size].build(spec_for(path, plain, grpo("token-mean"), 1e6))
    ((offloads, moves), *_) = ranks[size].call("offloads_and_moves")
    assert not offloads and moves >= 4


def test_a_checkpoint_goes_from_layout_to_layout(ranks, path, alone, tmp_path):
    """Saved by 2 x 2 ranks, loaded and saved by 4, loaded by 2: the same parameters, moments and schedule to the last bit."""
    seen = []
    for number, layout in enumerate((REPLICAS, Layout(4, PAIRS), Layout(2, PAIRS), REPLICAS)):
        processes = ranks[layout.ranks]
        processes.build(spec_for(path, layout, grpo("token-mean"), 1e6))
        if number == 0:
            actor = actor_group(processes, ActorConfig(), layout.rule, grpo("token-mean"))
            actor.update(actor.old_logprobs(BATCHES[0]))
        else:
            processes.call("load", str(tmp_path / str(number - 1)))
        folder = tmp_path / str(number)
        folder.mkdir()
        processes.call("save", str(folder))
        files = processes.call("saved", 0.0)
        bytes_saved = sum(processes.call("save_bytes"))
        seen.append((processes.call("parameters")[0], processes.call("moments")[0], processes.call("schedule")[0], bytes_saved))
        if layout is REPLICAS:
            weights = [next(name for name in written if name.startswith("weights")) for written in files]
            with Shards([folder / name for name in weights[2:]]) as shards:
                assert not shards.shapes, "the second replica writes nothing that the first has written"
    first = seen[0]
    assert all(bool(moment.abs().max() > 0) for name, moment in first[1].items() if name.startswith("exp_avg_sq"))
    for other in seen[1:]:
        for ours, theirs in zip(first[:2], other[:2], strict=True):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert torch.equal(theirs[name], tensor), name
        assert other[2:] == first[2:]
