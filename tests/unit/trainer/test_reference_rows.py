"""The reference's log-probs of rows: computed once, read again for the same weights and tokens, and for no others."""

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
from grpo_rl.errors import DataError, DivergedError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.rows.reference_rows import ReferenceRows
from grpo_rl.types import Batch

TOKENIZER = build_tokenizer(128)
SUMS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n) * 3} for n in range(8, 15)]

FILE = "reference_logprobs.safetensors"


class Policy:
    """An actor whose log-prob of a token is minus its id, and a little of what the weights are."""

    def __init__(self, weights: str = "first") -> None:
        self.weights, self.asked = weights, 0

    def fingerprint(self) -> str:
        return self.weights

    def logprobs(self, batch: Batch) -> Tensor:
        self.asked += batch.num_rollouts
        return -batch.token_ids_S[batch.positions()].float() - len(self.weights) / 100


def pairs(folder: Path, rows: list[dict[str, Any]], **options: Any) -> PairSet:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairSet([str(file)], Config(data=DataConfig(responses="rows", **options)), TOKENIZER).checked()


def prepare(folder: Path, rows: TrainingRows, policy: Any) -> ReferenceRows:
    return ReferenceRows.prepare(rows, policy, folder / FILE, 3, Console())


def test_every_row_is_asked_for_once_and_a_second_start_asks_for_none(tmp_path: Path) -> None:
    policy = Policy()
    rows = TrainingRows(pairs(tmp_path, SUMS), pairs(tmp_path, SUMS[:2]))
    first = prepare(tmp_path, rows, policy)
    assert policy.asked == 2 * (len(SUMS) + 2)
    second = prepare(tmp_path, rows, policy)
    assert policy.asked == 2 * (len(SUMS) + 2)
    for part, chosen in (("train", [5, 0, 3]), ("val", [1])):
        batch = rows.train.batch(chosen)
        wanted_T = policy.logprobs(batch)
        for found in (first, second):
            filled = found.fill(part, chosen, batch)
            assert filled.ref_logprobs_T is not None and torch.equal(filled.ref_logprobs_T, wanted_T)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize("change", ["weights", "data", "broken file"])
def test_what_is_no_longer_the_same_is_computed_again(tmp_path: Path, change: str) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in SUMS]
    prepare(tmp_path, TrainingRows(pairs(tmp_path, chat, chat_template=template)), Policy())
    policy = Policy("others" if change == "weights" else "first")
    given = [*chat[1:], chat[0]] if change == "data" else chat
    rows = TrainingRows(pairs(tmp_path, given, chat_template=template))
    if change == "broken file":
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-9])
    found = prepare(tmp_path, rows, policy)
    assert policy.asked == 2 * len(SUMS)
    batch = rows.train.batch([4])
    filled = found.fill("train", [4], batch)
    assert filled.ref_logprobs_T is not None and torch.equal(filled.ref_logprobs_T, policy.logprobs(batch))


def test_a_row_that_has_other_tokens_is_refused_when_it_is_drawn(tmp_path: Path) -> None:
    before = TrainingRows(pairs(tmp_path, SUMS))
    found = prepare(tmp_path, before, Policy())
    other = pairs(tmp_path, [*SUMS[:3], {**SUMS[3], "chosen": "0"}, *SUMS[4:]])
    other.fingerprint = before.train.fingerprint  # that of a large file has only some rows in it
    policy = Policy()
    found = prepare(tmp_path, TrainingRows(other), policy)
    assert policy.asked == 0
    with pytest.raises(DataError, match=f"row 3 of the train data has other tokens than when .*{FILE} was written"):
        found.fill("train", [2, 3], other.batch([2, 3]))


def test_logprobs_that_are_not_finite_end_the_run_and_are_not_kept(tmp_path: Path) -> None:
    class Broken(Policy):
        def logprobs(self, batch: Batch) -> Tensor:
            return super().logprobs(batch) * float("nan")

    with pytest.raises(DivergedError, match="the reference's log-probs are not finite"):
        prepare(tmp_path, TrainingRows(pairs(tmp_path, SUMS)), Broken())
    assert not (tmp_path / FILE).exists()
