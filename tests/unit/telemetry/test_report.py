"""The report of a run: before and after, samples, where everything lies; and its picture."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
from run_folders import make_run

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.report import TITLES, curves_figure, final_report, plot_curves, smooth
from grpo_rl.telemetry.rundir import RunDir


def answer(step: int, row: int, sample: int) -> str:
    """Return the right response from step 5 on, but for one row; before it one that would clear the screen."""
    return str(2 * row) if step > 4 and row != 101 else "\x1b[2Jseven"


def test_first_and_last_values_and_samples_of_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_rl.telemetry.report.NUM_SAMPLES", 6)
    run_dir = RunDir(make_run(tmp_path, text=answer))
    report = final_report(run_dir, seconds=75)
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
    assert report.splitlines()[1].split() == ["validation", "arithmetic/mean@1", "0.000"]
    assert "Some prompts, drawn at random" in report and "answer  [reward 0] \\x1b[2Jseven" in report


def test_no_number_runs_into_the_next_column(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "perplexity")
    file = MetricsFile(run_dir.metrics_file)
    for step, value in enumerate([31166.114, 1e12, 1.001]):
        file.log(step, {"val/a/mean@1": value, "reward/mean": -value, "actor/loss": 0.0})
    rows = [line.split() for line in final_report(run_dir).splitlines()[1:2]]
    assert rows == [["validation", "a/mean@1", "31166.114", "1.001", "-31165.1"]]


def test_a_constant_is_drawn_as_one(tmp_path: Path) -> None:
    records = [{"step": step, "actor/lr": 1e-5 * (1 + 1e-9 * step), "actor/grad_norm": 1.0 + step} for step in range(1, 9)]
    figure = curves_figure("a", records, ["actor/lr", "actor/grad_norm"])
    low, high = figure.axes[0].get_ylim()
    assert high - low == pytest.approx(0.02 * 1e-5, rel=1e-3) and low < 1e-5 < high
    assert figure.axes[1].get_ylim() == pytest.approx((1.65, 9.35), abs=0.5)


def test_what_never_changes_is_drawn_last() -> None:
    still = {"actor/pg_clipfrac": 0.0, "actor/lr": 1e-5}
    moving = ("response_length/mean", "actor/grad_norm", "critic/vf_loss", "timing_s/step")
    records = [{"step": step, "reward/mean": 0.5, **still, **dict.fromkeys(moving, 1.0 + step)} for step in range(1, 4)]
    titles = [axes.get_title(loc="left") for axes in curves_figure("a", records).axes]
    assert titles[1:] == [*(TITLES[key] for key in moving), "Clip fraction"]


def test_two_metrics_of_one_title_are_drawn_once() -> None:
    records = [{"step": step, "train/accuracy": 0.1 * step, "actor/reward_accuracy": 0.1 * step} for step in range(1, 4)]
    titles = [axes.get_title(loc="left") for axes in curves_figure("a", records).axes]
    assert titles.count("Accuracy") == 1


def sampled(step: int) -> dict[str, float]:
    names = ["reward/mean", "actor/kl_loss", "actor/pg_clipfrac", "timing_s/step", "timing_s/gen", "val/a$b$/x_/mean@1"]
    return dict.fromkeys(names, 0.1 * step) | {"response_length/mean": 5.0}


def pairs(step: int) -> dict[str, float]:
    names = ["train/loss", "train/accuracy", "train/margin", "actor/grad_norm", "timing_s/step", "timing_s/update_actor"]
    validated = dict.fromkeys(("val/loss", "val/accuracy", "val/margin"), 0.2 * step) if step % 5 == 0 else {}
    return dict.fromkeys(names, 0.1 * step) | validated


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"val/a/mean@1": 0.5}],
        [sampled(step) for step in range(40)],
        [dict.fromkeys(sampled(1), math.nan), dict.fromkeys(sampled(1), math.inf)],
        [pairs(1)],
    ],
    ids=["nothing", "validation only", "sampled", "no finite number", "pairs in rows, one step"],
)
def test_every_kind_of_run_gets_its_picture_without_a_warning(tmp_path: Path, records: list[dict[str, float]]) -> None:
    run_dir = RunDir.create(tmp_path, "name with $mathematics_{$")
    file = MetricsFile(run_dir.metrics_file)
    for step, record in enumerate(records):
        file.log(step, record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_curves(run_dir).read_bytes().startswith(b"\x89PNG")
    panels = curves_figure("a", [{"step": step, **record} for step, record in enumerate(records)]).axes
    measured = any(math.isfinite(value) for record in records for value in record.values())
    assert [axes.has_data() for axes in panels] == [measured] * len(panels), "an empty panel"


def test_smoothing_follows_the_gaussian_worked_out_by_hand() -> None:
    # Three values: sigma 0.5, weights exp(-2) for a neighbour and exp(-8) for the one after it.
    near, far = math.exp(-2), math.exp(-8)
    assert smooth([0.0, 0.0, 1.0]) == pytest.approx([far / (1 + near + far), near / (1 + 2 * near), 1 / (1 + near + far)])
    assert smooth([0.25] * 50) == pytest.approx([0.25] * 50)
