"""timeline.jsonl: intervals from any thread, written beside the step, cut on a resume; and the picture of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_rl.telemetry.metrics.timeline import Interval, Timeline, read_timeline

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


def test_a_file_that_cannot_be_written_is_one_warning_and_no_failure(tmp_path: Path) -> None:
    warnings: list[str] = []
    timeline = Timeline(tmp_path / "absent" / "timeline.jsonl", warnings.append)
    write(timeline, TWO_STEPS)
    write(timeline, TWO_STEPS)
    [warning] = warnings
    assert "timeline.jsonl cannot be written: No such file or directory" in warning
    (tmp_path / "absent").mkdir()
    write(timeline, TWO_STEPS)
    assert len(read_timeline(tmp_path / "absent" / "timeline.jsonl")) == len(TWO_STEPS)
