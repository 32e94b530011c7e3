import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile, dump_line, jsonable, read_metrics


def strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_line_is_strict_json_with_step_and_time(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5})
    record = strict((tmp_path / "metrics.jsonl").read_text())
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}


def test_what_was_logged_is_read_back_nan_included(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(2, {"a": math.nan, "b": -math.inf})
    file.log(1, {"a": 0.25})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["a"]) == (1, 0.25)
    assert second["step"] == 2 and math.isnan(second["a"]) and second["b"] == -math.inf


def test_two_lines_of_one_step_are_merged(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(1, {"a": 1.0, "b": 1.0})
    file.log(1, {"b": 2.0, "val/x/mean@1": 3.0})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["a"], record["b"], record["val/x/mean@1"]) == (1.0, 2.0, 3.0)


def test_a_resumed_run_continues_its_own_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.log(step, {"a": float(step)})
    file.close()
    with path.open("a") as half_written:
        half_written.write('{"step": 6, "a"')

    resumed = MetricsFile(path)
    resumed.truncate_after(3)
    resumed.log(4, {"a": 40.0})
    resumed.close()
    assert [(r["step"], r["a"]) for r in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert all(strict(line) for line in path.read_text().splitlines())


def test_a_new_line_is_not_glued_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.')
    MetricsFile(path).log(3, {"a": 3.0})
    assert [record["step"] for record in read_metrics(path)] == [1, 3]


def test_a_file_that_is_not_there_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert jsonable({"x": np.float32(0.5), "y": np.array([1, 2]), "z": {3}}) == {"x": 0.5, "y": [1, 2], "z": [3]}


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.floats(), st.text(), st.lists(st.floats())), max_size=5))
def test_any_record_is_one_line_of_strict_ascii_json(record: dict[str, Any]) -> None:
    line = dump_line(record)
    assert line.isascii() and line.count("\n") == 1 and len(line.splitlines()) == 1
    assert set(strict(line)) == set(record)
