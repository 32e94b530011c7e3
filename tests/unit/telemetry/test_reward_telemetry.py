from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.report import final_report, rewards_section
from grpo_rl.telemetry.rundir import RunDir


def test_the_table_has_first_last_and_best_of_every_component_and_the_failures_by_kind():
    records = [
        {"step": 0.0, "val/a/mean@1": 0.1},
        {
            "step": 1.0,
            "reward/mean": 0.2,
            "reward/auto": 0.1,
            "reward/auto/acc": 0.0,
            "reward/acc": 0.0,
            "reward/timeouts": 2.0,
        },
        {
            "step": 2.0,
            "reward/mean": 0.9,
            "reward/auto": 0.8,
            "reward/auto/acc": 0.5,
            "reward/acc": 0.5,
            "reward/timeouts": 1.0,
        },
        {"step": 3.0, "reward/mean": 0.5, "reward/auto": 0.4, "reward/auto/acc": 0.5, "reward/acc": 0.5, "reward/errors": 4.0},
    ]
    rows = [line.split() for line in rewards_section(records).splitlines()]
    assert rows == [
        ["Rewards", "first", "last", "best", "at", "step"],
        ["reward", "0.200", "0.500", "0.900", "2"],
        ["auto", "0.100", "0.400", "0.800", "2"],
        ["auto/acc", "0.000", "0.500", "0.500", "2"],
        ["scores", "that", "failed:", "3", "past", "the", "deadline,", "4", "raised", "an", "error"],
    ]


def test_without_failures_the_table_says_so_only_where_they_are_counted():
    row = {"step": 1.0, "reward/mean": 1.0}
    assert "fail" not in rewards_section([row])
    assert rewards_section([row | {"reward/timeouts": 0.0}]).endswith("no score failed")
    assert rewards_section([{"step": 0.0, "val/a/mean@1": 1.0}]) == ""


def test_the_report_has_the_table_of_rewards(tmp_path):
    run_dir = RunDir.create(tmp_path, "r")
    for step in (1, 2):
        MetricsFile(run_dir.metrics_file).log(step, {"reward/mean": 0.5 * step, "reward/format": 1.0})
    assert "  format" in final_report(run_dir)
