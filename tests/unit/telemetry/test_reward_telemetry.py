import json
import struct
import warnings

import numpy as np
import pytest

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.plots.reward_plots import histogram, plot_rewards, read_scores
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


def write(run_dir, step, rows):
    lines = [json.dumps({"reward": reward, "reward_parts": parts}) for reward, parts in rows]
    (run_dir.rollouts / f"step_{step}.jsonl").write_text("".join(line + "\n" for line in lines))


def test_scores_are_read_by_component_and_step_without_what_is_no_number_or_there_twice(tmp_path):
    run_dir = RunDir.create(tmp_path, "r")
    write(
        run_dir,
        1,
        [(1.0, {"auto": 1.0, "auto/acc": 1.0, "acc": 1.0, "auto/answer": 7.0, "answer": 7.0}), ("NaN", {"auto": 0.0})],
    )
    write(run_dir, 10, [(None, {"auto": 0.5})])
    assert read_scores(run_dir.rollouts) == {"reward": {1: [1.0]}, "auto": {1: [1.0, 0.0], 10: [0.5]}, "auto/acc": {1: [1.0]}}


def test_shares_of_a_step_sum_to_one_in_bins_common_to_all_steps():
    shares, edges = histogram({1: [0.0, 0.0, 1.0, 0.0], 2: [1.0]})
    assert (edges[0], edges[-1]) == (0.0, 1.0)
    assert shares[:, 0].tolist() == [0.75] + [0.0] * 18 + [0.25]
    assert shares[:, 1].tolist() == [0.0] * 19 + [1.0]
    assert np.isfinite(histogram({1: [0.5]})[0]).all()


@pytest.mark.parametrize("num_steps", [1, 30])
def test_every_run_with_rollouts_gets_its_picture_without_a_warning(tmp_path, num_steps):
    run_dir = RunDir.create(tmp_path, "name $with$ {mathematics}")
    for step in range(1, num_steps + 1):
        write(run_dir, step, [(step / 30, {"a$b$": 1.0, "format": float(index % 2)}) for index in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = plot_rewards(run_dir)
    assert path == run_dir.plots / "rewards.png"
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > 800 and height > 300


def test_a_run_without_rollouts_has_no_picture(tmp_path):
    run_dir = RunDir.create(tmp_path, "r")
    assert plot_rewards(run_dir) is None and not list(run_dir.plots.iterdir())


def test_the_report_has_the_table_of_rewards(tmp_path):
    run_dir = RunDir.create(tmp_path, "r")
    for step in (1, 2):
        MetricsFile(run_dir.metrics_file).log(step, {"reward/mean": 0.5 * step, "reward/format": 1.0})
    assert "  format" in final_report(run_dir)
