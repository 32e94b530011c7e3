"""The curves of a run as one small picture; all of them, and all else of the run, are on its page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import shown_keys, validation_name
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[dict[str, float]]

_BLUE = "#2563eb"
_COLOURS = ["#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285"]
_GRID = "#e4e7eb"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": "#1f2933",
    "text.parse_math": False,  # names of runs and data sources may hold a $
    "axes.edgecolor": _GRID,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
"""Matplotlib's settings for pictures of runs."""
MOST_PANELS = 6
TITLES = {
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
"""Metrics of training by their titles, of which the first that were measured are drawn beside reward or loss."""


def plot_curves(run_dir: RunDir) -> Path:
    """Draw `plots/curves.png`, and return its path."""
    path = run_dir.plots / "curves.png"
    temporary = path.with_suffix(".tmp")
    curves_figure(run_dir.name, read_metrics(run_dir.metrics_file)).savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
    return path


def curves_figure(name: str, records: Records, keys: Sequence[str] = ()) -> Figure:
    """Return a figure with one panel for each of these metrics over the steps, under the name of the run.

    Without `keys`: reward and validation, or the losses of a run on rows, and the first metrics of TITLES that were measured.
    """
    # Matplotlib takes a second to import, which only a run that draws should pay.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(key, [key]) for key in keys] or _panels(records)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(5.0, 4.0 * columns), 3.2 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(safe_text(name, limit=100), x=0.012, ha="left", fontweight="bold")
        for position, (title, drawn) in enumerate(panels):
            _draw(figure.add_subplot(rows, columns, position + 1), safe_text(title, limit=60), records, drawn)
    return figure


def _panels(records: Records) -> list[tuple[str, list[str]]]:
    """Return title and metrics of each panel."""
    measured = {key for record in records for key in record}
    validation = shown_keys(records)
    panels: list[tuple[str, list[str]]]
    if measured & {"train/loss", "val/loss"}:
        panels = [("Loss", ["train/loss", "val/loss"])] + (
            [("Answers to validation prompts", validation)] if validation else []
        )
    else:
        # Where the reward is a model's opinion on a scale of its own, that of the rules, which validation has.
        reward = "reward/by-rule" if "reward/by-rule" in measured else "reward/mean"
        panels = [("Reward and validation", [reward, *validation])]
    return [*panels, *((title, [key]) for key, title in TITLES.items() if key in measured)][:MOST_PANELS]


def _draw(axes: Axes, title: str, records: Records, keys: Sequence[str]) -> None:
    """Draw metrics of training smoothed, each step faint behind them, and those of validation with a point for each."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    colours = iter(_COLOURS * len(keys))
    for key in keys:
        points = [(record["step"], record[key]) for record in records if key in record and math.isfinite(record[key])]
        steps, values = [step for step, _ in points], [value for _, value in points]
        label = safe_text(validation_name(key) if key.startswith("val/") else key, limit=60)
        if values and key.startswith("val/"):
            # A reward beside another number of a validation is drawn in dashes.
            dashes = "--" if key.endswith("/reward") else "-"
            axes.plot(steps, values, dashes, color=next(colours), linewidth=1.6, marker="o", markersize=4, label=label)
        elif values:
            axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values), color=_BLUE, linewidth=2, label=label)
    axes.tick_params(length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("step", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    if not axes.has_data():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
    elif len(keys) > 1:
        axes.legend(loc="best")


def smooth(values: Sequence[float]) -> list[float]:
    """Return each value averaged with its neighbours on both sides under a Gaussian of a fortieth of the curve (0.5 to 10 steps).

    Centred, because an average over the past alone would draw every rise too late.
    """
    sigma = min(10.0, max(0.5, len(values) / 40))
    reach = math.ceil(3 * sigma)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    sums, totals = (np.convolve(column, weights)[reach:-reach] for column in (values, np.ones(len(values))))
    return [float(value) for value in sums / totals]
