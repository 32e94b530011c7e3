"""Pairs trained by the actor's ranks: the same gradient however the work is cut, and the one that a plain loop has."""

from __future__ import annotations

import pytest
import torch
from rank_processes import RankProcesses, make_pairs
from test_layout_invariance import ALONE, Layout, Trained, assert_same, train

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig

NUM_PAIRS = 5
LAYOUTS = {
    "1 rank, a pair at a time": Layout(rule=MicroBatchRule(None, 1), chunk_tokens=4),
    "1 rank, 2 micro-batches": Layout(rule=MicroBatchRule(None, 6), checkpointing=True),
    "2 ranks, a pair at a time": Layout(2, MicroBatchRule(None, 2)),
    "2 ranks, by tokens": Layout(2, MicroBatchRule(70, None), chunk_tokens=7),
}
OBJECTIVES = {
    "dpo": Objective("dpo", "seq-mean-token-mean", loss_options=(("beta", 0.5), ("label_smoothing", 0.1))),
    "ipo": Objective("ipo", "prompt-mean", loss_options=(("length_normalised", True),)),
    "dpo_hinge": Objective("dpo_hinge", "prompt-mean"),
    "simpo": Objective("simpo", "seq-mean-token-mean"),
    "orpo": Objective("orpo", "seq-mean-token-mean"),
    "kto": Objective("kto", "seq-mean-token-mean", loss_options=(("beta", 0.5), ("undesirable_weight", 2.0))),
}


BATCHES = [make_pairs(seed, NUM_PAIRS).replace(margins_N=None) for seed in (1, 2)]


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], path) -> dict[str, Trained]:
    return {name: train(ranks, path, ALONE, objective, BATCHES) for name, objective in OBJECTIVES.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (i + j) % 2 == 0 else pytest.mark.campaign)
        for i, name in enumerate(OBJECTIVES)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_gradients_of_pairs_do_not_depend_on_the_layout(ranks, path, alone, name, layout):
    assert_same(alone[name], train(ranks, path, LAYOUTS[layout], OBJECTIVES[name], BATCHES))


def test_mini_batches_are_numbers_of_pairs(ranks, path):
    config = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    one = train(ranks, path, ALONE, OBJECTIVES["dpo"], BATCHES[:1], config)
    assert len(one.gradients) == 2 * 3
    assert_same(one, train(ranks, path, Layout(2, MicroBatchRule(None, 2)), OBJECTIVES["dpo"], BATCHES[:1], config))


def test_the_first_gradient_is_that_of_a_plain_loop_over_pairs(path, alone):
    """The model in one process, a forward pass per response, log-softmax, and the loss as the paper writes it."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = BATCHES[0]
    assert batch.chosen_N is not None and batch.ref_logprobs_T is not None
    ids = batch.token_ids_S.split(batch.sequence_lengths_N.tolist())
    ref = batch.ref_logprobs_T.double().split(batch.trained_lengths_N.tolist())
    ratios = []
    for n, tokens in enumerate(ids):
        start = int(batch.prompt_lengths_N[n])
        logits = lm(tokens[None]).logits[0, start - 1 : -1] / 0.9
        own = torch.log_softmax(logits, dim=-1).gather(1, tokens[start:, None])[:, 0]
        ratios.append((own.double() - ref[n]).sum())
    losses = []
    for group in batch.group_N.unique().tolist():
        first, second = (batch.group_N == group).nonzero()[:, 0].tolist()
        better, worse = (first, second) if bool(batch.chosen_N[first]) else (second, first)
        h = 0.5 * (ratios[better] - ratios[worse])
        losses.append(-0.9 * torch.log(torch.sigmoid(h)) - 0.1 * torch.log(torch.sigmoid(-h)))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert alone["dpo"].metrics[0]["actor/loss"] == pytest.approx(loss.item(), rel=1e-6)
    gradients = {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in alone["dpo"].gradients[0].items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-6 * largest, rtol=0, msg=name)


def test_implicit_rewards_are_logged(alone):
    metrics = alone["dpo"].metrics[0]
    assert metrics["actor/reward_margin"] == pytest.approx(metrics["actor/reward_chosen"] - metrics["actor/reward_rejected"])
    assert 0 <= metrics["actor/reward_accuracy"] <= 1
    assert metrics["actor/logprob_chosen"] < 0
