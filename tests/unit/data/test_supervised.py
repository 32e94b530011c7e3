"""Demonstrations of files: bad rows with their places, long rows, and the batch that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.row_set import BadRows
from grpo_rl.data.training_rows.conversations import Demonstration, DemonstrationSet, cut_to, supervised_batch
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(128)


def load(path: Path, rows: list[Any], tokenizer: Any, **data: Any) -> DemonstrationSet:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(responses="rows", train_files=[str(path)], **data)
    whole = Config(data=config)
    return DemonstrationSet([str(path)], whole, tokenizer, bad_rows=BadRows(config.on_bad_row)).checked()


def pair(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def test_rows_that_are_too_long_are_refused_dropped_or_cut(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [pair("1+1", "2"), pair("1", "23456789"), pair("123456789", "0")]
    with pytest.raises(
        DataError, match=r"line 2: has 12 tokens, more than the longest sequence of 8; 2 rows are too long \(longest: 13"
    ):
        load(path, rows, tokenizer, max_length=8)
    dropped = load(path, rows, tokenizer, max_length=8, filter_overlong_prompts=True)
    assert len(dropped) == 1 and dropped.report.num_dropped == 2
    with pytest.raises(DataError, match="no rows are left: of 2 checked, 0 are bad and 2 have more than 8 tokens"):
        load(path, rows[1:], tokenizer, max_length=8, filter_overlong_prompts=True)
    cut = load(path, rows[:2], tokenizer, max_length=8, truncation="right")
    assert tokenizer.decode(cut.row(1).token_ids) == "<|user|>1<|assistant|>23456"
    with pytest.raises(DataError, match=r"line 3: has 13 tokens, and no trained one is left"):
        load(path, rows, tokenizer, max_length=8, truncation="right")


def test_what_is_cut_moves_the_trained_tokens_with_it() -> None:
    whole = Demonstration(np.arange(10, 20, dtype=np.int32), np.array([2, 3, 7, 8, 9]))
    for side, ids, positions in (
        ("left", [16, 17, 18, 19], [1, 2, 3]),
        ("right", [10, 11, 12, 13], [2, 3]),
        ("middle", [10, 11, 18, 19], [2, 3]),
    ):
        cut = cut_to(whole, 4, side)
        assert (cut.token_ids.tolist(), cut.positions.tolist()) == (ids, positions)
    assert cut_to(whole, 3, "left").positions.tolist() == [1, 2], "the first token has nothing before it"


def test_a_batch_trains_the_assistants_tokens_and_reads_the_others() -> None:
    several = Demonstration(np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([1, 2, 4]))
    batch = supervised_batch([several, Demonstration(np.array([4, 3], dtype=np.int32), np.array([1]))])
    assert batch.prompt_lengths_N.tolist() == [1, 1] and batch.response_lengths_N.tolist() == [4, 1]
    assert batch.token_ids_S.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert batch.positions().tolist() == [1, 2, 4, 6] and batch.trained_lengths_N.tolist() == [3, 1]
    assert batch.group_N.tolist() == [0, 1] and batch.num_trained_tokens == 4
    assert batch.advantages_T is None and batch.rollout_logprobs_T is None and batch.old_logprobs_T is None
    assert batch.counts().num_tokens == 4
    other = batch.select([1, 0])
    assert other.token_ids_S.tolist() == [4, 3, 5, 6, 7, 8, 9] and other.positions().tolist() == [1, 3, 4, 6]


def test_a_folder_of_rollouts_is_data(tokenizer: Any, tmp_path: Path) -> None:
    record = {"prompt": "<|user|>1+1<|assistant|>", "response": "2", "prompt_length": 5, "response_length": 2}
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (1, 2):
        (folder / f"step_{step}.jsonl").write_text(json.dumps(record | {"finish_reason": "stop", "response": str(step)}) + "\n")
    config = Config(data=DataConfig(responses="rows"))
    data = DemonstrationSet([str(folder)], config, tokenizer).checked()
    assert [tokenizer.decode(data.row(row).token_ids) for row in (0, 1)] == [
        "<|user|>1+1<|assistant|>1<|end|>",
        "<|user|>1+1<|assistant|>2<|end|>",
    ]
