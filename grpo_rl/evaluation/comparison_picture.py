"""Curves of several groups of runs over each other, with bands over seeds, as one picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.evaluation.run_comparison import REWARD, Axis, RunGroup, band, metrics_of
from grpo_rl.telemetry.plots.curves import style
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#c2255c", "#7b8794", "#d97706")
STYLES = ("-", "--", ":", "-.")
"""Lines differ without their colours, too."""
BESIDE = {"response_length/mean": "Response length", "actor/kl_loss": "KL to the reference", "rollout/entropy": "Entropy"}
"""Metrics below the results, over steps, by their titles."""
_TITLES: dict[Axis, str] = {"step": "training steps", "tokens": "tokens", "seconds": "seconds of training"}


def draw(groups: Sequence[RunGroup], path: Path) -> Path:
    """Draw validation and reward along steps, tokens and seconds, and what helps to explain them; return the PNG's path."""
    # Matplotlib takes a second to import, which only a command that draws should pay.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    results = sorted(metrics_of(groups), key=lambda name: name == REWARD)[:3]
    beside = [
        name for name in BESIDE if any(name in record for group in groups for run in group.runs for record in run.records)
    ]
    num_rows = len(results) + bool(beside)
    with rc_context(style()):
        figure = Figure(figsize=(12, 3.1 * num_rows + 0.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(num_rows, 3)
        for row, metric in enumerate(results):
            for column, axis in enumerate(_TITLES):
                title = (
                    "Training reward" if metric == REWARD else f"Validation {safe_text(metric.removeprefix('val/'), limit=40)}"
                )
                _panel(figure.add_subplot(grid[row, column]), groups, metric, axis, title if column == 0 else "")
        for column, metric in enumerate(beside):
            _panel(figure.add_subplot(grid[num_rows - 1, column]), groups, metric, "step", BESIDE[metric])
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(labels)))
        if any(len(group.runs) > 1 for group in groups):
            figure.supxlabel("lines: mean over the seeds; bands: from the lowest to the highest seed", fontsize=9)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def _panel(axes: Axes, groups: Sequence[RunGroup], metric: str, axis: Axis, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(_TITLES[axis])
    for number, group in enumerate(groups):
        places, mean, low, high = band(group, metric, axis)
        colour, line = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        marker = "o" if len(places) <= 20 else ""
        axes.plot(places, mean, line, marker=marker, markersize=3.5, color=colour,
                  label=f"{chr(ord('A') + number % 26)}: {safe_text(group.label, limit=40)}{seeds}")  # fmt: skip
        if len(group.runs) > 1:
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if not any(len(line.get_xdata()) for line in axes.get_lines()):  # type: ignore[arg-type]
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
    low_y, high_y = axes.get_ylim()
    if math.isclose(low_y, high_y):
        axes.set_ylim(low_y - 0.5, high_y + 0.5)
