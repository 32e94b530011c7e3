"""The validation numbers that every screen shows, with their names, and the reward if it differs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from grpo_rl.telemetry.metrics.metrics_file import Metrics, Records

Point = tuple[float, float]  # a step, and a value
LOSSES = {
    "val/loss": "validation loss",
    "val/perplexity": "validation perplexity",
    "val/accuracy": "validation accuracy",
    "val/auc": "validation AUC of good against bad",
    "val/calibration_error": "validation calibration error",
    "val/brier": "validation Brier score",
    "val/margin": "validation margin",
    "train/loss": "training loss",
}  # metrics of runs on rows, with their names in tables of results


def validation_keys(metrics: Metrics) -> list[str]:
    """Return the keys `val/<source>/mean@N`; a source may contain slashes."""
    places = {
        key: key.rsplit("/", 1)[0] for key in metrics if key.startswith("val/") and key.rpartition("/")[2].startswith("mean@")
    }
    all_places = set(places.values())
    return [
        key
        for key, place in places.items()
        if place.rsplit("/", 1)[0] not in all_places or f"{place}/response_length" in metrics
    ]


def validation_score(metrics: Metrics) -> float | None:
    """Return the mean over sources of `val/<source>/mean@N`; None on a step without validation."""
    values = [metrics[key] for key in validation_keys(metrics)]
    return statistics.fmean(values) if values else None


def shown_keys(records: Records) -> list[str]:
    """Return the keys `val/<source>/mean@N`, with `val/<source>/reward` if that ever differed."""
    keys = dict.fromkeys(key for record in records for key in validation_keys(record))
    names = []
    for key in keys:
        reward = f"{key.rsplit('/', 1)[0]}/reward"
        differs = any(abs(record[key] - record.get(reward, record[key])) > 1e-9 for record in records if key in record)
        names += [key, reward] if differs else [key]
    return names


def validation_name(key: str) -> str:
    """`val/sums/mean@4` is `validation sums/mean@4` for people."""
    return f"validation {key.removeprefix('val/')}"


def results(records: Records) -> list[tuple[str, Point, Point]]:
    """Return name, first and last point of all that a run changed."""
    validated = {key: [(record["step"], record[key]) for record in records if key in record] for key in shown_keys(records)}
    changes = [(validation_name(key), points[0], points[-1]) for key, points in validated.items() if points]
    return changes + other_results(records)


def other_results(records: Records) -> list[tuple[str, Point, Point]]:
    """As `results`, without validation of prompts: losses on rows and the training reward, whose points are
    the means of the first and last training steps, five if there are ten."""
    changes = []
    for key, name in LOSSES.items():
        if points := [(record["step"], record[key]) for record in records if key in record]:
            changes.append((name, points[0], points[-1]))
    rewards = [(record["step"], record["reward/mean"]) for record in records if "reward/mean" in record]
    if len(rewards) > 1:
        k = min(5, len(rewards) // 2)
        start, end = (statistics.fmean(value for _, value in part) for part in (rewards[:k], rewards[-k:]))
        name = f"training reward (first and last {k} steps)" if k > 1 else "training reward (first and last step)"
        changes.append((name, (rewards[0][0], start), (rewards[-1][0], end)))
    return changes


def logged_value(record: Mapping[str, Any]) -> float:
    """Return a response's value in `mean@N`: its part `acc`, else its reward; 0 if that failed."""
    value = (record.get("reward_parts") or {}).get("acc", record.get("reward"))
    return float(value) if isinstance(value, int | float) and not record.get("failure") else 0.0
