"""The column that a curriculum orders by, read without making rows: the same numbers as rows give, and the same errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.row_set import BadRows
from grpo_rl.data.sources.locate import open_source
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer

TOKENIZER = build_tokenizer(128)
KEY = "extra_info.difficulty"


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


def test_a_table_gives_whole_numbers_and_floats_and_nothing_for_what_is_missing(tmp_path: Path) -> None:
    values = [None if number == 130 else number / 2 for number in range(200)]
    columns = {
        KEY: pa.array(range(200)),
        "extra_info": pa.array(
            [None if number == 7 else {"difficulty": value, "inf": math.inf} for number, value in enumerate(values)]
        ),
        "text": pa.array(["1"] * 200),
        "flag": pa.array([True] * 200),
        "large": pa.array([2**53 + 1] * 200),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=70)
    source = open_source(str(tmp_path / "a.parquet"))
    assert source.numbers(KEY).tolist() == list(range(200)), "a column called as the whole path comes first"
    for key in ("text", "flag", "extra_info", "none", "extra_info.none", "extra_info.inf", "text.difficulty"):
        assert np.isnan(source.numbers(key)).tolist() == [True] * 200, key
    assert source.numbers("large").tolist() == [float(2**53)] * 200
    pq.write_table(pa.table(columns).drop_columns([KEY]), tmp_path / "b.parquet")
    expected = [math.nan if number == 7 or value is None else value for number, value in enumerate(values)]
    np.testing.assert_array_equal(open_source(str(tmp_path / "b.parquet")).numbers(KEY), expected)


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
