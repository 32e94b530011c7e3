"""The report of a run: before and after, samples, and where everything lies."""

from pathlib import Path

from run_folders import make_run

from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rundir import RunDir


def answer(step: int, row: int, sample: int) -> str:
    """Return the right response from step 5 on, but for one row; before it one that would clear the screen."""
    return str(2 * row) if step > 4 and row != 101 else "\x1b[2Jseven"


def test_first_and_last_values_and_samples_of_the_same_prompts(tmp_path: Path) -> None:
    run_dir = RunDir(make_run(tmp_path, text=answer))
    report = final_report(run_dir, seconds=75, num_samples=6)
    lines = report.splitlines()
    assert lines[0].split() == ["Result", "before", "after", "change"]
    assert lines[1].split() == ["validation", "arithmetic/mean@1", "0.000", "0.833", "+0.833"]
    assert lines[2].split() == ["training", "reward", "(first", "and", "last", "4", "steps)", "0.000", "1.000", "+1.000"]
    assert run_dir.report_file.read_text() == report
    assert str(run_dir.metrics_file) in report and str(run_dir.report_file) in report and str(run_dir.model) not in report
    assert "before (step 0) and after (step 8)" in report and "\x1b" not in report
    block = report[report.index("102+102=") :].splitlines()
    assert [line.strip() for line in block[1:4]] == [
        "truth   204",
        "before  [reward 0] \\x1b[2Jseven",
        "after   [reward 1] 204",
    ]
    assert report.count("after   [reward 0]") == 1, "a change that fails is not hidden"
    assert report.endswith("Finished in 1 min 15 s.\n")


def test_a_run_that_only_validates_has_values_and_no_before_and_after(tmp_path: Path) -> None:
    report = final_report(RunDir(make_run(tmp_path, num_steps=0, text=answer)))
    assert report.splitlines()[0].split() == ["Result", "value"]
    assert report.splitlines()[1].split() == ["validation", "arithmetic/mean@1", "0.000"]
    assert "Some prompts, drawn at random" in report and "answer  [reward 0] \\x1b[2Jseven" in report
    assert not any(word in report for word in ("before", "after", "change"))
