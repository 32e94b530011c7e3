"""Fault points: named places where a test can make this very process die, freeze, slow down or fail.

`GRPO_FAULT` arms them in every process: entries `POINT:ACTION[=VALUE][@CONDITION,...]` with `;` between them,
for example `actor.update.mid_backward:kill9@step=3,rank=1;ckpt.before_rename:enospc@n=2`. All conditions must
hold: `KEY=VALUE` on a fact that the point has (`POINTS`; all have `worker` and `step`), `n=N` for the Nth
time that the rest holds in this process, and `once` for a single time in all processes and restarts, noted in
the folder `GRPO_FAULT_STATE`. That folder's `fired.jsonl` lists what was done.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError

POINTS = {
    "collection.part": "a part of the prompts is about to be answered by the initial policy (number)",
    "driver.step": "the controller begins a training step",
    "driver.phase": "a phase of the step begins (phase)",
    "driver.response": "a response has come in while others are still sampled (count)",
    "driver.log": "the step is done, and its metrics are about to be written",
    "driver.reference": "the reference's log-probs of a batch of rows have been computed (part, row)",
    **{
        f"{role}.update.{point}": f"{rank} {what}"
        for role, rank in (
            ("actor", "an actor rank"),
            ("critic", "a critic rank"),
            ("reward_model", "a reward model's rank"),
        )
        for point, what in (
            ("start", "begins an update (rank)"),
            ("forward", "is about to train on a micro-batch (rank, micro_batch, rollouts)"),
            ("loss", "has the loss of a micro-batch (rank, micro_batch); takes `nan`"),
            ("mid_backward", "has run the backward pass of a micro-batch (rank, micro_batch)"),
            ("before_optimizer", "has its gradients (rank)"),
            ("after_optimizer", "has taken the optimizer step (rank)"),
        )
    },
    "actor.weights.bucket": "an actor rank is about to hand out a bucket of weights (rank)",
    "reference.logprobs": "a reference rank is asked for log-probs",
    "rollout.submitted": "a replica has taken requests, and is about to read the prompts",
    "rollout.step": "a replica is about to take one step of its engine",
    "rollout.weights.bucket": "a replica is about to load a bucket of weights",
    "rollout.weights.before_finish": "a replica has all weights, and they are not live yet",
    "ckpt.before_write": "a checkpoint's temporary folder is there, and empty",
    "ckpt.call": "a save is about to change the disk (call: mkdir, open, write, fsync, rename, unlink or rmdir; file)",
    "ckpt.before_rename": "a checkpoint is written, and has not got its name yet",
    "ckpt.after_rename": "a checkpoint has its name, and old ones are still there",
}

_SPEC = re.compile(
    r"(?P<point>[\w.]+):(?P<action>\w+)(=(?P<value>[\d.]+))?(@(?P<conditions>(\w+=[^,=]+|once)(,(\w+=[^,=]+|once))*))?"
)
_ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}
_FOREVER_S = 10**6


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


_DIRECT: dict[str, Callable[[float], None]] = {
    "kill9": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    # Called through PyDLL the C function keeps the interpreter's lock: no other thread of this process runs.
    "hold_gil": lambda value: ctypes.PyDLL(None).sleep(int(value)),
    "loop": _spin,
    "delay": time.sleep,
}
_DEFAULTS = {"hold_gil": _FOREVER_S, "loop": _FOREVER_S}
ACTIONS = (*_DIRECT, "raise", "nan", *_ERRNO)


class InjectedFault(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(slots=True)
class _Entry:
    text: str
    point: str
    action: str
    value: float
    conditions: dict[str, str]
    nth: int | None = None
    once: bool = False
    hits: int = 0


VARIABLES = ("GRPO_FAULT", "GRPO_FAULT_STATE")

_armed: list[_Entry] = []
_state: Path | None = None
_context: dict[str, Any] = {}
_lock = threading.Lock()
_unread = bool(os.environ.get("GRPO_FAULT"))


def fault_point(name: str, **told: Any) -> str | None:
    """Do what is armed here; return `nan` for the caller to do. Raises InjectedFault or OSError."""
    for entry in _entries():
        context = _context | told
        if entry.point == name and _is_due(entry, context):
            _note(entry, context)
            if entry.action == "nan":
                return entry.action
            if entry.action == "raise":
                raise InjectedFault(f"injected at {entry.point}")
            if code := _ERRNO.get(entry.action):
                raise OSError(code, f"{os.strerror(code)} (injected)", entry.point)
            _DIRECT[entry.action](entry.value)
    return None


def _entries() -> list[_Entry]:
    if _unread:
        arm()
    return _armed


def _is_due(entry: _Entry, context: dict[str, Any]) -> bool:
    if any(str(context.get(key)) != value for key, value in entry.conditions.items()):
        return False
    with _lock:
        entry.hits += 1
        if entry.nth is not None and entry.hits != entry.nth:
            return False
    if not entry.once:
        return True
    # Noted before it is done, as this process may end by it.
    assert _state is not None
    try:
        (_state / sha256(entry.text.encode()).hexdigest()[:16]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _note(entry: _Entry, context: dict[str, Any]) -> None:
    if _state is None:
        return
    facts = {key: str(value) for key, value in context.items()}
    with (_state / "fired.jsonl").open("a") as file:
        file.write(json.dumps({"fault": entry.text, "pid": os.getpid(), "time": time.time(), **facts}) + "\n")


def tell(**context: Any) -> None:
    """Set facts that conditions can name at every later point of this process."""
    if _entries():
        _context.update(context)


def told() -> dict[str, Any] | None:
    """Return the facts that this process was told; None if nothing is armed."""
    return dict(_context) if _entries() else None


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def arm(spec: str | None = None, state: str | None = None) -> None:
    """Arm what `spec` says; the environment's faults if it is None. Raises ConfigError."""
    global _armed, _state, _unread
    if spec is None:
        spec, state = os.environ.get("GRPO_FAULT", ""), os.environ.get("GRPO_FAULT_STATE")
    _unread, _armed, _state = False, [], Path(state) if state else None
    _context.clear()
    entries = [_parse(text.strip(), state) for text in spec.split(";") if text.strip()]
    if _state is not None and not _state.is_dir():
        raise ConfigError(f"GRPO_FAULT_STATE={state}: not a folder; make it")
    _armed = entries


def _parse(text: str, state: str | None) -> _Entry:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(f"GRPO_FAULT: {text!r} is not POINT:ACTION[=NUMBER][@KEY=VALUE,n=N,once]")
    point, action, value = match["point"], match["action"], match["value"]
    conditions = dict(word.partition("=")[::2] for word in (match["conditions"] or "").split(",") if word)
    if point not in POINTS:
        raise ConfigError(f"GRPO_FAULT: no fault point {point!r} in {text!r}; there are {', '.join(POINTS)}")
    if action not in ACTIONS:
        raise ConfigError(f"GRPO_FAULT: no action {action!r} in {text!r}; there are {', '.join(ACTIONS)}")
    if (value is not None) != (action == "delay") and action not in _DEFAULTS:
        raise ConfigError(f"GRPO_FAULT: {text!r}: delay needs a number, and {', '.join(_DEFAULTS)} may have one")
    once, nth = conditions.pop("once", None) is not None, int(conditions.pop("n", 0)) or None
    if once and not state:
        raise ConfigError(f"GRPO_FAULT: `once` in {text!r} needs a folder to remember it in: GRPO_FAULT_STATE")
    return _Entry(text, point, action, float(_DEFAULTS.get(action, 0) if value is None else value), conditions, nth, once)
