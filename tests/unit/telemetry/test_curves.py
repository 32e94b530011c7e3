"""The picture of a run."""

import math
import warnings
from pathlib import Path

import pytest

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.report import plot_curves, smooth
from grpo_rl.telemetry.rundir import RunDir


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


def test_smoothing_follows_the_gaussian_worked_out_by_hand() -> None:
    # Three values: sigma 0.5, weights exp(-2) for a neighbour and exp(-8) for the one after it.
    near, far = math.exp(-2), math.exp(-8)
    assert smooth([0.0, 0.0, 1.0]) == pytest.approx([far / (1 + near + far), near / (1 + 2 * near), 1 / (1 + near + far)])
    assert smooth([0.25] * 50) == pytest.approx([0.25] * 50)
