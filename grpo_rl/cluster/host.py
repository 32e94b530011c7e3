"""The one Ray actor class: a process that hosts a plain worker object and never loses an error's cause."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_rl import faults
from grpo_rl.cluster.memory import out_of_memory
from grpo_rl.config.hiding import HidingStream
from grpo_rl.config.secrets import redact, remember, remember_environment

BEATS = "beats"
"""The thread in which a process answers `beat` while others work."""
PRELOADED = "everything is imported"
"""What a spare says in its log when it is ready."""
# Where a spare may not have its right to the processor back, a new process is soon further.
PRELOADED_S = 2.0


class RemoteError(Exception):
    """An exception inside a worker, as text: Ray drops causes that it cannot pickle."""

    def __init__(self, kind: str, message: str, trace: str, user_error: bool) -> None:
        super().__init__(kind, message, trace, user_error)
        self.kind = kind
        self.message = message
        self.trace = trace
        self.user_error = user_error
        """The worker raised one of this package's own errors, whose message is complete."""

    def __str__(self) -> str:
        return self.message if self.user_error else f"{self.kind}: {self.message}"


class Host:
    """Runs in a process of its own; `build` makes the worker there, `call` calls it.

    The environment is set before anything heavy is imported, because thread counts and visible devices
    are read when torch is loaded.
    """

    def __init__(self, name: str, log_file: str | None, environment: dict[str, str], secret: Sequence[str] = ()) -> None:
        os.environ.update(environment)
        # Imports make a million objects that stay, and a collection looks at all of them again and again.
        gc.disable()
        remember_environment()
        remember(secret)
        self._worker: Any = None
        self._preloading: threading.Thread | None = None
        self._has_place = False
        self._lock = threading.Lock()
        faults.arm()
        self._go_by(name, log_file)

    def become(self, name: str, log_file: str | None) -> None:
        """Go by this name from now on, and print to this log.

        Raises RuntimeError for a process that is still importing: who imports the same from another thread may get half
        of a module.
        """
        with self._lock:
            if self._preloading is not None:
                _schedule("SCHED_OTHER")
                self._preloading.join(PRELOADED_S)
                if self._preloading.is_alive():
                    raise RuntimeError("still importing")
            self._has_place = True
        self._go_by(name, log_file)

    def modules(self) -> list[str]:
        """All that is imported here, in the order in which it was."""
        return list(sys.modules)

    def preload(self, modules: list[str]) -> None:
        """Import all of these, while a core is idle, unless it has a place already."""
        with self._lock:
            if not self._has_place:
                self._preloading = threading.Thread(target=_import_all, args=(modules,), name="preload", daemon=True)
                self._preloading.start()

    def _go_by(self, name: str, log_file: str | None) -> None:
        self.name = name
        faults.tell(worker=name)
        if log_file is not None:
            _redirect_output(Path(log_file))

    def where(self) -> tuple[str, int, int]:
        """This process's node address, its id, and a port that is free there now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), os.getpid(), port

    def beat(self, wait_s: float) -> tuple[str, float, float | None] | None:
        """After `wait_s`, what the worker is doing: what, for how many seconds, and the longest it ever took; None: nothing.

        That it answers shows that the process runs Python; a worker that cannot tell what it does only shows that.
        """
        time.sleep(wait_s)
        activity = getattr(self._worker, "activity", None)
        return None if activity is None else activity()

    def build(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make the worker."""
        try:
            self._worker = _guard(factory, args, kwargs)
        finally:
            gc.enable()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker."""
        return _guard(getattr(self._worker, method), args, kwargs)

    def call_told(self, told: dict[str, Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """`call`, with what the controller tells the fault points (see `faults`)."""
        faults.tell(**{**told, "worker": self.name})
        return self.call(method, *args, **kwargs)

    def call_pair(self, method: str, *args: Any) -> tuple[bool, Any]:
        """Whether the result is something, and the result: two objects, so that a caller can pass the second on unread."""
        value = self.call(method, *args)
        return value is not None, value


def _guard(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from grpo_rl.errors import GrpoRlError

    try:
        return function(*args, **kwargs)
    except Exception as found:
        trace = redact(traceback.format_exc())
        print(trace, file=sys.stderr, flush=True)
        error = out_of_memory(found) or found
        raise RemoteError(type(error).__name__, redact(str(error)), trace, isinstance(error, GrpoRlError)) from None


def _import_all(modules: list[str]) -> None:
    _schedule("SCHED_IDLE", [threading.get_native_id()])
    for name in modules:
        if name not in sys.modules:
            # Whoever needs it imports it again, and hears why that does not work.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    print(PRELOADED, flush=True)


def _schedule(policy: str, threads: Sequence[int] | None = None) -> None:
    """Have these threads of this process, or all, scheduled by this policy, on Linux and as far as that is permitted."""
    with contextlib.suppress(OSError, AttributeError):
        # Threads that a library starts while it is imported take the policy of whoever imports it.
        for thread in threads if threads is not None else map(int, os.listdir("/proc/self/task")):
            os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))


def _redirect_output(log_file: Path) -> None:
    """Everything this process and its children print goes to its log, libraries written in C included.

    Secrets are hidden in what Python prints here; in the rest they are hidden at the end of the run.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if not isinstance(sys.stdout, HidingStream):  # a process may get another name, and another log
        sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)
