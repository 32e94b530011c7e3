"""A report of what a run achieved, and its curves as a picture."""

from __future__ import annotations

import itertools
import math
import os
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.telemetry.diagnosis.diagnose import as_text, diagnose
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.grades import grades
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, Records, read_metrics
from grpo_rl.telemetry.metrics.validation import results, shown_keys, validation_name
from grpo_rl.telemetry.rollout_log import prompt_key, read_rollouts, step_files
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.text import duration, number, safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 100
_TEXT_LIMIT = 400
NUM_SAMPLES = 4


def final_report(run_dir: RunDir, seconds: float | None = None) -> str:
    text = report_text(run_dir, seconds)
    run_dir.report_file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return text


def report_text(run_dir: RunDir, seconds: float | None = None) -> str:
    """Return the report of a run so far, safe to print."""
    records = read_metrics(run_dir.metrics_file)
    health = ""
    if any(record["step"] > 0 for record in records):
        diagnosis = as_text(diagnose(RunRecord.of_folder(run_dir.path)), brief=True)
        health = f"Health\n{diagnosis}\n  more: python -m grpo_rl doctor {run_dir.path}"
    sections = [_before_after(records), health, _graded(records), _samples(run_dir), _written(run_dir)]
    if seconds is not None:
        sections.append(f"Finished in {duration(seconds)}.")
    return "\n\n".join(section for section in sections if section) + "\n"


def _before_after(records: Records) -> str:
    rows = [
        f"  {safe_text(name, limit=54):<54}"
        + (f" {number(old, 9)} {number(new, 9)} {_signed(new - old)}" if first != last else f" {number(new, 19)}")
        for name, (first, old), (last, new) in results(records)
    ]
    return "\n".join([f"{'Result':<56}{'before':>10}{'after':>10}{'change':>10}", *rows] if rows else [])


def _signed(change: float) -> str:
    return ("+" * (change >= 0) + number(change, 8).strip()).rjust(9)


def _graded(records: Records) -> str:
    """Return predictions of the plan beside measurements."""
    rows = [
        f"  {name:<44} {number(predicted, 9)} {number(measured, 9)}{predicted / measured - 1:>+10.0%}"
        for name, predicted, measured in grades(records)
    ]
    return "\n".join([f"{'A step by the plan':<46}{'predicted':>10}{'measured':>10}{'error':>10}", *rows] if rows else [])


def _samples(run_dir: RunDir) -> str:
    files = step_files(run_dir.val)
    if not files:
        return ""
    (first_step, first_file), (last_step, last_file) = files[0], files[-1]
    first, last = _by_prompt(read_rollouts(first_file)), _by_prompt(read_rollouts(last_file))
    prompts = [prompt for prompt in first if prompt in last]
    chosen = random.Random(0).sample(prompts, min(NUM_SAMPLES, len(prompts)))
    if not chosen:
        return ""
    states = [("before", first), ("after", last)] if first_step != last_step else [("answer", last)]
    title = f"The same prompts before (step {first_step}) and after (step {last_step})" if len(states) > 1 else "Some prompts"
    lines = [f"{title}, drawn at random"]
    for prompt in chosen:
        lines += ["", *_labelled("prompt", prompt[1])]
        truth = first[prompt].get("ground_truth")
        if truth is not None:
            lines += _labelled("truth", str(truth))
        for label, records in states:
            record = records[prompt]
            lines += _labelled(label, record["response"], f"[reward {_reward(record)}] ")
    return "\n".join(lines)


def _by_prompt(records: Sequence[JsonObject]) -> dict[tuple[str, str], JsonObject]:
    return {prompt_key(record): record for record in records if record.get("sample") == 0}


def _reward(record: JsonObject) -> str:
    reward = record.get("reward")
    return f"{reward:g}" if isinstance(reward, int | float) else str(reward)


def _labelled(label: str, text: str, prefix: str = "") -> list[str]:
    body, indent = prefix + safe_text(text, limit=_TEXT_LIMIT), f"  {label:<8}"
    wrapper = textwrap.TextWrapper(_WIDTH, indent, " " * 10, drop_whitespace=False, replace_whitespace=False)
    return wrapper.wrap(body) or [indent]


def _written(run_dir: RunDir) -> str:
    places = [(name, path) for name, path in run_dir.written() if name != "report"]
    lines = [f"  {name:<15}{path}" for name, path in [*places, ("this report", run_dir.report_file)]]
    return "\n".join([f"Written to {run_dir.path}", *lines])


STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names of runs and data sources may hold a $
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
MOST_PANELS = 6
LEAST_RANGE = 0.02  # of an axis, as a share of the largest value: less looks constant
TITLES = {
    "train/accuracy": "Accuracy",
    "actor/reward_accuracy": "Accuracy",
    "reward/reward_model": "Score of the reward model",
    "iterate/agreement": "Pairs ordered as by the rules",
    "actor/kl_loss": "KL to the reference",
    "actor/distillation_kl": "KL to the teacher",
    "actor/pg_clipfrac": "Clip fraction",
    "response_length/mean": "Response length (tokens)",
    "actor/grad_norm": "Norm of the gradient",
    "critic/vf_loss": "Loss of the critic",
    "reward_model/grad_norm": "Norm of the reward model's gradient",
    "actor/lr": "Learning rate",
    "timing_s/step": "Seconds per step",
}
"""Titles of training metrics; the first that were measured are drawn beside reward or loss, constants last."""


def plot_curves(run_dir: RunDir) -> Path:
    path = run_dir.plots / "curves.png"
    temporary = path.with_suffix(".tmp")
    curves_figure(run_dir.name, read_metrics(run_dir.metrics_file)).savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
    return path


def curves_figure(name: str, records: Records, keys: Sequence[str] = ()) -> Figure:
    """Return a figure with a panel for each metric."""
    # Importing matplotlib takes a second.
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
    measured = {key for record in records for key, value in record.items() if math.isfinite(value)}
    validation = shown_keys(records)
    if measured & {"train/loss", "val/loss"}:
        panels = [("Loss", ["train/loss", "val/loss"]), ("Answers to validation prompts", validation)]
    else:
        # If the reward is a model's opinion, that of the rules, which validation has.
        reward = "reward/by-rule" if "reward/by-rule" in measured else "reward/mean"
        audits = sorted(
            key.removesuffix("/num_prompts") for key in measured if key.startswith("audit/") and key.endswith("_prompts")
        )
        panels = [("Reward and validation", [reward, *audits, *validation])]

    def is_constant(key: str) -> bool:
        return len({record[key] for record in records if key in record}) == 1

    key_of: dict[str, str] = {}
    for key, title in TITLES.items():
        if key in measured:
            key_of.setdefault(title, key)
    panels += [(title, [key]) for title, key in sorted(key_of.items(), key=lambda item: is_constant(item[1]))]
    return [(title, keys) for title, keys in panels if keys][:MOST_PANELS]


def _draw(axes: Axes, title: str, records: Records, keys: Sequence[str]) -> None:
    """Training metrics are smoothed, each step faint behind; validations are points."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    colours = (f"C{number}" for number in itertools.count(1))
    for key in keys:
        points = [(record["step"], record[key]) for record in records if math.isfinite(record.get(key, math.nan))]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if key.startswith("val/"):
            dashes, label = "--" if key.endswith("/reward") else "-", safe_text(validation_name(key), limit=60)
            axes.plot(steps, values, dashes, color=next(colours), linewidth=1.6, marker="o", markersize=4, label=label)
            continue
        is_audit = key.startswith("audit/")
        if not is_audit:
            axes.plot(steps, values, color="C0", alpha=0.25, linewidth=1)
        colour, dashes = (next(colours), ":") if is_audit else ("C0", "-")
        axes.plot(steps, smooth(values), dashes, color=colour, linewidth=2, label=safe_text(key, limit=60))
    axes.set_xlabel("step", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    if not axes.has_data():
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
        return
    # A constant is a flat line in the middle, instead of its rounding errors.
    low, high = axes.dataLim.intervaly
    room = LEAST_RANGE * max(abs(low), abs(high))
    if high - low < room:
        axes.set_ylim((low + high - room) / 2, (low + high + room) / 2)
    if len(keys) > 1:
        axes.legend(loc="best")


def smooth(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours under a Gaussian of a fortieth of the curve (0.5 to 10 steps),
    centred: an average over the past would draw rises too late."""
    sigma = min(10.0, max(0.5, len(values) / 40))
    reach = math.ceil(3 * sigma)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    sums, totals = (np.convolve(column, weights)[reach:-reach] for column in (values, np.ones(len(values))))
    return [float(value) for value in sums / totals]
