"""metrics.jsonl: one JSON object per line, `step`, `time` (Unix seconds) and the metrics of that step."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from grpo_rl.errors import DataError
from grpo_rl.run_files import append_lines, read_lines, write_whole

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Strings for the numbers that JSON does not have."""
MOST_COUNT = 10**9
"""The largest step or length that is taken for one."""
MOST_NUMBER = 1e100
"""The largest finite number that is taken for a measurement: sums and squares of larger ones overflow."""
MOST_NAMES = 10_000
"""The most metrics of a run."""

_logger = logging.getLogger(__name__)


def jsonable(value: Any) -> Any:
    """Return `value` as something strict JSON can hold: NaN and infinities become strings, unknown objects their `str`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars as well as arrays
        return jsonable(value.tolist())
    return str(value)


def dump_line(record: Mapping[str, Any]) -> str:
    """Return `record` as one line of JSON, ASCII only, so that no reader stumbles over a surrogate or U+2028."""
    return json.dumps(jsonable(record), allow_nan=False) + "\n"


class MetricsFile:
    """Appends to metrics.jsonl, for any thread.

    A disk that fails costs no step: lines wait in memory until there is room again. Warnings report the failure and its end.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = _logger.warning) -> None:
        self.path = path
        self._warn = warn
        self._waiting: list[str] = []
        self._is_failing = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of `step`, after those that are still waiting; all are on the disk before it returns, or wait."""
        self._waiting.append(dump_line({"step": step, "time": round(time.time(), 3), **metrics}))
        try:
            self._write()
        except OSError as error:
            if not self._is_failing:
                self._warn(
                    f"{self.path} cannot be written: {error.strerror or error}; metrics are kept in memory, training goes on"
                )
            self._is_failing = True
            return
        if self._is_failing:
            self._warn(f"{self.path} can be written again; no step is missing in it")
        self._is_failing = False

    def flush(self) -> None:
        """Make every line that could be written survive a power cut. Raises OSError if the disk refuses that."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, so that a resumed run continues its own curve."""
        records = [record for record in read_records(self.path) if record["step"] <= step]
        write_whole(self.path, "".join(map(dump_line, records)), durable=True)

    def close(self) -> None:
        """Write what is waiting, if that is possible now; say how many steps are lost."""
        with contextlib.suppress(OSError):
            self._write()
        if self._waiting:
            self._warn(f"{self.path}: {len(self._waiting)} steps could not be written and are lost")

    def _write(self) -> None:
        append_lines(self.path, self._waiting)
        self._waiting.clear()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl as `{"step": ..., "time": ..., name: value}`, in order of steps.

    Lines of one step are merged, the later one wins. A broken line (a process killed while writing) is
    left out. An absent file is an empty list. Raises DataError for a file that cannot be read, or has too many names.
    """
    by_step: dict[int, dict[str, float]] = {}
    for record in read_records(path):
        numbers = {key: NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
        by_step.setdefault(record["step"], {}).update({key: value for key, value in numbers.items() if is_number(value)})
    if len({key for record in by_step.values() for key in record}) > MOST_NAMES:
        raise DataError(f"{path}: has more than {MOST_NAMES:,} metrics, which no run has")
    return [by_step[step] for step in sorted(by_step)]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are objects with a `step`, in their order; others are left out. An absent file has none.

    Raises DataError for a file that cannot be read.
    """
    if not path.exists():
        return []
    return [record for _, record in read_lines(path) if record is not None and is_count(record.get("step"))]


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and (abs(value) <= MOST_NUMBER or not math.isfinite(value))


def is_count(value: Any) -> bool:
    """Return whether a value of JSON is a whole number from 0 that a step, a length or a place can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT
