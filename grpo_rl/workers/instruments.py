"""Instruments around a worker's calls: memory, time, operations, traces of torch's profiler."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = {
    "update": "update",
    "logprobs": "logprobs",
    "values": "values",
    "scores": "scores",
    "begin_weight_sync": "weight_sync",
    "next_bucket": "weight_sync",
    "end_weight_sync": "weight_sync",
    "start_weight_update": "weight_sync",
    "load_bucket": "weight_sync",
    "finish_weight_update": "weight_sync",
    "submit": "sampling",
    "report": "sampling",
    "poll": "sampling",
    "save": "save",
}
PROFILED = frozenset({"update", "logprobs", "values", "scores"})
GIB = 2**30


@dataclass(slots=True)
class PhaseMeasure:
    """Seconds, operations, and the highest memory, in bytes by its kind."""

    seconds: float = 0.0
    flops: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)


class Instruments:
    """Calls that run side by side are measured together, under the first one's phase."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder: Path | None = None
        self._measures: dict[str, PhaseMeasure] = {}
        self._num_traces: dict[str, int] = {}
        self._lock = threading.Lock()
        self._running = 0

    def observe(self, folder: str | None) -> None:
        """Write traces into this folder from the next call on; None: no more."""
        self._folder = None if folder is None else Path(folder)
        self._num_traces.clear()

    def measures(self) -> dict[str, PhaseMeasure]:
        """Return what each phase took since the last call."""
        with self._lock:
            taken, self._measures = self._measures, {}
        return taken

    @contextlib.contextmanager
    def around(self, worker: Any, method: str) -> Iterator[None]:
        phase = PHASES.get(method)
        if phase is None:
            yield
            return
        with self._lock:
            is_only_call = self._running == 0
            self._running += 1
        began = time.perf_counter()
        if is_only_call:
            _reset_peak()
        try:
            with self._traced(method):
                yield
        finally:
            with self._lock:
                self._running -= 1
                measure = self._measures.setdefault(phase, PhaseMeasure())
                measure.seconds += time.perf_counter() - began
                work = getattr(worker, "work", None)
                measure.flops += 0.0 if work is None else work.take()
                if is_only_call:
                    measure.memory = {kind: max(size, measure.memory.get(kind, 0)) for kind, size in _peak().items()}

    @contextlib.contextmanager
    def _traced(self, method: str) -> Iterator[None]:
        if (folder := self._folder) is None or method not in PROFILED:
            yield
            return
        from torch.profiler import ProfilerActivity, profile, record_function

        number = self._num_traces[method] = self._num_traces.get(method, 0) + 1
        activities = [ProfilerActivity.CPU] + ([] if _cuda() is None else [ProfilerActivity.CUDA])
        with profile(activities=activities, profile_memory=True) as profiler, record_function(f"{self.name}.{method}"):
            yield
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"{self.name}.{method}{f'.{number}' if number > 1 else ''}.json.gz"))


def device_name() -> str | None:
    cuda = _cuda()
    return None if cuda is None else str(cuda.get_device_name())


def _cuda() -> Any:
    """Return `torch.cuda` of a process that uses a GPU, else None: a look must not make it use one."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _reset_peak() -> None:
    if (cuda := _cuda()) is not None:
        cuda.reset_peak_memory_stats()
        return
    # Linux forgets the highest resident size so far (proc(5), clear_refs); if that is not allowed it is the whole run's.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> dict[str, int]:
    """Return the highest memory since the last reset, in bytes: torch's, or the resident size."""
    if (cuda := _cuda()) is not None:
        return {"allocated": int(cuda.max_memory_allocated()), "reserved": int(cuda.max_memory_reserved())}
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return {"resident": int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024}
    return {}
