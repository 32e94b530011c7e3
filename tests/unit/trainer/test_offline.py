"""The supervised schedule: what it trains on, measures and remembers; and the short fit that gives embedded models a start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_roles import MakeRun, learnt
from torch import Tensor

from grpo_rl import testing
from grpo_rl.algos.objective import Objective
from grpo_rl.columns import values
from grpo_rl.data.row_set import TrainingRows
from grpo_rl.data.training_rows.pairs import PairSet
from grpo_rl.errors import DivergedError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.parts import Roles
from grpo_rl.trainer.rows import Rows, with_kl
from grpo_rl.types import Batch

OFFLINE = (
    "actor_rollout_ref.rollout.max_num_seqs=null",
    "data.train_batch_size=2",
    "data.val_prompt_files=[]",
    "trainer.experiment_name=run",
    "trainer.test_freq=3",
)


def rows_of(recipe: str, task: str) -> tuple[str, ...]:
    """The words of a run on six rows of a task, and three to validate on."""
    files = (f"data.train_files={task}&num_rows=6", f"data.val_files={task}&num_rows=3&split=val")
    return f"recipe=paradigm/{recipe}", *OFFLINE, *files


SUMS = rows_of("sft", "task:arithmetic?carrying=0")
PAIRS = rows_of("dpo_rows", "task:arithmetic?carrying=1&forgotten_carries=1")
LABELLED = rows_of("kto", "task:arithmetic?carrying=1&forgotten_carries=0.5")


def trained(batches: Sequence[Batch]) -> list[list[int]]:
    return [batch.token_ids_S.tolist() for batch in batches]


def test_pairs_are_compared_with_the_policy_as_it_was_at_first_also_in_a_resumed_run(make_run: MakeRun) -> None:
    words = (*PAIRS, "trainer.save_freq=2")
    whole, record = make_run(steps=6, base=words)
    whole.fit()
    rows = learnt(whole)
    resumed, again = make_run(steps=6, base=words)
    # The untrained policy, as the checkpoint is not loaded yet.
    for batch in record.trained:
        assert batch.chosen_N is not None and batch.chosen_N.tolist() == [True, False] * 2
        first_T = resumed.session.actor.logprobs(batch)
        assert batch.ref_logprobs_T is not None and torch.allclose(values(batch.ref_logprobs_T), first_T, atol=1e-5)
    resumed.resume(whole.store.folder / "step_2")
    resumed.fit()
    assert trained(again.trained) == trained(record.trained[2:]) and learnt(resumed) == rows
    assert rows[0]["val/loss"] == pytest.approx(math.log(2.0)), "at first policy and reference are the same"
    assert rows[-1]["val/loss"] != rows[0]["val/loss"]


def test_labelled_rows_are_trained_without_the_mismatched_ones_that_give_the_kl(make_run: MakeRun) -> None:
    run, record = make_run(steps=3, base=LABELLED)
    run.fit()
    for batch in record.trained:
        assert batch.num_rollouts == 2 and batch.group_N.tolist() == [0, 1] and batch.chosen_N is not None
        assert batch.kl_N is not None and len(set(batch.kl_N.tolist())) == 1 and float(batch.kl_N[0]) >= 0.0
    assert record.trained[0].kl_N is not None and record.trained[0].kl_N.tolist() == pytest.approx([0.0] * 2, abs=1e-5)
    # With equal log-probs 1 - sigmoid(0) of a right and of a wrong answer.
    assert learnt(run)[0]["val/loss"] == pytest.approx(0.5)


def test_every_epoch_trains_every_row_once_and_validation_measures_the_loss_of_all_its_tokens(make_run: MakeRun) -> None:
    run, record = make_run(steps=6, base=SUMS)
    run.fit()
    first, second = ([tuple(ids) for ids in trained(record.trained[start : start + 3])] for start in (0, 3))
    assert first != second and sorted(chain(*first)) == sorted(chain(*second))
    rows = read_metrics(run.output.run_dir.metrics_file)
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert list(losses) == [0, 3, 6] and losses[6] < losses[3] < losses[0]
    assert run.session.rows is not None
    logprobs_T = run.session.actor.logprobs(run.session.rows.sets["val"].batch(range(3)))
    assert losses[6] == pytest.approx(-float(logprobs_T.mean()), rel=1e-4)
    last, batch = rows[-1], record.trained[-1]
    assert last["train/loss"] == last["actor/pg_loss"] and last["trainer/epoch"] == 1.0
    assert [last[f"{part}/perplexity"] for part in ("val", "train")] == pytest.approx(
        [math.exp(last[f"{part}/loss"]) for part in ("val", "train")]
    )
    assert last["train/num_tokens"] == batch.num_trained_tokens < last["perf/total_num_tokens"]


def test_the_references_log_probs_are_those_of_each_row_in_whatever_order_they_are_asked_for_and_finite() -> None:
    config = testing.composed(PAIRS).config
    data = PairSet(["task:arithmetic?carrying=1&forgotten_carries=1&num_rows=7"], config, build_tokenizer(128)).checked()
    for factor in (1.0, math.nan):
        actor: Any = SimpleNamespace(logprobs=lambda batch, f=factor: -batch.token_ids_S[batch.positions()].float() * f)
        if factor != factor:
            with pytest.raises(DivergedError, match="the reference's log-probs are not finite"):
                Rows(config, TrainingRows(data), Roles(actor), Objective("dpo", "prompt-mean"), Console())
            return
        rows = Rows(config, TrainingRows(data, data), Roles(actor), Objective("dpo", "prompt-mean"), Console())
        for part, chosen in (("train", [5, 0, 3]), ("val", [1])):
            filled = rows.batch(part, chosen)
            assert filled.ref_logprobs_T is not None and torch.equal(filled.ref_logprobs_T, actor.logprobs(data.batch(chosen)))


def test_the_kl_of_labelled_rows_is_that_of_the_mismatched_ones_alone() -> None:
    """By hand: the mismatched rollouts have 2 and 3 tokens of log-ratio 0.5; the answers have 1 and 4."""
    lengths = [1, 2, 4, 3]
    tokens = sum(lengths)
    batch = Batch(
        prompt_lengths_N=torch.ones(4, dtype=torch.long),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.tensor([0, 0, 1, 1]),
        token_ids_S=torch.zeros(tokens + 4, dtype=torch.int32),
        rewards_N=torch.zeros(4),
        ref_logprobs_T=torch.full((tokens,), -3.0),
    )

    class Asked:
        def logprobs(self, asked: Batch) -> Tensor:
            assert asked.trained_lengths_N.tolist() == [2, 3], "only the mismatched ones are asked for"
            return torch.tensor([-3.0 + 0.5] * asked.num_trained_tokens)

    kl = with_kl(batch, Asked()).kl_N  # type: ignore[arg-type]
    assert kl is not None and kl.tolist() == [pytest.approx((2 * 0.5 + 3 * 0.5) / 2)] * 2
