"""Models with experts on real FSDP2 ranks: the same training however the work is cut, replay, files, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import (
    ALONE,
    SIZES,
    Layout,
    RankProcesses,
    Trained,
    actor_group,
    assert_close,
    assert_same,
    largest,
    make_batch,
    spec_for,
    train,
)
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, OptimConfig

BATCHES = [make_batch(seed, one_prompt=True) for seed in (1, 2)]
KINDS = {
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 24, "norm_topk_prob": True}),
    "olmoe": (OlmoeConfig, {"intermediate_size": 24}),
}


LAYOUTS = {
    "1 rank, 12 micro-batches, recomputed": Layout(rule=MicroBatchRule(None, 1), checkpointing=True),
    "1 rank, prompts shared": Layout(rule=MicroBatchRule(None, 6, shares_prompts=True), share=True),
    "2 ranks, 3 micro-batches each, prompts shared": Layout(2, MicroBatchRule(None, 2, shares_prompts=True), share=True),
    "2 ranks, by tokens, recomputed": Layout(2, MicroBatchRule(40, None), checkpointing=True),
}
BALANCED = Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.1, router_aux_loss_coef=0.5)
TWO_PASSES = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2)


@pytest.fixture(scope="module", params=[pytest.param("qwen3_moe", marks=pytest.mark.campaign), "olmoe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 2 layers with 5 experts each: 2 ranks have 3 and 2 of them."""
    kind, own = KINDS[request.param]
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(
        kind(**SIZES | own | {"num_experts": 5, "num_experts_per_tok": 2}), dtype=torch.float32
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], path: Path) -> Trained:
    return train(ranks, spec_for(path, ALONE, BALANCED), ALONE, BATCHES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_with_the_auxiliary_loss_do_not_depend_on_the_layout(ranks, path, alone, layout):
    assert_same(alone, train(ranks, spec_for(path, LAYOUTS[layout], BALANCED), LAYOUTS[layout], BATCHES))


def test_the_auxiliary_loss_is_in_the_gradient_and_its_metrics_are_there(ranks, path, alone):
    unbalanced = replace(BALANCED, router_aux_loss_coef=0.0)
    without = train(ranks, spec_for(path, ALONE, unbalanced), ALONE, BATCHES[:1])
    gate = "lm.model.layers.0.mlp.gate.weight"
    assert float((alone.gradients[0][gate] - without.gradients[0][gate]).abs().max()) > 1e-3
    found = alone.metrics[0]
    assert found["actor/router/aux_loss"] > 2 and "actor/router/aux_loss" not in without.metrics[0]
    assert 1 <= found["actor/router/load_max"] <= 2.5
    assert 0 < found["actor/router/entropy"] < 1.61
    assert 0 <= found["actor/router/idle_experts"] < 1


@pytest.mark.parametrize("layout", ["1 rank, prompts shared", "2 ranks, 3 micro-batches each, prompts shared"])
def test_replayed_experts_train_alike_in_every_layout(ranks, path, layout):
    def trained(layout: Layout, *, replays: bool = True) -> Trained:
        optim = OptimConfig(lr=3e-3, clip_grad=1e6)
        spec = replace(spec_for(path, layout, BALANCED), replays_routing=replays, optim=optim)
        return train(ranks, spec, layout, BATCHES[:1], TWO_PASSES)

    one, free = trained(ALONE), trained(ALONE, replays=False)
    assert one.metrics[0]["actor/router/changed"] > 0.01, "nothing to replay: the routers have not moved"
    # The first step's experts are the old ones either way; later steps' are only with replay.
    name = "lm.model.layers.0.mlp.experts.down_proj"
    assert float((one.gradients[0][name] - free.gradients[0][name]).abs().max()) < 1e-6
    assert float((one.gradients[-1][name] - free.gradients[-1][name]).abs().max()) > 1e-5
    other = trained(LAYOUTS[layout])
    for step, gradients in enumerate(one.gradients):
        # Later steps start from weights that AdamW moved by noise if a gradient is 0 up to rounding.
        assert_close(other.gradients[step], gradients, (1e-6 if step == 0 else 1e-3) * largest(gradients))


def test_ranks_read_their_experts_only_and_export_an_ordinary_folder(ranks, path, tmp_path):
    layout = LAYOUTS["2 ranks, by tokens, recomputed"]
    processes, objective = ranks[layout.ranks], Objective()
    processes.build(replace(spec_for(path, layout, objective), optim=OptimConfig(lr=1e-2, clip_grad=1e6)))
    actor = actor_group(processes, ActorConfig(), layout.rule, objective, updates_per_step=1)
    plain = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for name, parameter in processes.call("parameters")[0].items():
        assert torch.equal(parameter, plain[name.removeprefix("lm.")]), name
    for read, held in processes.call("read_bytes"):
        assert 0 < read <= held
    actor.update(BATCHES[0])
    actor.export(tmp_path)
    trained = processes.call("parameters")[0]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, trained[f"lm.{name}"]), name
        assert not torch.equal(parameter, plain[name]), "every tensor was trained"
