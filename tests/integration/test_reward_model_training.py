"""A reward model that learns: the gradient of a plain loop however the work is cut, its checkpoints, its scores, its export."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses, assert_close, largest, make_batch, make_pairs
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from grpo_rl.cluster.roles.trained_roles import TrainedRewardModelRole
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import HeadOptimConfig, RewardModelTrainConfig
from grpo_rl.types import Batch
from grpo_rl.workers.specs import RewardModelSpec, TrainedRewardModelSpec

pytestmark = pytest.mark.timeout(600)
WHOLE = MicroBatchRule(None, 1000)
LAYOUTS = {
    "1 rank, one by one": (1, MicroBatchRule(None, 1), False),
    "1 rank, by tokens, recomputed": (1, MicroBatchRule(70, None), True),
    "2 ranks, two at a time": (2, MicroBatchRule(None, 2), False),
    "2 ranks, by tokens, recomputed": (2, MicroBatchRule(70, None), True),
}
CENTER_COEF = 0.05


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Path:
    """A folder with a head that is not 0: both head and body have a gradient from the first step on."""
    from transformers import Qwen3ForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(3)
    model = Qwen3ForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    return folder


def role_over(
    processes: RankProcesses, model: Path, loss: str, rule: MicroBatchRule = WHOLE, recompute: bool = False, lr: float = 1e-3
) -> TrainedRewardModelRole:
    optim = HeadOptimConfig(lr=lr, clip_grad=1e6)
    center = CENTER_COEF if loss == "bradley_terry" else 0.0
    train = RewardModelTrainConfig(loss, center, optim, enable_gradient_checkpointing=recompute)
    processes.build(TrainedRewardModelSpec(RewardModelSpec(str(model), "float32"), train, total_optimizer_steps=100, seed=1))
    return TrainedRewardModelRole(processes, rule=rule, pairs=loss == "bradley_terry")


def pairs(seed: int) -> Batch:
    """Ragged pairs with margins."""
    return make_pairs(seed, 4)


def steps(seed: int) -> Batch:
    """Sequences with some labelled tokens each, the first token of a sequence among them."""
    batch = make_batch(seed, num_groups=7, group_size=1)
    rows = (batch.trained_lengths_N > 0).nonzero()[:, 0]
    batch = batch.select(rows)
    batch = batch.keep(torch.arange(batch.num_trained_tokens) % 3 == 0)
    rows = (batch.trained_lengths_N > 0).nonzero()[:, 0]
    batch = batch.select(rows)
    return batch.replace(labels_T=torch.tensor([0.0, 1.0, 0.25])[torch.arange(batch.num_trained_tokens) % 3])


BATCHES = {"bradley_terry": pairs, "steps": steps}


def plain_loss(model: torch.nn.Module, batch: Batch, loss: str) -> Tensor:
    """The loss by transformers alone, one sequence after the other."""
    at, scores, ends = 0, [], (batch.sequence_lengths_N.cumsum(0) - batch.sequence_lengths_N).tolist()
    positions = batch.positions().split(batch.trained_lengths_N.tolist())
    for length, start, own in zip(batch.sequence_lengths_N.tolist(), ends, positions, strict=True):
        ids = batch.token_ids_S[at : at + length][None].long()
        at += length
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        every = model.score(hidden)[:, 0]
        scores.append(every[-1:] if loss == "bradley_terry" else every[own - start])
    if loss == "steps":
        return binary_cross_entropy_with_logits(torch.cat(scores), batch.labels_T)
    score_N, parts = torch.cat(scores), []
    for group in batch.group_N.unique().tolist():
        chosen = score_N[(batch.group_N == group) & batch.chosen_N]
        rejected = score_N[(batch.group_N == group) & ~batch.chosen_N]
        margin = batch.margins_N[batch.group_N == group][:1]
        parts.append(-logsigmoid(chosen - rejected - margin) + CENTER_COEF * (chosen + rejected) ** 2)
    return torch.cat(parts).mean()


def whole_model(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3ForSequenceClassification

    return Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("loss", BATCHES)
def test_the_gradient_is_that_of_a_plain_loop_in_every_layout(ranks, classifier, loss):
    batch, plain = BATCHES[loss](7), whole_model(classifier)
    value = plain_loss(plain, batch, loss)
    value.backward()
    expected = {f"lm.{name}": parameter.grad for name, parameter in plain.named_parameters()}
    assert float(expected["lm.model.layers.0.mlp.up_proj.weight"].abs().max()) > 1e-3 * largest(expected)
    for name, (size, rule, recompute) in {"whole": (1, WHOLE, False), **LAYOUTS}.items():
        metrics = role_over(ranks[size], classifier, loss, rule, recompute).update(batch)
        assert metrics["reward_model/loss"] == pytest.approx(value.item(), abs=1e-6), name
        (gradients,) = ranks[size].call("gradients")[0]
        assert_close(gradients, expected, 1e-6 * largest(expected), name)


@pytest.mark.parametrize("loss", BATCHES)
def test_a_causal_model_gets_a_head_that_begins_at_0_and_learns(ranks, path, loss):
    batch, role = BATCHES[loss](3), role_over(ranks[2], path, loss, MicroBatchRule(70, None), lr=1e-2)
    assert not role.scores(batch).any()
    metrics = [role.update(batch) for _ in range(12)]
    labels = batch.labels_T
    if labels is None:
        margins_P = batch.margins_N[batch.chosen_N]
        assert metrics[0]["reward_model/loss"] == pytest.approx(float(-logsigmoid(-margins_P).mean()))
        assert metrics[0]["reward_model/accuracy"] == 0.0, "a tie is no success"
    else:
        assert metrics[0]["reward_model/loss"] == pytest.approx(math.log(2))
    assert metrics[-1]["reward_model/loss"] < 0.7 * metrics[0]["reward_model/loss"]
    assert metrics[-1]["reward_model/accuracy"] > 0.8


def test_the_state_survives_another_number_of_ranks(ranks, path, tmp_path):
    one = role_over(ranks[1], path, "bradley_terry")
    one.update(pairs(1))
    one.save(tmp_path)
    assert {path.parent.name for path in tmp_path.rglob("*.safetensors")} == {"reward_model"}
    expected = [one.update(pairs(seed))["reward_model/loss"] for seed in (2, 3)]
    two = role_over(ranks[2], path, "bradley_terry", MicroBatchRule(None, 2))
    two.load(tmp_path)
    assert [two.update(pairs(seed))["reward_model/loss"] for seed in (2, 3)] == pytest.approx(expected, abs=1e-5)


def test_scores_are_the_same_by_every_way_and_after_the_export(ranks, path, tmp_path):
    batch = pairs(5)
    role = role_over(ranks[2], path, "bradley_terry", MicroBatchRule(70, None), lr=1e-2)
    for seed in (1, 2):
        role.update(pairs(seed))
    scores_N = role.scores(batch)
    assert float(scores_N.std()) > 0.01
    whole = role._scored(batch)
    for _, block in ranks[2].call("scores", whole, [tuple(range(batch.num_rollouts))]):
        torch.testing.assert_close(torch.from_numpy(block["scores_T"]), scores_N, atol=1e-5, rtol=0)
    role.export(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {name for name, _ in whole_model(tmp_path).named_parameters()}
    ranks[1].build(RewardModelSpec(str(tmp_path), "float32"))
    ((_, block),) = ranks[1].call("scores", whole, [tuple(range(batch.num_rollouts))])
    torch.testing.assert_close(torch.from_numpy(block["scores_T"]), scores_N, atol=1e-5, rtol=0)
    # What was exported is continued if it is trained again, head included.
    continued = role_over(ranks[1], tmp_path, "bradley_terry")
    torch.testing.assert_close(continued.scores(batch), scores_N, atol=1e-5, rtol=0)
