"""The reference's log-probs of rows: computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.row_set import TrainingRows
from grpo_rl.data.training_rows.pairs import PairSet
from grpo_rl.errors import DivergedError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.offline import ReferenceRows
from grpo_rl.types import Batch

TOKENIZER = build_tokenizer(128)
SUMS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n) * 3} for n in range(8, 15)]


class Policy:
    """An actor whose log-prob of a token is minus its id."""

    def __init__(self) -> None:
        self.asked = 0

    def logprobs(self, batch: Batch) -> Tensor:
        self.asked += batch.num_rollouts
        return -batch.token_ids_S[batch.positions()].float()


def pairs(folder: Path, rows: list[dict[str, Any]], **options: Any) -> PairSet:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairSet([str(file)], Config(data=DataConfig(responses="rows", **options)), TOKENIZER).checked()


def computed(rows: TrainingRows, policy: Any) -> ReferenceRows:
    return ReferenceRows(rows, policy, 3, Console())


def test_every_row_is_asked_for_once(tmp_path: Path) -> None:
    policy = Policy()
    rows = TrainingRows(pairs(tmp_path, SUMS), pairs(tmp_path, SUMS[:2]))
    found = computed(rows, policy)
    assert policy.asked == 2 * (len(SUMS) + 2)
    for part, chosen in (("train", [5, 0, 3]), ("val", [1])):
        batch = rows.train.batch(chosen)
        filled = found.fill(part, chosen, batch)
        assert filled.ref_logprobs_T is not None and torch.equal(filled.ref_logprobs_T, policy.logprobs(batch))


def test_logprobs_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    class Broken(Policy):
        def logprobs(self, batch: Batch) -> Tensor:
            return super().logprobs(batch) * float("nan")

    with pytest.raises(DivergedError, match="the reference's log-probs are not finite"):
        computed(TrainingRows(pairs(tmp_path, SUMS)), Broken())
