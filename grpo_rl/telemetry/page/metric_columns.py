"""Numbers of a run as the page draws them: metrics by columns, rewards and validation with intervals, the timeline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.telemetry.diagnosis.alarms import ALARM
from grpo_rl.telemetry.metrics.timeline import Interval, read_timeline
from grpo_rl.telemetry.page.rollout_chunks import rounded

Z95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""
MOST_POINTS = 4000
"""The most steps of which a curve has points; of longer runs every second, third, ... step is drawn."""
TIMELINE_STEPS = 200
"""The last steps whose intervals are drawn."""


def columns(records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the metrics as one list per name over the steps, with the tokens and seconds of training until each step.

    Seconds are those that steps took: a pause between two parts of a resumed run is not in them.
    """
    every = max(1, math.ceil(len(records) / MOST_POINTS))
    tokens = seconds = 0.0
    progress = []
    for record in records:
        tokens += _finite(record.get("perf/total_num_tokens"))
        seconds += _finite(record.get("timing_s/step"))
        progress.append((tokens, seconds))
    # Steps with a validation are kept: there are few of them.
    chosen = [
        place
        for place, record in enumerate(records)
        if place % every == 0 or place == len(records) - 1 or any(name.startswith("val/") for name in record)
    ]
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "time"))
    return {
        "every": every,
        "steps": [int(records[place]["step"]) for place in chosen],
        "tokens": [round(progress[place][0]) for place in chosen],
        "seconds": [round(progress[place][1], 2) for place in chosen],
        "columns": {
            name: [rounded(records[place].get(name)) for place in chosen] for name in names if not name.startswith(ALARM)
        },
    }


def alarms(records: Sequence[Mapping[str, float]]) -> list[list[Any]]:
    """Return (step, name) of every illness at the step in which it was first seen."""
    return [[int(record["step"]), name.removeprefix(ALARM)] for record in records for name in record if name.startswith(ALARM)]


def interval(by_prompt: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the mean over prompts, and the bounds of its 95 % interval.

    Prompts are the independent draws, responses to one prompt are not: the variance is that of the means of prompts
    (Miller, "Adding Error Bars to Evals", section 2.2). Where every prompt is all right or all wrong it is Wilson's
    interval (Wilson 1927), which is also right where all of them are.
    """
    means = [statistics.fmean(rewards) for rewards in by_prompt]
    mean, n = statistics.fmean(means), len(means)
    if all(one in (0.0, 1.0) for one in means):
        middle = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
        # At the ends the bound is exactly 0 or 1, up to rounding.
        return mean, max(0.0, round(middle - half, 12)), min(1.0, round(middle + half, 12))
    half = Z95 * statistics.stdev(means) / math.sqrt(n) if n > 1 else math.nan
    if all(0.0 <= one <= 1.0 for one in means):  # shares stay shares
        return mean, max(0.0, mean - half), min(1.0, mean + half)
    return mean, mean - half, mean + half


def bands(index: Mapping[str, Any], kind: str) -> dict[str, dict[str, list[Any]]]:
    """Return mean and 95 % interval of the reward by step for each source, from an index of rollouts.

    `kind` is rollouts or val. Of several sources `all` is the mean over all prompts.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for entry in sorted((one for one in index["steps"] if one["kind"] == kind), key=lambda one: one["step"]):
        by_source: dict[str, list[list[float]]] = {}
        for _, source, rewards, *_ in entry["groups"]:
            known = [reward for reward in rewards if reward is not None]
            if known:
                by_source.setdefault(index["sources"][source], []).append(known)
        if len(by_source) > 1:
            by_source["all"] = [rewards for groups in list(by_source.values()) for rewards in groups]
        for source, groups in by_source.items():
            series = found.setdefault(source, {"steps": [], "mean": [], "low": [], "high": [], "prompts": []})
            mean, low, high = interval(groups)
            for name, value in (("mean", mean), ("low", low), ("high", high)):
                series[name].append(rounded(value))
            series["steps"].append(entry["step"])
            series["prompts"].append(len(groups))
    return found


def change(index: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """Return how the validation reward of a source changed between the first and the last validation, by prompt.

    The interval is that of the mean of the differences of prompts that both have: pairing takes out how hard each is.
    """
    entries = sorted((one for one in index["steps"] if one["kind"] == "val"), key=lambda one: one["step"])
    if len(entries) < 2:
        return None
    ends = [_by_prompt(entries[place], None if source == "all" else index["sources"].index(source)) for place in (0, -1)]
    both = [(ends[0][prompt], ends[1][prompt]) for prompt in ends[0] if prompt in ends[1]]
    if len(both) < 2:
        return None
    differences = [after - before for before, after in both]
    mean = statistics.fmean(differences)
    if len(set(differences)) == 1:  # no variance to estimate an interval from
        return {"mean": rounded(mean), "low": None, "high": None, "prompts": len(both)}
    half = Z95 * statistics.stdev(differences) / math.sqrt(len(both))
    limit = 1.0 if all(0.0 <= value <= 1.0 for pair in both for value in pair) else math.inf
    low, high = max(-limit, mean - half), min(limit, mean + half)
    return {"mean": rounded(mean), "low": rounded(low), "high": rounded(high), "prompts": len(both)}


def timeline(path: Path) -> dict[str, Any] | None:
    """Return the intervals of the last steps as rows of numbers; None where none were recorded."""
    intervals: list[Interval] = read_timeline(path, TIMELINE_STEPS)
    if not intervals:
        return None
    roles = list(dict.fromkeys(one.role for one in intervals))
    kinds = list(dict.fromkeys(one.what for one in intervals))
    rows = [
        [one.step, roles.index(one.role), kinds.index(one.what), round(one.start, 3), round(one.end, 3)] for one in intervals
    ]
    return {"roles": roles, "kinds": kinds, "rows": rows}


def _by_prompt(entry: Mapping[str, Any], source: int | None) -> dict[int, float]:
    found = {}
    for prompt, of_source, rewards, *_ in entry["groups"]:
        known = [reward for reward in rewards if reward is not None]
        if known and source in (None, of_source):
            found[prompt] = statistics.fmean(known)
    return found


def _finite(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
