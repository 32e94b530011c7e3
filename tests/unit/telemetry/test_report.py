from pathlib import Path

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Prompt, Rollout


def validate(log: RolloutLog, step: int, answers: list[str]) -> None:
    prompts = [Prompt(f"v{step}-{i}", (1,), f"question {i}", "sums", "8") for i in range(len(answers))]
    rollouts = [
        Rollout(prompt, 0, (2,), (-0.1,), "stop", ((step, 1),), text, float(text == "8"))
        for prompt, text in zip(prompts, answers, strict=True)
    ]
    log.write("val", step, rollouts)


def make_run(base: Path, num_steps: int = 10) -> RunDir:
    run_dir = RunDir.create(base, "r")
    file = MetricsFile(run_dir.metrics_file)
    file.log(0, {"val/sums/mean@1": 0.25})
    for step in range(1, num_steps + 1):
        file.log(step, {"reward/mean": step / 10})
    file.log(10, {"val/sums/mean@1": 0.75})
    log = RolloutLog(run_dir)
    validate(log, 0, ["\x1b[2Jseven", "8"])
    validate(log, 10, ["8", "nine"])
    return run_dir


def test_the_table_compares_the_first_and_the_last_values(tmp_path: Path) -> None:
    lines = final_report(make_run(tmp_path)).splitlines()
    assert lines[0].split() == ["Result", "before", "after", "change"]
    assert lines[1].split() == ["validation", "sums/mean@1", "0.250", "0.750", "+0.500"]
    # (0.1 + ... + 0.5) / 5 and (0.6 + ... + 1.0) / 5
    assert lines[2].split() == ["training", "reward", "(first", "and", "last", "5", "steps)", "0.300", "0.800", "+0.500"]


def test_samples_are_shown_for_the_same_prompt_and_cannot_drive_the_terminal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    report = final_report(run_dir, seconds=75)
    assert run_dir.report_file.read_text() == report
    assert str(run_dir.metrics_file) in report and str(run_dir.report_file) in report and str(run_dir.model) not in report
    assert "before (step 0) and after (step 10)" in report
    assert "\x1b" not in report
    block = report[report.index("question 0") :].splitlines()
    assert [line.strip() for line in block[1:4]] == [
        "truth   8",
        "before  [reward 0] \\x1b[2Jseven",
        "after   [reward 1] 8",
    ]
    assert "after   [reward 0] nine" in report  # a change for the worse is not hidden
    assert report.endswith("Finished in 1 min 15 s.\n")


def test_a_run_that_only_validates_has_values_and_no_before_and_after(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    MetricsFile(run_dir.metrics_file).log(0, {"val/sums/mean@1": 0.25})
    validate(RolloutLog(run_dir), 0, ["seven", "8"])
    report = final_report(run_dir)
    assert report.splitlines()[0].split() == ["Result", "value"]
    assert report.splitlines()[1].split() == ["validation", "sums/mean@1", "0.250"]
    assert "Some prompts, drawn at random" in report and "answer  [reward 1] 8" in report
    for word in ("before", "after", "change"):
        assert word not in report
