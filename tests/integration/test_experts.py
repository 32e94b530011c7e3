"""Models with experts on real FSDP2 ranks: the same training however the work is cut, replay, files, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import VOCAB, RankProcesses, actor_group, make_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import ActorSpec, PolicySpec

BATCHES = [make_batch(seed, one_prompt=True) for seed in (1, 2)]
KINDS = {
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True}),
    "olmoe": (OlmoeConfig, {"intermediate_size": 24}),
}


WHOLE = MicroBatchRule(None, 1000)


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    rule: MicroBatchRule = WHOLE
    share: bool = False
    recomputed: bool = False


ALONE = Layout()
LAYOUTS = {
    "1 rank, 12 micro-batches, recomputed": Layout(rule=MicroBatchRule(None, 1), recomputed=True),
    "1 rank, prompts shared": Layout(rule=MicroBatchRule(None, 6, shares_prompts=True), share=True),
    "2 ranks, 3 micro-batches each, prompts shared": Layout(2, MicroBatchRule(None, 2, shares_prompts=True), share=True),
    "2 ranks, by tokens, recomputed": Layout(2, MicroBatchRule(40, None), recomputed=True),
}
BALANCED = Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.1, router_aux_loss_coef=0.5)
TWO_PASSES = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2)


@pytest.fixture(scope="module", params=[pytest.param("qwen3_moe", marks=pytest.mark.campaign), "olmoe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 2 layers with 5 experts each: 2 ranks have 3 and 2 of them."""
    kind, own = KINDS[request.param]
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(kind(**{**sizes, **own}), dtype=torch.float32).save_pretrained(folder)
    return folder


def spec_for(path: Path, layout: Layout, objective: Objective, *, replays: bool = False, lr: float = 1e-5) -> ActorSpec:
    model = ModelConfig(path=str(path), enable_gradient_checkpointing=layout.recomputed)
    policy = PolicySpec(model, temperature=0.9, dtype="float32", train=True, share_prompts=layout.share)
    return ActorSpec(policy, objective, OptimConfig(lr=lr, clip_grad=1e6), 100, seed=1, replays_routing=replays)


@dataclass(frozen=True)
class Trained:
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    metrics: list[Metrics]


def start(ranks: dict[int, RankProcesses], spec: ActorSpec, layout: Layout, config: ActorConfig) -> tuple[RankProcesses, Any]:
    processes = ranks[layout.ranks]
    processes.build(spec)
    updates = config.ppo_epochs * -(-4 // config.ppo_mini_batch_size)
    return processes, actor_group(processes, config, layout.rule, spec.objective, updates_per_step=updates)


def train(
    ranks: dict[int, RankProcesses],
    path: Path,
    layout: Layout,
    objective: Objective = BALANCED,
    config: ActorConfig | None = None,
    batches: list[Batch] = BATCHES,
    *,
    replays: bool = False,
    restarts: bool = False,
    lr: float = 1e-5,
) -> Trained:
    """Train on the batches. `restarts`: new processes take the ranks' places between old log-probs and update."""
    spec = spec_for(path, layout, objective, replays=replays, lr=lr)
    processes, actor = start(ranks, spec, layout, config or ActorConfig())
    metrics = []
    for batch in batches:
        old = actor.old_logprobs(batch)
        if restarts:
            processes.build(spec)
        metrics.append(actor.update(old))
    return Trained(processes.call("gradients")[0], processes.call("parameters")[0], metrics)


def assert_same(one: Trained, other: Trained) -> None:
    largest = max(float(gradient.abs().max()) for gradient in one.gradients[0].values())
    assert largest > 1e-3, "without gradients this comparison would see nothing"
    for name, gradient in one.gradients[0].items():
        torch.testing.assert_close(other.gradients[0][name], gradient, atol=1e-6 * largest, rtol=0, msg=name)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(other.parameters[name], parameter, atol=1e-6, rtol=0, msg=name)
    for ours, theirs in zip(one.metrics, other.metrics, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], path: Path) -> Trained:
    return train(ranks, path, ALONE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_with_the_auxiliary_loss_do_not_depend_on_the_layout(ranks, path, alone, layout):
    assert_same(alone, train(ranks, path, LAYOUTS[layout]))


def test_the_auxiliary_loss_is_in_the_gradient_and_its_metrics_are_there(ranks, path, alone):
    without = train(ranks, path, ALONE, Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.1), batches=BATCHES[:1])
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
        return train(ranks, path, layout, BALANCED, TWO_PASSES, BATCHES[:1], replays=replays, lr=3e-3)

    one, free = trained(ALONE), trained(ALONE, replays=False)
    assert one.metrics[0]["actor/router/changed"] > 0.01, "nothing to replay: the routers have not moved"
    # The first step's experts are the old ones either way; later steps' are only with replay.
    name = "lm.model.layers.0.mlp.experts.down_proj"
    assert float((one.gradients[0][name] - free.gradients[0][name]).abs().max()) < 1e-6
    assert float((one.gradients[-1][name] - free.gradients[-1][name]).abs().max()) > 1e-5
    other = trained(LAYOUTS[layout])
    for step, gradients in enumerate(one.gradients):
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            # Later steps start from weights that AdamW moved by noise where a gradient is 0 up to rounding.
            tolerance = (1e-6 if step == 0 else 1e-3) * largest
            torch.testing.assert_close(other.gradients[step][name], gradient, atol=tolerance, rtol=0, msg=name)


# ---- files ---------------------------------------------------------------------------------------------------


def test_ranks_read_their_experts_only_and_export_an_ordinary_folder(ranks, path, tmp_path):
    layout = LAYOUTS["2 ranks, by tokens, recomputed"]
    processes, actor = start(ranks, spec_for(path, layout, Objective(), lr=1e-2), layout, ActorConfig())
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
