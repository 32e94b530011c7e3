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
from grpo_rl.data.dataset import PromptDataset, load_dataset
from grpo_rl.data.sources import jsonl, tables
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.numeric_columns import number_in
from grpo_rl.data.sources.source import HubRows, Joined
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


def by_block(source: Any, key: str = KEY) -> list[float | None]:
    values = np.concatenate(list(source.numbers(key)))
    assert len(values) == len(source)
    return [None if math.isnan(value) else value for value in values.tolist()]


def load(files: list[str], bad_rows: BadRows | None = None, **options: Any) -> PromptDataset:
    config = DataConfig(curriculum="difficulty", **options)
    return load_dataset(files, config, TOKENIZER, max_samples=options.get("train_max_samples", -1), bad_rows=bad_rows)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"extra_info": {"difficulty": 7}}', 7.0),
        ('{"extra_info": {"difficulty": -0.5}, "x": "\\"difficulty\\": 9"}', -0.5),
        ('{"difficulty": 1, "extra_info": {"other": {"difficulty": 2}, "difficulty": 3}}', 3.0),
        ('{"extra_info.difficulty": 4, "extra_info": {"difficulty": 5}}', 4.0),
        ('{"extra_info": {"difficulty": 9007199254740993}}', 9007199254740992.0),
        ('{"extra_info": {"difficulty": true}}', None),
        ('{"extra_info": {"difficulty": "7"}}', None),
        ('{"extra_info": {"difficulty": NaN}}', None),
        ('{"extra_info": {"difficulty": 1e999}}', None),
        ('{"extra_info": {"difficulty": 1' + "0" * 400 + "}}", None),
        ('{"extra_info": {"difficulty": 1' + "0" * 5000 + "}}", None),
        ('{"extra_info": {"difficulty": 1, "difficulty": 2}}', None),
        ('{"extra_info": {"difficulty": 7}, "x": "\0"}', None),
        ('{"extra_info": {"difficulty": 7}', None),
        ("[" * 100_000, None),
        ("[1]", None),
        ('{"extra_info": [1]}', None),
        ("{}", None),
    ],
)  # fmt: skip
def test_a_line_has_the_number_that_its_row_has_or_none(tmp_path: Path, line: str, expected: float | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"extra_info": {{"difficulty": 1}}}}\n\n{line}\n{{"extra_info": {{"difficulty": 2}}}}')
    assert by_block(open_source(str(path))) == [1.0, expected, 2.0]


def test_lines_are_read_in_blocks_and_a_line_longer_than_a_block_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "BLOCK", 300)
    rows = [row(number, number, note="x" * (1000 if number == 4 else number)) for number in range(12)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = open_source(str(path))
    assert max(map(len, source.numbers(KEY))) == 2
    assert by_block(source) == [None if number == 4 else float(number) for number in range(12)]
    assert load([str(path)]).difficulty().tolist() == [float(number) for number in range(12)]


def test_a_table_gives_whole_numbers_and_floats_and_nothing_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "READ_ROWS", 128)
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
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"))
    assert by_block(source) == [float(number) for number in range(200)], "a column called as the whole path comes first"
    nothing = [None] * 200
    for key in ("text", "flag", "extra_info", "none", "extra_info.none", "extra_info.inf", "text.difficulty"):
        assert by_block(source, key) == nothing, key
    assert by_block(source, "large") == [float(2**53)] * 200
    pq.write_table(pa.table(columns).drop_columns([KEY]), tmp_path / "b.parquet")
    expected = [None if number == 7 else value for number, value in enumerate(values)]
    assert by_block(open_source(str(tmp_path / "b.parquet"))) == expected


def test_sources_of_all_kinds_give_what_their_rows_give(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [row(number, number * 3 % 7) for number in range(150)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    hub = HubRows("hub", datasets.Dataset.from_list(rows).select(range(149, -1, -1)))
    files = [open_source(str(tmp_path / name)) for name in ("a.jsonl", "b.json", "c.parquet")]
    joined = Joined("all", [*files, hub, open_source("task:arithmetic?num_rows=3")])
    for index, value in enumerate(by_block(joined)):
        assert value in (None, number_in(joined.row(index), KEY))
    assert by_block(hub) == [float(149 - number) * 3 % 7 for number in range(150)]
    assert by_block(hub, "none") == by_block(files[1]) == [None] * 150


def test_only_the_rows_of_the_data_set_are_ordered_and_told_how_many(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    items = [row(1, 5), {"broken": 1}, row(2, "7", prompt="9" * 40), row(3, 6), row(4, 1)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    told: list[int] = []
    data = load([str(path)], on_bad_row="skip", filter_overlong_prompts=True, max_prompt_length=20, train_max_samples=4)
    assert data.difficulty(told.append).tolist() == [5.0, 6.0]
    assert sum(told) == len(data) == 2


def test_a_row_without_a_number_is_told_as_ever_and_left_out_under_skip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(n, value)) + "\n" for n, value in enumerate([1, 10**400, 3])))
    with pytest.raises(DataError, match=r"line 2: column 'extra_info\.difficulty' is 1000.*\(int\); expected a number"):
        load([str(path)]).difficulty()
    bad = BadRows("skip")
    data = load([str(path)], bad, on_bad_row="skip")
    assert np.isnan(data.difficulty()).tolist() == [False, True, False]
    assert (bad.num_rows, data.usable(0), data.usable(1)) == (1, True, False)
