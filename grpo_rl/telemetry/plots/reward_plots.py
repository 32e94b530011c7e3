"""A picture of the distribution of the rollouts' rewards over training."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_rl.telemetry.plots.curves import style
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts, step_files
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STEPS = 12
"""Steps whose rollouts are read, evenly spread from the first to the last."""
MOST_PANELS = 8
BINS = 20
TOTAL = "reward"

Scores = dict[str, dict[int, list[float]]]
"""Component, then step: the scores of that step's rollouts."""


def plot_rewards(run_dir: RunDir) -> Path | None:
    """Draw `plots/rewards.png`, and return its path: a panel per component, a column per step, darker where more rollouts score so.

    None, and no file, where there are no rollouts of training steps.
    """
    scores = read_scores(run_dir.rollouts)
    if not scores:
        return None
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = list(scores)[:MOST_PANELS]
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    with rc_context(style()):
        size = (max(6.0, 3.6 * columns), 0.7 + 3.1 * rows)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        FigureCanvasAgg(figure)
        left_out = f" ({len(scores) - len(names)} more not drawn)" if len(scores) > len(names) else ""
        title = safe_text(f"{run_dir.name}: shares of the rollouts by score{left_out}", limit=110)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        grid = figure.add_gridspec(rows, columns)
        for index, name in enumerate(names):
            _draw(figure.add_subplot(grid[index // columns, index % columns]), name, scores[name])
        path = run_dir.plots / "rewards.png"
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def read_scores(folder: Path) -> Scores:
    """Return the reward and its components in at most `MOST_STEPS` of the steps, finite numbers only; the reward comes first."""
    files = step_files(folder)
    if len(files) > MOST_STEPS:
        files = [files[round(place * (len(files) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS)]
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for step, path in files:
        for record in read_rollouts(path):
            for name, value in ((TOTAL, record["reward"]), *record["reward_parts"].items()):
                if _is_shown(name, record["reward_parts"]) and isinstance(value, int | float) and math.isfinite(value):
                    scores[name][step].append(float(value))
    return {name: dict(by_step) for name, by_step in scores.items()}


def _is_shown(name: str, parts: dict[str, float]) -> bool:
    """Return whether a key is shown: neither a number that votes, nor the second name of a component's own key."""
    if name.rpartition("/")[2] == "answer":
        return False
    return not any(other.endswith(f"/{name}") for other in parts)


def histogram(by_step: dict[int, list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return shares [bin, step] of each step's scores, and the edges of the bins, which are the same for all steps."""
    values = [value for scores in by_step.values() for value in scores]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, BINS + 1)
    shares = [np.histogram(scores, bins=edges)[0] / len(scores) for scores in by_step.values()]
    return np.stack(shares, axis=1), edges


def _draw(axes: Axes, name: str, by_step: dict[int, list[float]]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shares, edges = histogram(by_step)
    steps = list(by_step)
    colors = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#bfd4fb", "#2563eb", "#172554"])
    positions = np.arange(len(steps) + 1)
    axes.pcolormesh(positions, edges, shares, cmap=colors, vmin=0, vmax=1, edgecolors="#e4e7eb", linewidth=0.3)
    means = [sum(scores) / len(scores) for scores in by_step.values()]
    axes.plot(positions[:-1] + 0.5, means, color="#d9480f", marker="o", markersize=4, linewidth=1.6, label="mean")
    for end in sorted({0, len(means) - 1}):
        axes.annotate(
            f"{means[end]:.2f}",
            (positions[end] + 0.5, means[end]),
            xytext=(0, 8 if means[end] < (edges[0] + edges[-1]) / 2 else -14),
            textcoords="offset points",
            ha="center",
            color="#d9480f",
            fontsize=9,
            fontweight="bold",
        )
    axes.set_title(safe_text(name, limit=36))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xticks(positions[:-1] + 0.5, _labels(steps))
    axes.set_xlabel("step", loc="right", fontsize=9)


def _labels(steps: Sequence[int]) -> list[str]:
    """Return the steps as text, every second one left out where they are many."""
    every = 1 if len(steps) <= 8 else 2
    return [str(step) if place % every == 0 else "" for place, step in enumerate(steps)]
