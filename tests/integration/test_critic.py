"""PPO with a critic: the same values and gradients however the work is cut, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses, assert_close, largest, make_batch, make_model
from torch import Tensor

from grpo_rl.cluster.roles.trained_roles import CriticRole
from grpo_rl.columns import values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ModelConfig, OptimConfig
from grpo_rl.types import Batch
from grpo_rl.workers.specs import CriticSpec, PolicySpec

pytestmark = pytest.mark.timeout(1080)
WHOLE = MicroBatchRule(None, 1000)
LAYOUTS = {
    "1 rank, 12 micro-batches": (1, MicroBatchRule(None, 1), False),
    "2 ranks, 3 micro-batches each, recomputed": (2, MicroBatchRule(None, 2), True),
    "2 ranks, by tokens": (2, MicroBatchRule(40, None), False),
    "2 ranks that split sequences": (2, MicroBatchRule(None, 4, sequence_ranks=2), False),
    "2 x 2 ranks that split sequences": (4, MicroBatchRule(None, 4, sequence_ranks=2), False),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


def critic(processes: RankProcesses, model: Path, rule: MicroBatchRule, recompute: bool, lr: float = 1e-4) -> CriticRole:
    spec = CriticSpec(
        PolicySpec(
            ModelConfig(str(model), enable_gradient_checkpointing=recompute),
            1.0,
            "float32",
            train=True,
            sequence_ranks=rule.sequence_ranks,
        ),
        OptimConfig(lr=lr, clip_grad=1e6),
        total_optimizer_steps=100,
        seed=1,
        cliprange_value=0.05,
    )
    processes.build(spec)
    return CriticRole(processes, rule=rule, mini_batch_size=2, epochs=2)


def with_returns(seed: int) -> Batch:
    batch = make_batch(seed)
    return batch.replace(returns_T=1.0 + torch.sin(7 * batch.rollout_logprobs_T))


def learn(worker_group: CriticRole, batches: list[Batch]) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Values before each batch's update, and its metrics."""
    found, metrics = [], []
    for batch in batches:
        batch = worker_group.values(batch)
        found.append(values(batch.values_T))
        metrics.append(worker_group.update(batch.keep(batch.rollout_logprobs_T > -2.5)))
    return found, metrics


def test_values_gradients_and_parameters_do_not_depend_on_the_layout(ranks, model):
    batches = [with_returns(seed) for seed in (1, 2)]
    before, metrics = learn(critic(ranks[1], model, WHOLE, False), batches)
    gradients, parameters = ranks[1].call("gradients")[0], ranks[1].call("parameters")[0]
    assert len(gradients) == 8 and not before[0].any() and float(before[1].abs().max()) > 1e-3
    # The body learns from the second step on: the head was 0 in the first.
    assert float(gradients[1]["lm.layers.0.mlp.up_proj.weight"].abs().max()) > 0
    assert "lm.lm_head.weight" not in parameters
    for name, (size, rule, recompute) in LAYOUTS.items():
        other_values, other_metrics = learn(critic(ranks[size], model, rule, recompute), batches)
        for ours, theirs in zip(before, other_values, strict=True):
            torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0, msg=name)
        first = ranks[size].call("gradients")[0][0]
        assert_close(first, gradients[0], 1e-6 * largest(gradients[0]), name)
        # AdamW makes a step of the size of lr if a gradient is 0 up to rounding.
        assert_close(ranks[size].call("parameters")[0], parameters, 2e-4, name)
        for ours, theirs in zip(metrics, other_metrics, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-4), name


def test_a_critic_learns_the_returns_and_says_so(ranks, model):
    batches = [with_returns(1)] * 12
    _, metrics = learn(critic(ranks[1], model, WHOLE, False, lr=3e-3), batches)
    assert metrics[0]["critic/vf_explained_var"] == 0.0 and metrics[0]["critic/values/mean"] == 0.0
    assert metrics[-1]["critic/vf_explained_var"] > 0.5
    assert metrics[-1]["critic/vf_loss"] < 0.5 * metrics[0]["critic/vf_loss"]
    # A step of 0.05 is soon taken at this rate.
    assert metrics[0]["critic/vf_clipfrac"] > 0


def test_the_critics_state_survives_another_number_of_ranks(ranks, model, tmp_path):
    one = critic(ranks[1], model, WHOLE, False)
    learn(one, [with_returns(1)])
    one.save(tmp_path)
    expected, _ = learn(one, [with_returns(2), with_returns(3)])
    two = critic(ranks[2], model, MicroBatchRule(None, 2), False)
    two.load(tmp_path)
    found, metrics = learn(two, [with_returns(2), with_returns(3)])
    for ours, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    assert metrics[-1]["critic/lr"] == 1e-4
