"""A picture of which role was busy when: a row per role, a bar per interval, over the seconds of a run's last steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_rl.telemetry.metrics.timeline import Interval, busy_seconds, read_timeline
from grpo_rl.telemetry.plots.curves import style
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAST_STEPS = 10
ROLES = {
    "rollout": "#2563eb",
    "reward": "#60a5fa",
    "weights": "#e0a800",
    "reference": "#14b8a6",
    "critic": "#862e9c",
    "actor": "#d97706",
    "controller": "#7b8794",
}
"""The rows from top to bottom, with their colours."""
_OTHER_SHADES = {"old_logprobs": "#0f766e", "testing": "#94a3b8", "values": "#c084fc"}
"""The colours of what a role does besides its main work."""
_WAIT, _BOUND = "#b42318", "#1f2933"


def plot_timeline(run_dir: RunDir, last_steps: int = LAST_STEPS) -> Path | None:
    """Draw `plots/timeline.png` of the last steps, and return its path; None, and no file, where nothing was recorded."""
    intervals = read_timeline(run_dir.timeline_file, last_steps)
    if not intervals:
        return None
    return draw_timelines(run_dir.plots / "timeline.png", {run_dir.name: intervals})


def draw_timelines(path: Path, timelines: Mapping[str, Sequence[Interval]]) -> Path:
    """Draw timelines below each other on one scale of seconds, each from its first step on, and return `path`."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [1.6 + len(_roles_of(intervals)) for intervals in timelines.values()]
    with rc_context(style()):
        size = (13.0, 0.6 + 0.42 * sum(rows))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(rows), 1, height_ratios=rows)
        longest = 0.0
        panels = []
        for place, (title, intervals) in enumerate(timelines.items()):
            axes = figure.add_subplot(grid[place, 0])
            longest = max(longest, _draw(axes, title, intervals))
            panels.append(axes)
        for axes in panels:
            axes.set_xlim(0, longest)
        panels[-1].set_xlabel("seconds", loc="right", fontsize=9)
        temporary = path.with_suffix(".tmp")
        figure.savefig(temporary, format="png", dpi=130)
    os.replace(temporary, path)
    return path


def window(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return the first and the last second of the training steps among `intervals`; of all, where no step is recorded."""
    steps = [interval for interval in intervals if interval.role == "step"] or list(intervals)
    return min(interval.start for interval in steps), max(interval.end for interval in steps)


def idle_shares(intervals: Sequence[Interval]) -> dict[str, float]:
    """Return for each role the share of the steps' time in which it did nothing."""
    start, end = window(intervals)
    return {
        role: 1.0 - busy_seconds([interval for interval in intervals if interval.role == role], start, end) / (end - start)
        for role in _roles_of(intervals)
        if end > start
    }


def _roles_of(intervals: Sequence[Interval]) -> list[str]:
    found = {interval.role for interval in intervals}
    return [role for role in ROLES if role in found]


def _draw(axes: Axes, title: str, intervals: Sequence[Interval]) -> float:
    """Draw one timeline, its first step at 0, and return how many seconds it is long."""
    from matplotlib.patches import Patch

    roles, idle = _roles_of(intervals), idle_shares(intervals)
    start, end = window(intervals)
    for row, role in enumerate(roles):
        shown = [one for one in intervals if one.role == role and one.end > start and one.start < end]
        spans = [(max(one.start, start) - start, min(one.end, end) - max(one.start, start)) for one in shown]
        colors = [_OTHER_SHADES.get(one.what, ROLES[role]) for one in shown]
        axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=colors, edgecolor="white", linewidth=0.4)
    waits = [one for one in intervals if one.role == "wait" and one.end > start]
    for one in waits:
        axes.plot([one.start - start, one.end - start], [len(roles) - 0.4] * 2, color=_WAIT, linewidth=2.5)
    bounds = [one for one in intervals if one.role == "step"]
    for one in bounds:
        axes.axvline(one.start - start, color=_BOUND, linewidth=0.7, alpha=0.45, zorder=0)
        axes.annotate(
            str(one.step),
            (one.start - start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -1),
            textcoords="offset points",
            va="top",
            fontsize=7,
            color="#7b8794",
        )
    axes.set_yticks(range(len(roles)), roles)
    axes.set_ylim(len(roles) - 0.3, -0.75)
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    seconds = f", {(end - start) / len(bounds):.2f} s a step" if bounds else ""
    axes.set_title(safe_text(f"{title}: which role was busy when{seconds}", limit=110))
    legend = [Patch(color=ROLES[role], label=f"{role}: idle {idle.get(role, 0.0):.0%}") for role in roles]
    also = {one.what: None for one in intervals if one.role in ROLES and one.what in _OTHER_SHADES}
    legend += [Patch(color=_OTHER_SHADES[what], label=what.replace("_", " ")) for what in also]
    if waits:
        legend.append(Patch(color=_WAIT, label="one side waits for the other"))
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, labelspacing=0.35)
    return end - start
