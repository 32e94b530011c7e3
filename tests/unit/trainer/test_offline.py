"""The supervised schedule: what it trains on, measures and remembers; and the short fit that gives embedded models a start."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_sync_trainer import Part, make_config, run_of
from torch import Tensor

from grpo_rl.config.derived import settled
from grpo_rl.config.schema.tree import Config, DataConfig, PolicyLossConfig
from grpo_rl.data.row_set import TrainingRows
from grpo_rl.data.training_rows.conversations import Demonstration, DemonstrationSet
from grpo_rl.data.training_rows.pairs import LabelledSet, PairSet
from grpo_rl.errors import DivergedError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.plan.algorithm import objective_of
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.parts import Roles
from grpo_rl.trainer.rows import ReferenceRows, with_kl
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Batch, Metrics


def shown(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Demonstration:
    ids = np.array([*prompt, *answer], dtype=np.int32)
    return Demonstration(ids, np.arange(len(prompt), len(ids)))


class Learner(Part):
    """An actor whose only parameter is how well it knows the data: its loss is 1/(1 + updates), or as `losses` says."""

    file, number = "learner.json", "updates"

    def __init__(self, losses: list[float] | None = None) -> None:
        self.batches: list[Batch] = []
        self.losses = losses
        self.updates = self.validations = self.num_asked = 0

    def update(self, batch: Batch) -> Metrics:
        self.batches.append(batch)
        self.updates += 1
        return {"actor/pg_loss": 1.0 / self.updates, "actor/loss": 1.0 / self.updates, "actor/nonfinite": 0.0}

    def logprobs(self, batch: Batch) -> Tensor:
        self.num_asked += batch.num_rollouts
        loss = 1.0 / (1 + self.updates) if self.losses is None else self.losses[self.validations]
        self.validations += 1
        return torch.full((batch.num_trained_tokens,), -loss)

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "updates").write_text(str(self.updates))


# ---- the schedule in a run -------------------------------------------------------------------------------


def run_on(folder: Path, actor: Learner, total_steps: int, config: Config, train: Any, val: Any) -> RunLoop:
    """A run on rows; a folder's second run follows the first."""
    run_dir = RunDir.create(folder, "run")
    run_dir.release()
    rows = TrainingRows(train.checked(), val.checked())
    return run_of(config, run_dir, Roles(actor), total_steps, objective=objective_of(config), rows=rows)


def with_loss(config: Config, loss: str, **data: Any) -> Config:
    parts = config.actor_rollout_ref
    parts = replace(parts, actor=replace(parts.actor, policy_loss=PolicyLossConfig(loss_mode=loss)))
    data = DataConfig(responses="rows", train_batch_size=2, **data)
    return settled(replace(config, data=data, actor_rollout_ref=parts))


def run_on_sums(folder: Path, actor: Learner, total_steps: int, **trainer: Any) -> RunLoop:
    """A supervised run on six sums, and three to validate on."""
    config = with_loss(make_config(**trainer), "sft", response_key="reward_model.ground_truth")
    train, val = (
        DemonstrationSet([f"task:arithmetic?{more}"], config, build_tokenizer(128))
        for more in ("num_rows=6", "num_rows=3&split=val")
    )
    return run_on(folder, actor, total_steps, config, train, val)


PAIRED = "task:arithmetic?carrying=1&forgotten_carries=1"


def run_on_pairs(folder: Path, actor: Learner, total_steps: int, *, loss: str = "dpo", **trainer: Any) -> RunLoop:
    """Six pairs of a right and a wrong sum, and three to validate on."""
    keys = {"chosen_key": "reward_model.ground_truth", "rejected_key": "extra_info.demonstration"}
    config = with_loss(make_config(**trainer), loss, max_prompt_length=32, **keys)
    kind = PairSet if loss == "dpo" else LabelledSet
    task = PAIRED.replace("forgotten_carries=1", "forgotten_carries=0.5") if loss == "kto" else PAIRED
    train, val = (kind([f"{task}&{more}"], config, build_tokenizer(128)) for more in ("num_rows=6", "num_rows=3&split=val"))
    return run_on(folder, actor, total_steps, config, train, val)


def test_pairs_are_compared_with_the_policy_as_it_was_at_first_also_in_a_resumed_run(tmp_path: Path) -> None:
    whole, first, second = Learner(), Learner(), Learner()
    run_on_pairs(tmp_path / "whole", whole, 6, save_freq=2).fit()
    run_on_pairs(tmp_path / "cut", first, 2, save_freq=2, val_before_train=False, test_freq=-1).fit()
    asked = first.num_asked
    again = run_on_pairs(tmp_path / "cut", second, 6, save_freq=2, val_before_train=False, test_freq=-1)
    assert second.num_asked == asked - 2 * 3, "anew, before the checkpoint is loaded"
    again.resume(again.store.folder / "step_2")
    again.fit()
    assert trained(first) + trained(second) == trained(whole)
    # Each row once by the policy before its first update, whose loss is 1; then validations alone.
    assert asked == 2 * (6 + 3) + 2 * 3
    for batch in whole.batches + second.batches:
        assert batch.ref_logprobs_T is not None and torch.equal(batch.ref_logprobs_T, -torch.ones(batch.num_trained_tokens))
        assert batch.chosen_N is not None and batch.chosen_N.tolist() == [True, False] * 2


def test_labelled_rows_are_trained_without_the_mismatched_ones_that_give_the_kl(tmp_path: Path) -> None:
    actor = Learner()
    run_on_pairs(tmp_path, actor, 3, loss="kto", test_freq=3).fit()
    for number, batch in enumerate(actor.batches):
        assert batch.num_rollouts == 2 and batch.group_N.tolist() == [0, 1] and batch.chosen_N is not None
        # The log-probs of all tokens were -1 at first, and grow with every update.
        assert batch.kl_N is not None and (batch.kl_N > 0).all() == (number > 0) and len(set(batch.kl_N.tolist())) == 1
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # All answers become likelier alike, the mismatched ones, too: nothing was learnt from labels.
    assert rows[-1]["val/loss"] == rows[0]["val/loss"] == 0.5


def trained(actor: Learner) -> list[list[int]]:
    return [batch.token_ids_S.tolist() for batch in actor.batches]


def test_every_epoch_trains_every_row_once_and_validation_measures_the_loss_of_all_its_tokens(tmp_path: Path) -> None:
    actor = Learner()
    run = run_on_sums(tmp_path, actor, 6, test_freq=3)
    run.fit()
    first, second = ([tuple(ids) for ids in trained(actor)[start : start + 3]] for start in (0, 3))
    assert first != second and sorted(sum(first, ())) == sorted(sum(second, ()))
    rows = read_metrics(run.output.run_dir.metrics_file)
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [1 / n for n in range(1, 7)]
    assert {row["step"]: row["val/loss"] for row in rows if "val/loss" in row} == pytest.approx({0: 1.0, 3: 1 / 4, 6: 1 / 7})
    last = rows[-1]
    assert last["val/perplexity"] == pytest.approx(math.exp(1 / 7)) and last["train/perplexity"] == pytest.approx(
        math.exp(1 / 6)
    )
    assert last["trainer/epoch"] == 1.0
    assert last["train/num_tokens"] == actor.batches[-1].num_trained_tokens < last["perf/total_num_tokens"]


def test_the_references_log_probs_are_those_of_each_row_in_whatever_order_they_are_asked_for_and_finite() -> None:
    keys = {"chosen_key": "reward_model.ground_truth", "rejected_key": "extra_info.demonstration"}
    config = with_loss(make_config(), "dpo", max_prompt_length=32, **keys)
    data = PairSet([f"{PAIRED}&num_rows=7"], config, build_tokenizer(128)).checked()
    for factor in (1.0, math.nan):
        actor: Any = SimpleNamespace(logprobs=lambda batch, f=factor: -batch.token_ids_S[batch.positions()].float() * f)
        if factor != factor:
            with pytest.raises(DivergedError, match="the reference's log-probs are not finite"):
                ReferenceRows(TrainingRows(data), actor, 3, Console())
            return
        found = ReferenceRows(TrainingRows(data, data), actor, 3, Console())
        for part, chosen in (("train", [5, 0, 3]), ("val", [1])):
            batch = data.batch(chosen)
            filled = found.fill(part, chosen, batch)
            assert filled.ref_logprobs_T is not None and torch.equal(filled.ref_logprobs_T, actor.logprobs(batch))


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
