"""The number of a validation that every screen shows, under its name, and the reward beside it where that is another number."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def validation_keys(metrics: Mapping[str, float]) -> list[str]:
    """Return the keys `val/<source>/mean@N` in `metrics`; a source may itself contain slashes.

    Not `val/<source>/<function>/mean@N`, which stands beside that of its source and has no length of its own.
    """
    means = [key for key in metrics if key.startswith("val/") and key.rsplit("/", 1)[-1].startswith("mean@")]
    places = {key.rsplit("/", 1)[0] for key in means}
    return [
        key
        for key in means
        if (place := key.rsplit("/", 1)[0]).rsplit("/", 1)[0] not in places or f"{place}/response_length" in metrics
    ]


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """Return the mean of `val/<source>/mean@N` over the sources, or None on a step without validation."""
    values = [metrics[key] for key in validation_keys(metrics)]
    return statistics.fmean(values) if values else None


def shown_keys(records: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the keys `val/<source>/mean@N`, and after each `val/<source>/reward` where it was ever another number."""
    keys = dict.fromkeys(key for record in records for key in validation_keys(record))
    shown = []
    for key in keys:
        reward = f"{key.rsplit('/', 1)[0]}/reward"
        differs = any(abs(record[key] - record.get(reward, record[key])) > 1e-9 for record in records if key in record)
        shown += [key, reward] if differs else [key]
    return shown


def validation_name(key: str) -> str:
    """Return the name of a key of validation for people: `val/sums/mean@4` is `validation sums/mean@4`."""
    return f"validation {key.removeprefix('val/')}"


def logged_value(record: Mapping[str, Any], part: str = "acc") -> float:
    """Return the value of a logged response in `mean@N`: its part `acc` where the reward gives one, else its reward.

    0 where its reward failed. Another `part` that no reward gives, such as "", returns the reward.
    """
    value = (record.get("reward_parts") or {}).get(part, record.get("reward"))
    return float(value) if isinstance(value, int | float) and not record.get("failure") else 0.0
