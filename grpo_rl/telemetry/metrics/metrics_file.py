"""metrics.jsonl: one JSON object per line, `step`, `time` (Unix seconds) and the metrics of that step."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from grpo_rl.errors import DataError
from grpo_rl.run_files import append_lines, read_lines, write_whole

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # what JSON has no numbers for
MOST_COUNT = 10**9  # of a step or length
MOST_NUMBER = 1e100  # sums and squares of larger ones overflow
MOST_NAMES = 10_000

Metrics = Mapping[str, float]
Records = Sequence[Metrics]
JsonObject = dict[str, Any]
Say = Callable[[str], None]

_logger = logging.getLogger(__name__)


def jsonable(value: Any) -> Any:
    """Return what strict JSON can hold: NaN and infinities become strings, unknown objects their `str`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars as well as arrays
        return jsonable(value.tolist())
    return str(value)


def dump_line(record: Mapping[str, Any]) -> str:
    """Return ASCII only: no reader stumbles over a surrogate or U+2028."""
    return json.dumps(jsonable(record), allow_nan=False) + "\n"


class LineFile:
    """Appends from any thread. If the disk fails, lines wait in memory, and a warning says so."""

    def __init__(self, path: Path, warn: Say = _logger.warning) -> None:
        self.path = path
        self._warn = warn
        self._waiting: list[str] = []
        self._is_failing = False
        self._lock = threading.Lock()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """When this returns the records are on the disk, or wait."""
        with self._lock:
            self._waiting += map(dump_line, records)
            try:
                append_lines(self.path, self._waiting)
            except OSError as error:
                if not self._is_failing:
                    reason = error.strerror or error
                    self._warn(f"{self.path} cannot be written: {reason}; its lines are kept in memory, training goes on")
                self._is_failing = True
                return
            self._waiting.clear()
            if self._is_failing:
                self._warn(f"{self.path} can be written again; no line is missing in it")
            self._is_failing = False


class MetricsFile(LineFile):
    def log(self, step: int, metrics: Metrics) -> None:
        self.append([{"step": step, "time": round(time.time(), 3), **metrics}])

    def flush(self) -> None:
        """Make written lines survive a power cut. Raises OSError if the disk refuses."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Drop later steps, so that a resumed run continues its own curve."""
        records = [record for record in read_records(self.path) if record["step"] <= step]
        write_whole(self.path, "".join(map(dump_line, records)), durable=True)

    def close(self) -> None:
        """Write what waits, if possible; warn of lost steps."""
        self.append([])
        if self._waiting:
            self._warn(f"{self.path}: {len(self._waiting)} steps could not be written and are lost")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return `{"step": ..., "time": ..., name: value}` in order of steps; of two lines of a step the later
    one wins. Broken lines (a process killed while writing) are left out. Raises DataError if the file, which
    may be absent, cannot be read or has too many names."""
    by_step: dict[int, dict[str, float]] = {}
    for record in read_records(path):
        numbers = ((key, number_from_text(value)) for key, value in record.items())
        by_step.setdefault(record["step"], {}).update((key, value) for key, value in numbers if is_number(value))
    if len({key for record in by_step.values() for key in record}) > MOST_NAMES:
        raise DataError(f"{path}: has more than {MOST_NAMES:,} metrics, which no run has")
    return [by_step[step] for step in sorted(by_step)]


def read_records(path: Path) -> list[JsonObject]:
    """Return the lines with a `step`. Raises DataError if the file, which may be absent, cannot be read."""
    if not path.exists():
        return []
    return [record for _, record in read_lines(path) if record is not None and is_count(record.get("step"))]


def number_from_text(value: Any) -> Any:
    """Return the number for the text that stands for it in JSON, any other value as it is."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and (abs(value) <= MOST_NUMBER or not math.isfinite(value))


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT
