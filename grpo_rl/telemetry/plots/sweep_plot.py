"""The picture of a sweep: the curves of its settings with their spread, and where each run ended."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.telemetry.plots.curves import new_figure, smooth, style
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ["#2563eb", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#c2255c", "#7b8794", "#b08900", "#5c940d", "#364fc7"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A measure over the steps of one run."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    end: float
    """The value that stands for the end of the run, as in the table."""
    is_noisy: bool = False
    """True where each step is measured on prompts of its own: drawn smoothed."""

    @classmethod
    def of(cls, name: str, points: Sequence[tuple[int, float]], last: int = 1) -> Curve:
        """Return the curve of (step, value) pairs, whose end is the mean of the last ones; more than one: a noisy curve."""
        values = [value for _, value in points]
        return cls(name, [step for step, _ in points], values, statistics.fmean(values[-last:]), last > 1)


def plot_sweep(path: Path, title: str, groups: Mapping[str, Sequence[Curve]]) -> Path:
    """Draw `path`, and return it: a line per setting with a band from the lowest to the highest run, and the ends of all runs.

    `groups` has the curves of each setting's runs, which differ by their seeds alone.
    """
    from matplotlib import rc_context

    temporary = path.with_suffix(".tmp")
    with rc_context(style()):
        figure = new_figure(12, max(4.6, 1.6 + 0.32 * len(groups)))
        figure.suptitle(safe_text(title, limit=100), x=0.012, ha="left", fontsize=13, fontweight="bold")
        grid = figure.add_gridspec(1, 2, width_ratios=[1.7, 1])
        _draw_bands(figure.add_subplot(grid[0]), groups)
        _draw_ends(figure.add_subplot(grid[1]), groups)
        figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def _draw_bands(axes: Axes, groups: Mapping[str, Sequence[Curve]]) -> None:
    name = next(iter(groups.values()))[0].name
    axes.set_title(f"{name.capitalize()} over the steps (band: lowest to highest run)")
    for index, (label, curves) in enumerate(groups.items()):
        color = _COLORS[index % len(_COLORS)]
        by_step: dict[int, list[float]] = {}
        for curve in curves:
            drawn = smooth(curve.values) if curve.is_noisy else curve.values
            for step, value in zip(curve.steps, drawn, strict=True):
                by_step.setdefault(step, []).append(value)
        # Where a run has ended early the others go on alone: their mean would jump.
        steps = sorted(step for step, values in by_step.items() if len(values) == len(curves)) or sorted(by_step)
        if len(curves) > 1:
            low, high = [min(by_step[step]) for step in steps], [max(by_step[step]) for step in steps]
            axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
        means = [statistics.fmean(by_step[step]) for step in steps]
        axes.plot(steps, means, color=color, linewidth=2, label=safe_text(label, limit=44))
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    axes.legend(loc="best", fontsize=9)


def _draw_ends(axes: Axes, groups: Mapping[str, Sequence[Curve]]) -> None:
    axes.set_title("At the end (dot: run, bar: mean)")
    labels = [safe_text(label, limit=30) for label in groups]
    for row, curves in enumerate(groups.values()):
        color = _COLORS[row % len(_COLORS)]
        ends = [curve.end for curve in curves]
        axes.scatter(ends, [row] * len(ends), color=color, alpha=0.55, s=34, zorder=3)
        axes.plot([statistics.fmean(ends)] * 2, [row - 0.28, row + 0.28], color=color, linewidth=3, zorder=4)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.12)
