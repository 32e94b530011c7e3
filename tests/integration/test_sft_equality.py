"""Supervised training beside a plain PyTorch loop: the same loss in each of 20 steps, however the work is cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import VOCAB, RankProcesses, actor_group, make_model

from grpo_rl.algos.objective import Objective
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.data.training_rows.conversations import Demonstration, supervised_batch
from grpo_rl.workers.specs import ActorSpec, PolicySpec

STEPS, BATCH = 20, 6
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.0, clip_grad=1e6)


def conversations() -> list[Demonstration]:
    """Ragged rows of one to three answers, with context before, between and behind the trained tokens."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(STEPS * BATCH // 4):
        ids, positions = [], []
        for _ in range(rng.integers(1, 4)):
            asked, answered = rng.integers(1, 9), rng.integers(1, 16)
            start = len(ids) + asked
            # An answer that follows from its question, so that there is something to learn.
            question = rng.integers(2, VOCAB // 2, asked)
            ids += [*question, *((question[-1] + np.arange(answered)) % VOCAB)]
            positions += range(start, start + answered)
        found.append(Demonstration(np.array(ids, dtype=np.int32), np.array(positions)))
    return found


ROWS = conversations()
BATCHES = [[ROWS[(step * BATCH + i) % len(ROWS)] for i in range(BATCH)] for step in range(STEPS)]


def plain_loop(folder: Path) -> list[float]:
    """Thirty lines of PyTorch: padded rows, a mask, one mean over all trained tokens of the batch, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=tuple(OPTIM.betas), eps=OPTIM.eps, weight_decay=0.0)
    losses = []
    for rows in BATCHES:
        longest = max(len(row.token_ids) for row in rows)
        ids_NL = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_NL, labels_NL = torch.zeros_like(ids_NL), torch.full_like(ids_NL, -100)
        for n, row in enumerate(rows):
            ids_NL[n, : len(row.token_ids)] = torch.from_numpy(row.token_ids.astype(np.int64))
            mask_NL[n, : len(row.token_ids)] = 1
            labels_NL[n, row.positions] = ids_NL[n, row.positions]
        logits_NLV = model(input_ids=ids_NL, attention_mask=mask_NL).logits
        loss = torch.nn.functional.cross_entropy(logits_NLV[:, :-1].flatten(0, 1), labels_NL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[float]:
    return plain_loop(model)


LAYOUTS = {
    "1 rank, the whole batch": (1, MicroBatchRule(None, 1000)),
    "1 rank, row by row": (1, MicroBatchRule(None, 1)),
    "2 ranks, by tokens": (2, MicroBatchRule(90, None)),
    "2 ranks, two rows at a time": (2, MicroBatchRule(None, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_every_step_is_that_of_a_plain_loop(
    ranks: dict[int, RankProcesses], model: Path, plain: list[float], layout: str
) -> None:
    num_ranks, rule = LAYOUTS[layout]
    objective = Objective(loss_mode="sft")
    policy = PolicySpec(
        ModelConfig(path=str(model), enable_gradient_checkpointing=False), temperature=1.0, dtype="float32", train=True
    )
    processes = ranks[num_ranks]
    processes.build(ActorSpec(policy, objective, OPTIM, total_optimizer_steps=STEPS, seed=1))
    actor = actor_group(processes, ActorConfig(ppo_mini_batch_size=BATCH), rule, objective)
    metrics = [actor.update(supervised_batch(rows)) for rows in BATCHES]
    ours = [row["actor/pg_loss"] for row in metrics]
    assert ours == pytest.approx(plain, abs=1e-5), json.dumps([ours, plain])
    assert plain[-1] < 0.7 * plain[0], "a curve that does not move compares nothing"
    # Nothing was sampled, so nothing is compared with an engine.
    assert not [key for key in metrics[0] if key.startswith("rollout")]
