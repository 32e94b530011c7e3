"""The curves of a run as one picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import shown_keys, validation_name
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

Records = Sequence[dict[str, float]]

_INK = "#1f2933"
_MUTED = "#7b8794"
_GRID = "#e4e7eb"
_BLUE = "#2563eb"
_SOURCES = ["#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285"]
_OPINION = "#862e9c"
_PHASES = {
    "gen": "#2563eb",
    "wait_for_rollouts": "#9ca3af",
    "reward": "#60a5fa",
    "old_logprobs": "#0f766e",
    "ref": "#5eead4",
    "update_actor": "#d97706",
    "update_reward_model": "#862e9c",
    "sync_weights": "#fcd34d",
}


def plot_curves(run_dir: RunDir) -> Path:
    """Draw `plots/curves.png`, and return its path: reward and validation on top; KL, clip fraction, lengths and seconds below.

    Of a run on rows it has the losses on top; answers, learning rate, gradient and seconds below, and for pairs how many
    are in the right order, and by how much. A run on sampled pairs has these two in place of KL and clip fraction. An
    iterated one has the reward model's opinion beside the rules' reward on top, and how well they agree in place of the clip
    fraction.
    Panels without a value in metrics.jsonl say so and stay empty.
    """
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
    grid = figure.add_gridspec(2, 4, height_ratios=[1.75, 1])
    figure.suptitle(safe_text(name, limit=100), x=0.012, ha="left", fontsize=13, fontweight="bold")
    pairs = any(key in record for record in records for key in ("train/accuracy", "pairs/num_pairs"))
    if any("train/loss" in record for record in records):
        if any("reward_model/loss" in record for record in records):
            _draw_reward_model(figure, grid, records)
            return
        _draw_losses(figure.add_subplot(grid[0, :]), records, "Loss per pair" if pairs else "Loss per token (nats)")
        if pairs:
            _draw_order(figure, grid, records, "train/accuracy", "train/margin")
            _draw_scores(figure.add_subplot(grid[1, 2]), records, "Answers to validation prompts")
            _draw_phases(figure.add_subplot(grid[1, 3]), records)
            return
        _draw_scores(figure.add_subplot(grid[1, 0]), records, "Answers to validation prompts")
        _draw_line(figure.add_subplot(grid[1, 1]), "Learning rate", records, "actor/lr")
        _draw_line(figure.add_subplot(grid[1, 2]), "Norm of the gradient", records, "actor/grad_norm")
        _draw_phases(figure.add_subplot(grid[1, 3]), records)
        return
    iterated = any("iterate/iteration" in record for record in records)
    if iterated:
        _draw_opinions(figure.add_subplot(grid[0, :]), records)
    else:
        _draw_scores(figure.add_subplot(grid[0, :]), records)
    if pairs and not iterated:
        _draw_order(figure, grid, records, "actor/reward_accuracy", "actor/reward_margin")
    else:
        _draw_line(figure.add_subplot(grid[1, 0]), "KL to the reference", records, "actor/kl_loss")
    if iterated:
        _draw_line(figure.add_subplot(grid[1, 1]), "Pairs ordered as by the rules", records, "iterate/agreement")
    elif not pairs:
        _draw_line(figure.add_subplot(grid[1, 1]), "Clip fraction", records, "actor/pg_clipfrac")
    _draw_lengths(figure.add_subplot(grid[1, 2]), records)
    _draw_phases(figure.add_subplot(grid[1, 3]), records)


def _draw_reward_model(figure: Figure, grid: GridSpec, records: Records) -> None:
    """Draw the training of a reward model: loss, accuracy, how well it ranks and how far off its probabilities are, gradient, time."""
    _draw_losses(figure.add_subplot(grid[0, :]), records, "Loss per pair, or per rated step")
    _draw_validated(figure.add_subplot(grid[1, 0]), "Accuracy", records, "train/accuracy", ("val/accuracy",))
    _draw_validated(
        figure.add_subplot(grid[1, 1]), "Validation", records, "", ("val/auc", "val/calibration_error", "val/brier")
    )
    _draw_line(figure.add_subplot(grid[1, 2]), "Norm of the gradient", records, "reward_model/grad_norm")
    _draw_phases(figure.add_subplot(grid[1, 3]), records)


def _draw_validated(axes: Axes, title: str, records: Records, key: str, validated: Sequence[str]) -> None:
    """Draw a metric of the training, and metrics of the validations as points."""
    for color, name in zip(_SOURCES, validated, strict=False):
        steps, values = _series(records, name)
        if values:
            label = name.removeprefix("val/").replace("_", " ")
            label = "validation" if len(validated) == 1 else "AUC" if label == "auc" else label
            axes.plot(steps, values, color=color, linewidth=1.2, marker="o", markersize=4, label=label)
    _draw_line(axes, title, records, key)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_order(figure: Figure, grid: GridSpec, records: Records, accuracy: str, margin: str) -> None:
    """Draw how the policy orders pairs, in the two left panels of the lower row; validation as points, where there is any."""
    for column, (title, key, validated) in enumerate(
        (("Pairs in the right order", accuracy, "val/accuracy"), ("Margin of implicit rewards", margin, "val/margin"))
    ):
        axes = figure.add_subplot(grid[1, column])
        steps, values = _series(records, validated)
        if values:
            axes.plot(steps, values, color=_SOURCES[0], linewidth=1.2, marker="o", markersize=4, label="validation")
        _draw_line(axes, title, records, key)


def _draw_losses(axes: Axes, records: Records, title: str) -> None:
    axes.set_title(title)
    steps, losses = _series(records, "train/loss")
    if losses:
        axes.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(losses), color=_BLUE, linewidth=2.2, label="training (faint: each step)")
    steps, losses = _series(records, "val/loss")
    if losses:
        color = _SOURCES[0]
        axes.plot(steps, losses, color=color, linewidth=1.6, marker="o", markersize=6, label="validation")
        _annotate_ends(axes, steps, losses, color)
    axes.margins(x=0.03, y=0.14)
    _finish(axes, legend="best")


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


def _draw_scores(axes: Axes, records: Records, title: str = "Reward and validation") -> None:
    axes.set_title(title)
    steps, rewards = _series(records, "reward/mean")
    if rewards:
        axes.plot(steps, rewards, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(rewards), color=_BLUE, linewidth=2.2, label="training reward (faint: each step)")
    _draw_validation(axes, records)
    axes.margins(x=0.03, y=0.14)
    _finish(axes, legend="best")


def _draw_validation(axes: Axes, records: Records) -> None:
    """Draw the validation of each data source; the reward, where it is another number, in dashes."""
    for index, key in enumerate(shown_keys(records)):
        steps, values = _series(records, key)
        if not values:
            continue
        color = _SOURCES[index % len(_SOURCES)]
        label, dashes = safe_text(validation_name(key), limit=72), "--" if key.endswith("/reward") else "-"
        axes.plot(steps, values, color=color, linewidth=1.6, linestyle=dashes, marker="o", markersize=6, label=label)
        _annotate_ends(axes, steps, values, color)


def _draw_opinions(axes: Axes, records: Records) -> None:
    """Draw the rules' reward and the validation on the left scale, the reward model's score on the right one.

    Stripes are the steps of the reward model: the score's scale is another one after each.
    """
    for first, last in _model_phases(records):
        axes.axvspan(first - 0.5, last + 0.5, color=_GRID, alpha=0.6, linewidth=0)
    steps, rewards = _series(records, "reward/by-rule")
    if rewards:
        axes.plot(steps, rewards, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(rewards), color=_BLUE, linewidth=2.2, label="reward by the rules (faint: each step)")
    _draw_validation(axes, records)
    axes.set_title("Reward by the rules, and the reward model's opinion")
    other = axes.twinx()
    steps, scores = _series(records, "reward/reward_model")
    if scores:
        other.plot(
            steps, scores, color=_OPINION, linewidth=1.6, linestyle="--", label="score of the reward model (right scale)"
        )
    other.set_ylabel("score", color=_OPINION)
    other.tick_params(length=0, colors=_OPINION)
    other.grid(visible=False)
    for one in (axes, other):
        one.margins(x=0.03, y=0.14)
    _finish(axes)
    handles, labels = (
        left + right for left, right in zip(*(a.get_legend_handles_labels() for a in (axes, other)), strict=True)
    )
    axes.legend(handles, labels, loc="best", fontsize=8, handlelength=1.8, labelspacing=0.3)


def _model_phases(records: Records) -> list[tuple[float, float]]:
    """Return the first and the last step of each phase of the reward model."""
    phases: list[tuple[float, float]] = []
    for record in records:
        if record.get("iterate/policy_phase") == 0.0:
            step = record["step"]
            joined = bool(phases) and phases[-1][1] == step - 1
            phases.append((phases.pop()[0] if joined else step, step))
    return phases


def _draw_line(axes: Axes, title: str, records: Records, key: str) -> None:
    axes.set_title(title)
    steps, values = _series(records, key)
    if values:
        axes.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smooth(values), color=_BLUE, linewidth=1.8)
        axes.set_ylim(bottom=min(0.0, *values))
    _finish(axes)


def _draw_lengths(axes: Axes, records: Records) -> None:
    axes.set_title("Response length (tokens)")
    rows = [r for r in records if all(_is_finite(r.get(f"response_length/{part}")) for part in ("mean", "min", "max"))]
    if rows:
        steps = [row["step"] for row in rows]
        low, high = [row["response_length/min"] for row in rows], [row["response_length/max"] for row in rows]
        axes.fill_between(steps, low, high, color=_BLUE, alpha=0.12, linewidth=0, label="min to max")
        axes.plot(steps, [row["response_length/mean"] for row in rows], color=_BLUE, linewidth=1.8, label="mean")
        axes.set_ylim(bottom=0)
    _finish(axes, legend="best")


def _draw_phases(axes: Axes, records: Records) -> None:
    axes.set_title("Seconds per step")
    rows = [row for row in records if _is_finite(row.get("timing_s/step"))]
    if rows:
        steps = [row["step"] for row in rows]
        parts = {name: [_finite_or_zero(row.get(f"timing_s/{name}")) for row in rows] for name in _PHASES}
        whole = sum(row["timing_s/step"] for row in rows)
        # What is too small to be seen in the picture would only fill its legend.
        parts = {name: values for name, values in parts.items() if sum(values) > 0.005 * whole}
        colors = [_PHASES[name] for name in parts]
        if parts:
            axes.stackplot(
                steps,
                list(parts.values()),
                labels=[name.replace("_", " ") for name in parts],
                colors=colors,
                alpha=0.85,
                linewidth=0,
            )
        axes.plot(steps, [row["timing_s/step"] for row in rows], color=_INK, linewidth=1, label="whole step")
        # One slow first step (warming up) must not flatten all the others.
        axes.set_ylim(0, 1.75 * sorted(row["timing_s/step"] for row in rows)[int(0.9 * (len(rows) - 1))] or 1)
    _finish(axes, legend="upper right")


def _finish(axes: Axes, legend: Literal["best", "upper right"] | None = None) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.tick_params(length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("step", loc="right", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    if not axes.has_data():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=_MUTED)
    elif legend is not None and axes.get_legend_handles_labels()[0]:
        axes.legend(loc=legend, ncols=2 if legend == "upper right" else 1, fontsize=8, handlelength=1.2, labelspacing=0.3)


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


def _finite_or_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
