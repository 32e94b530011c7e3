"""metrics.jsonl and timeline.jsonl: whole lines, cut on a resume, and a disk that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.telemetry.metrics import metrics_file
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile, dump_line, read_metrics
from grpo_rl.telemetry.metrics.timeline import Interval, Timeline, read_timeline


def strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_line_is_strict_json_with_step_and_time(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5})
    record = strict((tmp_path / "metrics.jsonl").read_text())
    [read] = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read["a"]) and (read["b"], read["c"], read["d"]) == (math.inf, -math.inf, 0.5)
    assert record.pop("time") > 1e9
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}


def test_a_resumed_run_continues_its_own_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.log(step, {"a": float(step)})
    file.close()
    with path.open("a") as half_written:
        half_written.write('{"step": 6, "a"')

    resumed = MetricsFile(path)
    resumed.log(7, {"a": 7.0})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 7], "it is not glued to the half of a line"
    resumed.truncate_after(3)
    resumed.log(4, {"a": 40.0})
    resumed.close()
    assert [(r["step"], r["a"]) for r in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert all(strict(line) for line in path.read_text().splitlines())


def test_steps_that_found_the_disk_full_are_written_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, warnings.append)
    metrics.log(1, {"a": 1.0})

    def half_full(path: Path, lines: Iterable[str]) -> None:
        with path.open("a") as file:
            file.write("".join(lines)[:-5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_file, "append_lines", half_full)
        metrics.log(2, {"a": 2.0})
        metrics.log(3, {"a": 3.0})
    metrics.log(4, {"a": 4.0})
    metrics.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert (
        "cannot be written" in warnings[0] and "can be written again; no line is missing" in warnings[1] and len(warnings) == 2
    )


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.floats(), st.text(), st.lists(st.floats())), max_size=5))
def test_any_record_is_one_line_of_strict_ascii_json(record: dict[str, Any]) -> None:
    line = dump_line(record)
    assert line.isascii() and line.count("\n") == 1 and len(line.splitlines()) == 1
    assert set(strict(line)) == set(record)


TWO_STEPS = [
    Interval(1, "step", "step", 0.0, 10.0),
    Interval(1, "rollout", "gen", 1.0, 6.0),
    Interval(2, "wait", "trainer", 12.0, 17.0),
]


def write(timeline: Timeline, intervals: list[Interval]) -> None:
    for one in intervals:
        timeline.record(one.role, one.what, one.start, one.end, one.step)  # type: ignore[arg-type]
    timeline.write()


def test_intervals_of_several_threads_are_all_in_the_file_and_in_order(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")

    def work(number: int) -> None:
        for place in range(200):
            with timeline.span("actor", f"{number}, {place}", number):
                pass
            timeline.write()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    timeline.write()
    read = read_timeline(tmp_path / "timeline.jsonl")
    assert [sum(one.step == number for one in read) for number in range(4)] == [200] * 4
    assert read == sorted(read, key=lambda one: one.start) and all(0 <= one.start <= one.end for one in read)


def test_intervals_that_follow_at_once_become_one_and_others_do_not(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for start, end in ((1.0, 2.0), (2.01, 2.5), (2.2, 2.3), (2.6, 3.0)):
        timeline.record("reward", "scoring", start, end, 1)
    timeline.record("reward", "scoring", 3.0, 4.0, 2)
    timeline.record("actor", "update_actor", 2.5, 2.6, 1)
    timeline.write()
    spans = [(one.step, one.role, one.start, one.end) for one in read_timeline(tmp_path / "timeline.jsonl")]
    assert spans == [(1, "reward", 1.0, 2.5), (1, "actor", 2.5, 2.6), (1, "reward", 2.6, 3.0), (2, "reward", 3.0, 4.0)]


def test_a_resumed_run_loses_later_steps_and_goes_on_where_the_last_kept_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(Timeline(path), TWO_STEPS)
    resumed = Timeline(path)
    resumed.truncate_after(1)
    assert {one.step for one in read_timeline(path)} == {1}
    with resumed.span("actor", "again", 2):
        pass
    resumed.write()
    last = read_timeline(path)[-1]
    assert last.step == 2 and 10.0 <= last.start < 11.0, "the pause between the two starts is not in it"


def test_intervals_that_found_no_folder_are_written_once_it_is_there_with_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    timeline = Timeline(tmp_path / "absent" / "timeline.jsonl", warnings.append)
    write(timeline, TWO_STEPS)
    write(timeline, TWO_STEPS)
    assert len(warnings) == 1 and "timeline.jsonl cannot be written: No such file or directory" in warnings[0]
    (tmp_path / "absent").mkdir()
    write(timeline, TWO_STEPS)
    assert len(read_timeline(tmp_path / "absent" / "timeline.jsonl")) == 3 * len(TWO_STEPS)
