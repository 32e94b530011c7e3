import math
import struct
import warnings
from pathlib import Path

import pytest

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.plots.curves import curves_figure, plot_curves, smooth
from grpo_rl.telemetry.rundir import RunDir


def image_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def full_record(step: int) -> dict[str, float]:
    names = ["reward/mean", "actor/kl_loss", "actor/pg_clipfrac", "timing_s/step", "timing_s/gen", "val/a$b$/x_/mean@1"]
    lengths = {"response_length/mean": 5.0, "response_length/min": 1.0, "response_length/max": 9.0 + step}
    return dict.fromkeys(names, 0.1 * step) | lengths


def iterated_record(step: int) -> dict[str, float]:
    phase = {"iterate/iteration": 1.0 + step // 6, "iterate/policy_phase": float(step % 6 > 2)}
    opinion = {"reward/by-rule": 0.1, "reward/reward_model": -3.0 + step, "iterate/agreement": 0.7}
    return full_record(step) | phase | opinion


def pair_record(step: int) -> dict[str, float]:
    names = ["train/loss", "train/accuracy", "train/margin", "actor/grad_norm", "timing_s/step", "timing_s/update_actor"]
    validated = dict.fromkeys(("val/loss", "val/accuracy", "val/margin"), 0.2 * step) if step % 5 == 0 else {}
    return dict.fromkeys(names, 0.1 * step) | validated


def sampled_pair_record(step: int) -> dict[str, float]:
    return full_record(step) | {"pairs/num_pairs": 3.0, "actor/reward_accuracy": 0.5, "actor/reward_margin": -0.1}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"val/a/mean@1": 0.5}],
        [full_record(1)],
        [full_record(step) for step in range(40)],
        [dict.fromkeys(full_record(1), math.nan) for _ in range(3)],
        [dict.fromkeys(full_record(1), math.inf), full_record(1)],
        [iterated_record(step) for step in range(14)],
        [dict.fromkeys(iterated_record(1), math.nan), iterated_record(4)],
        [pair_record(step) for step in range(12)],
        [{"val/loss": 0.7, "val/accuracy": 0.0, "val/margin": math.nan}, pair_record(1)],
        [{"pairs/num_pairs": 0.0}, sampled_pair_record(1)],
    ],
    ids=[
        *("nothing", "validation only", "one step", "forty steps", "only nan", "infinities", "iterated", "iterated, one step"),
        *("pairs in rows", "pairs in rows, one step", "sampled pairs"),
    ],
)
def test_every_kind_of_run_gets_its_picture_without_a_warning(tmp_path: Path, records: list[dict[str, float]]) -> None:
    run_dir = RunDir.create(tmp_path, "name with $mathematics_{$")
    file = MetricsFile(run_dir.metrics_file)
    for step, record in enumerate(records):
        file.log(step, record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = plot_curves(run_dir)
    assert path == run_dir.plots / "curves.png"
    assert image_size(path) == (1560, 988)


def test_the_main_panel_and_what_was_measured_are_drawn() -> None:
    def titles(records: list[dict[str, float]]) -> list[str]:
        return [axes.get_title(loc="left") for axes in curves_figure("r", records).axes]

    sampled = [full_record(step) | {"step": float(step)} for step in range(3)]
    lower = ["KL to the reference", "Clip fraction", "Response length (tokens)", "Seconds per step"]
    assert titles(sampled) == ["Reward and validation", *lower]
    pairs = [pair_record(step) | {"step": float(step), "val/sums/mean@1": 0.5} for step in range(3)]
    lower = ["Answers to validation prompts", "Pairs in the right order", "Norm of the gradient", "Seconds per step"]
    assert titles(pairs) == ["Loss", *lower]


def test_smoothing_keeps_a_constant_and_the_inside_of_a_straight_line() -> None:
    assert smooth([0.25] * 50) == pytest.approx([0.25] * 50)
    line = [float(x) for x in range(50)]
    assert smooth(line)[10:40] == pytest.approx(line[10:40])


def test_smoothing_follows_the_gaussian_worked_out_by_hand() -> None:
    # Three values: sigma 0.5, weights exp(-2) for a neighbour and exp(-8) for the one after it.
    near, far = math.exp(-2), math.exp(-8)
    assert smooth([0.0, 0.0, 1.0]) == pytest.approx([far / (1 + near + far), near / (1 + 2 * near), 1 / (1 + near + far)])


def test_smoothing_of_nothing_is_nothing() -> None:
    assert smooth([]) == []
