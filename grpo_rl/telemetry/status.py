"""status.json: what a run is doing, for a look from outside."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_rl.config.secrets import redact
from grpo_rl.errors import DataError, Preempted, exit_code_of, headline
from grpo_rl.processes.family import started
from grpo_rl.run_files import read_json, write_whole
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, is_count, jsonable

FINAL_WAIT_S = 5.0
MOST_TIME = 10**11  # Unix seconds that a date can have


class Status:
    def __init__(self, path: Path | None = None, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`fields`: those of an ended process."""
        self.path = path
        self._fields: JsonObject = {
            "state": "running",
            "phase": "start",
            "step": 0,
            "total": None,
            "last_commit": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "restarts": {},
            "error": None,
            **fields,
        }
        self._changed = threading.Condition()
        self._version = self._written = 0
        self.ended_with: int | None = None  # exit code; None while the run goes on
        if path is not None:
            threading.Thread(target=self._run, name="status", daemon=True).start()
            self.update()

    def update(self, **fields: Any) -> None:
        with self._changed:
            self._fields |= fields
            self._fields["time"] = round(time.time(), 3)
            self._version += 1
            self._changed.notify_all()

    @property
    def has_begun(self) -> bool:
        return bool(self._fields["step"])

    def where(self) -> str:
        return f"step {self._fields['step']}, {self._fields['phase']}" if self._fields["step"] else str(self._fields["phase"])

    def going_on(self) -> str:
        """Return where the same command would go on after a failure."""
        commit = self._fields["last_commit"]
        if commit is None:
            return "no step is saved yet (trainer.save_freq): the same command begins anew"
        return f"the same command goes on from step {commit}, the last commit"

    def count_restart(self, worker: str, pid: int | None) -> None:
        """Count a lost worker's restart (None), or note its new process's id. From any thread."""
        with self._changed:
            restarts = self._fields["restarts"]
            counted = {worker: restarts.get(worker, 0) + (pid is None)}
            self.update(restarts=restarts | counted, workers={**self._fields.get("workers", {}), worker: pid})

    def end(self, error: BaseException | None = None) -> None:
        """Within FINAL_WAIT_S. The first call decides: what fails during shutdown changes nothing."""
        with self._changed:
            if self.ended_with is not None:
                return
            self.ended_with = 0 if error is None else exit_code_of(error)
        if error is None:
            self.update(state="done", phase="end")
        else:
            details = {"type": type(error).__name__, "message": headline(error), "exit_code": self.ended_with}
            self.update(state="preempted" if isinstance(error, Preempted) else "failed", error=details)
        if self.path is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._written >= self._version, timeout=FINAL_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._written >= self._version:
                    self._changed.wait(60.0)
                version, text = self._version, json.dumps(jsonable(self._fields), indent=1)
            self._write(text)
            with self._changed:
                self._written = version
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        assert self.path is not None
        with suppress(OSError):  # the next change tries again
            write_whole(self.path, redact(text) + "\n")


_TEXT, _OBJECT = (lambda value: isinstance(value, str)), (lambda value: isinstance(value, dict))
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("state", "phase", "host"), _TEXT),
    **dict.fromkeys(("step", "total", "last_commit"), is_count),
    **dict.fromkeys(("restarts", "workers", "error", "engines"), _OBJECT),
    "pid": lambda value: is_count(value) and value > 0,
    "time": lambda value: isinstance(value, int | float) and 0 <= value < MOST_TIME,
}


def read_status(folder: Path) -> JsonObject:
    """Return a run's status without malformed fields; empty if it has none."""
    with suppress(DataError):
        status = read_json(folder / "status.json")
        if isinstance(status, dict):
            return {name: value for name, value in status.items() if name not in _FORMS or value is None or _FORMS[name](value)}
    return {}


def current_status(folder: Path, state: str | None = None) -> JsonObject:
    """As `read_status`, with this state, or `lost` if its process is gone."""
    status = read_status(folder)
    if state is not None or is_gone(status):
        status["state"] = state or "lost"
    return status


def is_gone(status: Mapping[str, Any]) -> bool:
    """Return whether a running run has no process any more, which shows on the same machine only."""
    pid = status.get("pid")
    if status.get("state") != "running" or status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return started(pid) is None
