"""The column that a curriculum orders by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import BadRows
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer

TOKENIZER = build_tokenizer(128)


def row(number: int, difficulty: Any, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "a",
        "prompt": str(number),
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"difficulty": difficulty},
    } | more


def load(files: list[str], bad_rows: BadRows | None = None, max_samples: int = -1, **options: Any) -> PromptDataset:
    config = DataConfig(curriculum="difficulty", **options)
    return PromptDataset(files, config, TOKENIZER, max_samples=max_samples, bad_rows=bad_rows).checked()


def test_sources_of_all_kinds_give_what_their_rows_give(tmp_path: Path) -> None:
    rows = [row(number, number * 3 % 7) for number in range(150)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    data = load([str(tmp_path / name) for name in ("a.jsonl", "b.json", "c.parquet")])
    assert data.difficulty().tolist() == [number * 3 % 7 for number in range(150)] * 3


def test_only_the_rows_of_the_data_set_are_ordered_and_told_how_many(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    items = [row(1, 5), {"broken": 1}, row(2, "7", prompt="9" * 40), row(3, 6), row(4, 1)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    told: list[int] = []
    data = load([str(path)], on_bad_row="skip", filter_overlong_prompts=True, max_prompt_length=20, max_samples=4)
    assert data.difficulty(told.append).tolist() == [5.0, 6.0]
    assert sum(told) == len(data) == 2


@pytest.mark.parametrize("value", [10**400, "7", True, None])
def test_a_row_without_a_number_is_told_as_ever_and_left_out_under_skip(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(n, one)) + "\n" for n, one in enumerate([1, value, 3])))
    with pytest.raises(DataError, match=r"line 2: column 'extra_info\.difficulty' is .*; expected a number"):
        load([str(path)]).difficulty()
    bad = BadRows("skip")
    data = load([str(path)], bad, on_bad_row="skip")
    assert np.isnan(data.difficulty()).tolist() == [False, True, False]
    assert (bad.num_rows, data.usable(0), data.usable(1)) == (1, True, False)
