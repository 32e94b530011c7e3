"""Pairs trained by the actor's ranks: the same gradient however the work is cut, and the one that a plain loop has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rank_processes import VOCAB, RankProcesses, actor_group, make_batch, make_model
from test_layout_invariance import ALONE, Layout, Trained, assert_same, spec_for, train

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, OptimConfig
from grpo_rl.data.row_set import RowReport, TrainingRows
from grpo_rl.data.training_rows.pairs import Pair, pair_batch
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.rows.offline import measure
from grpo_rl.trainer.rows.reference_rows import ReferenceRows
from grpo_rl.types import Batch, Metrics

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
}


def pairs(seed: int) -> Batch:
    """Ragged pairs in any order, their chosen rollout before or after the rejected one."""
    batch = make_batch(seed, NUM_PAIRS + 2, group_size=2)
    empty_N = torch.isin(batch.group_N, batch.group_N[batch.trained_lengths_N == 0])
    generator = torch.Generator().manual_seed(seed)
    chosen_G = torch.randint(0, 2, (NUM_PAIRS + 2,), generator=generator)
    chosen_N = torch.arange(batch.num_rollouts) % 2 == chosen_G[batch.group_N]
    rows = (~empty_N).nonzero()[:, 0][: 2 * NUM_PAIRS]
    return batch.replace(chosen_N=chosen_N).select(rows[torch.randperm(len(rows), generator=generator)])


BATCHES = [pairs(seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def alone(ranks: dict[int, RankProcesses], model) -> dict[str, Trained]:
    return {name: train(ranks, model, ALONE, objective, BATCHES) for name, objective in OBJECTIVES.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (i + j) % 2 == 0 else pytest.mark.campaign)
        for i, name in enumerate(OBJECTIVES)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_gradients_of_pairs_do_not_depend_on_the_layout(ranks, model, alone, name, layout):
    assert_same(alone[name], train(ranks, model, LAYOUTS[layout], OBJECTIVES[name], BATCHES))


def test_mini_batches_are_numbers_of_pairs(ranks, model):
    config = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    one = train(ranks, model, ALONE, OBJECTIVES["dpo"], BATCHES[:1], config)
    assert len(one.gradients) == 2 * 3
    assert_same(one, train(ranks, model, Layout(2, MicroBatchRule(None, 2)), OBJECTIVES["dpo"], BATCHES[:1], config))


def test_the_first_gradient_is_that_of_a_plain_loop_over_pairs(model, alone):
    """The model in one process, a forward pass per response, log-softmax, and the loss as the paper writes it."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
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


# ---- pairs of rows, with the reference's log-probs computed by the same ranks -----------------------------

STEPS, PER_STEP, BETA = 4, 3, 0.5
OFFLINE = Objective("dpo", "seq-mean-token-mean", loss_options=(("beta", BETA), ("label_smoothing", 0.1)))
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.0, clip_grad=1e6)


class Rows:
    """Ragged pairs as a training set."""

    fingerprint: ClassVar[list[dict[str, Any]]] = [{"name": "pairs"}]
    report = RowReport(num_rows=STEPS * PER_STEP)
    part_sizes: ClassVar[list[int]] = [STEPS * PER_STEP]

    def __init__(self) -> None:
        rng = np.random.default_rng(3)

        def ids(low: int, high: int) -> np.ndarray:
            return rng.integers(2, VOCAB, rng.integers(low, high)).astype(np.int32)

        self.pairs = [Pair(ids(1, 9), ids(1, 20), ids(1, 20)) for _ in range(len(self))]

    def __len__(self) -> int:
        return STEPS * PER_STEP

    def usable(self, row: int) -> bool:
        return True

    def batch(self, rows: Sequence[int]) -> Batch:
        return pair_batch([self.pairs[row] for row in rows])


def offline(ranks: dict[int, RankProcesses], model: Path, layout: Layout, folder: Path) -> tuple[list[Metrics], Any, Metrics]:
    """The metrics of each step on the rows in their order, the first gradient, and what is measured on all rows at the end."""
    spec = replace(spec_for(model, layout, OFFLINE, 1e6), optim=OPTIM, total_optimizer_steps=STEPS)
    processes = ranks[layout.ranks]
    processes.build(replace(spec, policy=replace(spec.policy, temperature=1.0)))
    actor = actor_group(processes, ActorConfig(ppo_mini_batch_size=PER_STEP), layout.rule, OFFLINE)
    rows = TrainingRows(data := Rows(), data)
    reference = ReferenceRows.prepare(rows, actor, folder / "reference.safetensors", 5, Console())
    metrics = []
    for step in range(STEPS):
        chosen = list(range(step * PER_STEP, (step + 1) * PER_STEP))
        metrics.append(actor.update(reference.fill("train", chosen, data.batch(chosen))))
    return metrics, processes.call("gradients")[0][0], measure(actor, data, OFFLINE, 5, reference)


def plain_dpo(model: Path) -> tuple[list[float], Any, float]:
    """The same in thirty lines of PyTorch: a frozen copy, a forward pass per answer, the loss as the paper writes it, AdamW."""
    from transformers import AutoModelForCausalLM

    policy, frozen = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=OPTIM.lr, betas=tuple(OPTIM.betas), eps=OPTIM.eps, weight_decay=0.0)

    def logprob(lm: Any, prompt: np.ndarray, answer: np.ndarray) -> Any:
        tokens = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64))
        logits = lm(tokens[None]).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[len(prompt) :, None]).double().sum()

    def loss_of(pairs: list[Pair]) -> Any:
        losses = []
        for pair in pairs:
            sides = []
            for answer in (pair.chosen_ids, pair.rejected_ids):
                with torch.no_grad():
                    reference = logprob(frozen, pair.prompt_ids, answer)
                sides.append(logprob(policy, pair.prompt_ids, answer) - reference)
            h = BETA * (sides[0] - sides[1])
            losses.append(-0.9 * torch.log(torch.sigmoid(h)) - 0.1 * torch.log(torch.sigmoid(-h)))
        return torch.stack(losses).mean()

    pairs, losses, first = Rows().pairs, [], None
    for step in range(STEPS):
        loss = loss_of(pairs[step * PER_STEP : (step + 1) * PER_STEP])
        optimizer.zero_grad()
        loss.backward()
        if first is None:
            first = {f"lm.{name}": parameter.grad.clone() for name, parameter in policy.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, first, float(loss_of(pairs))


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[list[float], Any, float]:
    return plain_dpo(model)


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_dpo_on_rows_is_the_papers_loss_and_gradient_in_every_layout(ranks, model, plain, layout, tmp_path):
    losses, first, measured = plain
    metrics, gradients, validated = offline(ranks, model, LAYOUTS.get(layout, ALONE), tmp_path)
    # The policy is the reference in the first step: log 2 up to the smoothing, whatever the pairs.
    assert losses[0] == pytest.approx(float(np.log(2.0)), abs=1e-6) and losses[-1] != pytest.approx(losses[0], abs=1e-3)
    assert [row["actor/pg_loss"] for row in metrics] == pytest.approx(losses, abs=1e-6)
    assert validated["pg_loss"] == pytest.approx(measured, abs=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in first.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, first[name], atol=1e-6 * largest, rtol=0, msg=name)
    # Nothing was sampled, so no engine is compared with.
    assert not [key for row in metrics for key in row if key.startswith("rollout")]
