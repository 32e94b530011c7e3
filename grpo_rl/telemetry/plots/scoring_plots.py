"""A picture of how well scores tell good from bad: both distributions, the ROC curve, and a reliability diagram."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from grpo_rl.telemetry.plots.curves import style
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

_GOOD, _BAD, _LINE, _DIAGONAL = "#2b8a3e", "#d9480f", "#2563eb", "#7b8794"
HISTOGRAM_BINS = 40


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores of one validation, and their reliability diagram."""

    step: int
    kind: str
    """The things that are scored, in the words of the picture: `responses` or `steps`."""
    good: np.ndarray
    """float64 [good ones]: the scores of chosen responses, or of good steps."""
    bad: np.ndarray
    probability: np.ndarray
    """float64 [bins]: the mean probability of each bin, NaN for an empty one; so is `frequency`."""
    frequency: np.ndarray
    counts: np.ndarray
    figures: str
    """The metrics in one line."""


def plot_scoring(run_dir: RunDir, scoring: Scoring) -> Path:
    """Draw `plots/reward_model.png`, and return its path."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(style()):
        figure = Figure(figsize=(12, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        FigureCanvasAgg(figure)
        title = f"{run_dir.name}: validation after step {scoring.step} ({scoring.figures})"
        figure.suptitle(safe_text(title, limit=130), x=0.012, ha="left", fontsize=12, fontweight="bold")
        grid = figure.add_gridspec(1, 3)
        _draw_scores(figure.add_subplot(grid[0, 0]), scoring)
        _draw_roc(figure.add_subplot(grid[0, 1]), scoring)
        _draw_reliability(figure.add_subplot(grid[0, 2]), scoring)
        path = run_dir.plots / "reward_model.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def _draw_scores(axes: Axes, scoring: Scoring) -> None:
    names = ("chosen", "rejected") if scoring.kind == "responses" else ("good", "bad")
    axes.set_title(f"Scores of {names[0]} and {names[1]} {scoring.kind}")
    both = np.concatenate([scoring.good, scoring.bad])
    if len(both):
        edges = np.histogram_bin_edges(both, bins=HISTOGRAM_BINS)
        for scores, name, color in ((scoring.good, names[0], _GOOD), (scoring.bad, names[1], _BAD)):
            axes.hist(scores, bins=edges.tolist(), color=color, alpha=0.55, label=f"{name} ({len(scores):,})")
        axes.legend(loc="best")
    axes.set_xlabel("score")


def _draw_roc(axes: Axes, scoring: Scoring) -> None:
    axes.set_title("ROC curve")
    axes.plot([0, 1], [0, 1], color=_DIAGONAL, linewidth=1, linestyle="--")
    if len(scoring.good) and len(scoring.bad):
        bad, good = roc(scoring.good, scoring.bad)
        axes.plot(bad, good, color=_LINE, linewidth=2)
    axes.set_xlabel("share of bad ones above the threshold")
    axes.set_ylabel("share of good ones above it")


def roc(good: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of bad and of good scores that are at least each threshold, from none to all; equal scores are one point."""
    thresholds = np.unique(np.concatenate([good, bad]))[::-1]
    shares = [1 - np.searchsorted(np.sort(scores), thresholds, side="left") / len(scores) for scores in (bad, good)]
    return np.concatenate([[0.0], shares[0]]), np.concatenate([[0.0], shares[1]])


def _draw_reliability(axes: Axes, scoring: Scoring) -> None:
    axes.set_title("Reliability")
    axes.plot([0, 1], [0, 1], color=_DIAGONAL, linewidth=1, linestyle="--")
    filled = scoring.counts > 0
    if filled.any():
        probability, frequency, counts = scoring.probability[filled], scoring.frequency[filled], scoring.counts[filled]
        axes.plot(probability, frequency, color=_LINE, linewidth=1.6)
        axes.scatter(probability, frequency, s=20 + 220 * counts / counts.max(), color=_LINE, alpha=0.6)
    # A preferred response has a probability of one half at least.
    axes.set_xlim(0.48 if scoring.kind == "responses" else -0.02, 1.02)
    axes.set_xlabel("probability (larger point: more of them)")
    axes.set_ylabel("how often it is right" if scoring.kind == "responses" else "share of good steps")
