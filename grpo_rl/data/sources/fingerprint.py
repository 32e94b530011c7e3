"""The fingerprint of the data in a checkpoint: enough to notice that they were changed before the run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.data.sources.source import BadRow, Source

HASHED_ROWS = 16
"""Rows of each source whose content is part of the fingerprint, spread evenly."""

Fingerprint = list[dict[str, Any]]


def fingerprint_of(sources: Sequence[Source]) -> Fingerprint:
    """Name, size in bytes, number of rows, and SHA-256 over some rows, for each source.

    The name is without its folder, so data that were moved are the same data.
    """
    return [
        {
            "name": Path(source.name).name if source.num_bytes else source.name,
            "bytes": source.num_bytes,
            "rows": len(source),
            "sha256": _hash(source),
        }
        for source in sources
    ]


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return what changed, one line per source; none where the data are the same."""
    if len(before) != len(now):
        return [f"there were {len(before)} sources ({_names(before)}), now there are {len(now)} ({_names(now)})"]
    found = []
    for old, new in zip(before, now, strict=True):
        parts = [f"{key} was {old.get(key)}, now {new[key]}" for key in ("name", "bytes", "rows") if old.get(key) != new[key]]
        if not parts and old.get("sha256") != new["sha256"]:
            parts = ["some rows have another content"]
        if parts:
            found.append(f"{new['name']}: {', '.join(parts)}")
    return found


def _hash(source: Source) -> str:
    digest = hashlib.sha256()
    for index in np.unique(np.linspace(0, len(source) - 1, HASHED_ROWS, dtype=np.int64)).tolist():
        try:
            text = json.dumps(source.row(index), sort_keys=True, default=lambda value: type(value).__name__)
        except BadRow:
            text = "a bad row"
        except (TypeError, RecursionError) as error:
            text = type(error).__name__
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _names(fingerprint: Fingerprint) -> str:
    return ", ".join(str(entry.get("name")) for entry in fingerprint)
