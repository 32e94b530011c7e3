"""The curves of a run as one small picture; all of them, and all else of the run, are on its page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import shown_keys, validation_name
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[dict[str, float]]

_INK = "#1f2933"
_MUTED = "#7b8794"
_GRID = "#e4e7eb"
_BLUE = "#2563eb"
_SOURCES = ["#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285"]
_BELOW = {
    "train/accuracy": "Pairs in the right order",
    "actor/reward_accuracy": "Pairs in the right order",
    "reward/reward_model": "Score of the reward model",
    "iterate/agreement": "Pairs ordered as by the rules",
    "actor/kl_loss": "KL to the reference",
    "actor/pg_clipfrac": "Clip fraction",
    "response_length/mean": "Response length (tokens)",
    "actor/grad_norm": "Norm of the gradient",
    "reward_model/grad_norm": "Norm of the gradient",
    "actor/lr": "Learning rate",
    "timing_s/step": "Seconds per step",
}
"""Metrics of training by their titles, of which the first that were measured are drawn below the main panel."""
_MOST_BELOW = 4


def plot_curves(run_dir: RunDir) -> Path:
    """Draw `plots/curves.png`, and return its path: reward and validation on top, or losses of a run on rows; four metrics below."""
    # Matplotlib takes a second to import, which only a run that draws should pay.
    from matplotlib import rc_context

    path = run_dir.plots / "curves.png"
    temporary = path.with_suffix(".tmp")
    with rc_context(style()):
        curves_figure(run_dir.name, read_metrics(run_dir.metrics_file)).savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def curves_figure(name: str, records: Records) -> Figure:
    """Return the figure of `plot_curves`, under the name of the run."""
    from matplotlib import rc_context

    with rc_context(style()):
        figure = new_figure(12, 7.6)
        _draw(figure, name, records)
    return figure


def metrics_figure(name: str, records: Records, keys: Sequence[str]) -> Figure:
    """Return a figure with one panel for each of these metrics over the steps, at most three side by side."""
    from matplotlib import rc_context

    columns = min(3, len(keys))
    rows = math.ceil(len(keys) / columns)
    with rc_context(style()):
        figure = new_figure(max(5.0, 4.0 * columns), 3.2 * rows)
        figure.suptitle(safe_text(name, limit=100), x=0.012, ha="left", fontsize=13, fontweight="bold")
        for position, key in enumerate(keys):
            _draw_line(figure.add_subplot(rows, columns, position + 1), safe_text(key, limit=60), records, key)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches, which needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    return figure


def style() -> dict[Any, Any]:
    """Return Matplotlib's settings for all pictures of a run."""
    return {
        "font.size": 10,
        "text.color": _INK,
        "text.parse_math": False,  # names of runs and data sources may hold a $
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _MUTED,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "lines.solid_capstyle": "round",
        "legend.frameon": False,
    }


def _draw(figure: Figure, name: str, records: Records) -> None:
    figure.suptitle(safe_text(name, limit=100), x=0.012, ha="left", fontsize=13, fontweight="bold")
    below = {key: title for key, title in _BELOW.items() if _series(records, key)[0]}
    supervised = any("train/loss" in record or "val/loss" in record for record in records)
    if supervised and shown_keys(records):
        below = {"": "Answers to validation prompts"} | below
    grid = figure.add_gridspec(2, max(1, min(_MOST_BELOW, len(below))), height_ratios=[1.75, 1])
    main = figure.add_subplot(grid[0, :])
    if supervised:
        main.set_title("Loss")
        _draw_training(main, records, "train/loss", "training (faint: each step)")
        _draw_points(main, records, {"val/loss": "validation"})
    else:
        main.set_title("Reward and validation")
        # Where the reward is a model's opinion on a scale of its own, that of the rules, which validation has.
        rules = any("reward/by-rule" in record for record in records)
        _draw_training(main, records, "reward/by-rule" if rules else "reward/mean", "training reward (faint: each step)")
        _draw_points(main, records, {key: validation_name(key) for key in shown_keys(records)})
    main.margins(x=0.03, y=0.14)
    _finish(main)
    for column, (key, title) in enumerate(list(below.items())[:_MOST_BELOW]):
        axes = figure.add_subplot(grid[1, column])
        if key:
            _draw_line(axes, title, records, key)
        else:
            axes.set_title(title)
            _draw_points(axes, records, {key: validation_name(key) for key in shown_keys(records)})
            _finish(axes)


def _draw_training(axes: Axes, records: Records, key: str, label: str = "") -> None:
    steps, values = _series(records, key)
    if values:
        axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(values), color=_BLUE, linewidth=2.0, label=label)


def _draw_points(axes: Axes, records: Records, names: dict[str, str]) -> None:
    """Draw metrics of validations with a point for each of them; a reward beside another number in dashes."""
    for index, (key, name) in enumerate(names.items()):
        steps, values = _series(records, key)
        if values:
            color, dashes = _SOURCES[index % len(_SOURCES)], "--" if key.endswith("/reward") else "-"
            label = safe_text(name, limit=72)
            axes.plot(steps, values, color=color, linewidth=1.6, linestyle=dashes, marker="o", markersize=5, label=label)
            _annotate_ends(axes, steps, values, color)


def _annotate_ends(axes: Axes, steps: Sequence[float], values: Sequence[float], color: str) -> None:
    """Write the first and the last value beside their points."""
    for end in sorted({0, len(values) - 1}):
        axes.annotate(
            f"{values[end]:.3f}",
            (steps[end], values[end]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=color,
            fontweight="bold",
        )


def _draw_line(axes: Axes, title: str, records: Records, key: str) -> None:
    axes.set_title(title)
    _draw_training(axes, records, key)
    values = _series(records, key)[1]
    if values:
        axes.set_ylim(bottom=min(0.0, *values))
    _finish(axes)


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.tick_params(length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("step", loc="right", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    if not axes.has_data():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=_MUTED)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=8, handlelength=1.8, labelspacing=0.3)


def smooth(values: Sequence[float]) -> list[float]:
    """Return each value averaged with its neighbours on both sides under a Gaussian of a fortieth of the curve (0.5 to 10 steps).

    Centred, because an average over the past alone would draw every rise too late.
    """
    sigma = min(10.0, max(0.5, len(values) / 40))
    reach = math.ceil(3 * sigma)
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-reach, reach + 1)]
    smoothed = []
    for center in range(len(values)):
        first = max(0, center - reach)
        window = values[first : center + reach + 1]
        window_weights = weights[first - center + reach :][: len(window)]
        total = sum(weight * value for weight, value in zip(window_weights, window, strict=True))
        smoothed.append(total / sum(window_weights))
    return smoothed


def _series(records: Records, key: str) -> tuple[list[float], list[float]]:
    points = [(record["step"], record[key]) for record in records if _is_finite(record.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
