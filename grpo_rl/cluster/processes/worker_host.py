"""The one Ray actor class: a process that hosts a plain worker object and never loses an error's cause."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

from grpo_rl import faults
from grpo_rl.config.secrets import HidingStream, redact, remember, remember_environment
from grpo_rl.errors import GrpoRlError, OutOfMemory
from grpo_rl.machine_memory import machine_memory
from grpo_rl.workers.instruments import InstrumentOrder, Instruments, PhaseMeasure, device_name

BEATS, LOOKS = "beats", "looks"
"""The threads in which a process answers `beat` and `doing` while others work."""
Doing = tuple[str, float, list[str]]
"""A call that is at work, its seconds, and the stack of its thread."""
MOST_FRAMES = 12
FETCH_S = 3600.0
"""Seconds that a process waits for a stored value."""


class RemoteError(Exception):
    """An exception inside a worker, as text: Ray drops causes that it cannot pickle."""

    def __init__(self, kind: str, message: str, trace: str, user_error: bool) -> None:
        super().__init__(kind, message, trace, user_error)
        self.kind = kind
        self.message = message
        self.trace = trace
        self.user_error = user_error
        """True where the worker raised one of this package's own errors, whose message is complete."""

    def __str__(self) -> str:
        return self.message if self.user_error else f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A value in Ray's object store, as an argument of several calls: a process fetches it with the first of them, and keeps it.

    A plain reference would be deserialised anew in every call.
    """

    ref: Any
    key: str
    """The value's key, different for every value."""


class StoredBlock:
    """A block in Ray's object store. It is freed with the last view of it, on whichever process that is."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self._block: Mapping[str, Any] | None = None

    def read(self) -> Mapping[str, Any]:
        """Return the block, whose arrays are views of shared memory. It stays mapped as long as this object is there."""
        if self._block is None:
            self._block = _get(self.ref)
        return self._block

    def __reduce__(self) -> tuple[Callable[..., StoredBlock], tuple[Any]]:
        """Pickle the reference alone, even where the block has been read."""
        return StoredBlock, (self.ref,)


class WorkerHost:
    """A host that runs in a process of its own; `build` makes the worker there, `call` calls it.

    The environment is set before anything heavy is imported, because visible devices are read when torch is loaded;
    where everything is imported already (`forks`), it has nothing that would come too late.
    """

    def __init__(self, name: str, log_file: str | None, environment: dict[str, str], secret: Sequence[str] = ()) -> None:
        os.environ.update(environment)
        # Imports make a million objects that stay, and a collection looks at all of them again and again.
        gc.disable()
        remember_environment()
        remember(secret)
        self._worker: Any = None
        self._fetched: tuple[str, Any] = ("", None)
        """The `Stored` value that a call carried last."""
        self.name = name
        self._instruments = Instruments(name)
        self._calls: dict[int, tuple[str, float]] = {}
        """The calls that are at work, by their threads."""
        faults.arm()
        faults.tell(worker=name)
        if log_file is not None:
            _redirect_output(Path(log_file))

    def where(self) -> tuple[str, int, int]:
        """Return this process's node address, its id, and a port that is free there now."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            port = probe.getsockname()[1]
        return address, os.getpid(), port

    def beat(self, wait_s: float) -> tuple[str, float, float | None] | None:
        """Return, after `wait_s`, what the worker is doing, for how many seconds, and the longest it ever took; None:
        nothing.

        An answer shows that the process runs Python; of a worker without the method `activity` it shows nothing else.
        """
        time.sleep(wait_s)
        activity = getattr(self._worker, "activity", None)
        return None if activity is None else activity()

    def doing(self) -> list[Doing]:
        """Return each call that is at work, for how many seconds, and where; and what a thread of the worker's own does."""
        now = time.monotonic()
        found = [(method, now - began, stack_of(thread)) for thread, (method, began) in list(self._calls.items())]
        activity, thread = getattr(self._worker, "activity", None), getattr(self._worker, "thread", None)
        if activity is not None and thread is not None and (at := activity()) is not None:
            found.append((at[0], at[1], stack_of(thread.ident)))
        return found

    def build(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make the worker."""
        _settle_threads()
        try:
            self._worker = _guard(factory, args, kwargs)
        finally:
            gc.enable()

    def call(self, method: str, *args: Any, told: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Call a method of the worker. Raises RemoteError. `told` is the controller's context of the fault points (`faults`)."""
        if told is not None:
            faults.tell(**{**told, "worker": self.name})

        def run() -> Any:
            values = [self._value(argument) for argument in args]
            with self._instruments.around(self._worker, method):
                return getattr(self._worker, method)(*values, **kwargs)

        self._calls[threading.get_ident()] = (method, time.monotonic())
        try:
            return _guard(run, (), {}, self._instruments.failed)
        finally:
            del self._calls[threading.get_ident()]

    def observe(self, order: InstrumentOrder) -> None:
        """Use these instruments from the next call on."""
        _guard(self._instruments.observe, (order,), {})

    def measures(self) -> tuple[str | None, dict[str, PhaseMeasure]]:
        """Return the name of this process's GPU, if any, and what each phase took since the last call."""
        return device_name(), self._instruments.measures()

    def _value(self, argument: Any) -> Any:
        """Return what the argument stands for; the last stored value stays, until another takes its place."""
        if not isinstance(argument, Stored):
            return _local(argument)
        if self._fetched[0] != argument.key:
            # The old one goes first: two shards of a batch need not fit beside each other.
            self._fetched = ("", None)
            self._fetched = (argument.key, _local(_get(argument.ref)))
        return self._fetched[1]

    def call_pair(self, method: str, *args: Any) -> tuple[bool, Any]:
        """Return whether the result is not None, and the result: two objects, the second to be passed on unread."""
        value = self.call(method, *args)
        return value is not None, value


def stack_of(thread: int | None) -> list[str]:
    """Return the innermost frames of a thread of this process, outermost first, each as file, line and function."""
    frame = sys._current_frames().get(thread or 0)
    found = traceback.extract_stack(frame, limit=MOST_FRAMES) if frame is not None else []
    return [f"{Path(*Path(one.filename).parts[-3:])}:{one.lineno} {one.name}: {one.line}" for one in found]


def _get(ref: Any) -> Any:
    import ray

    # The call that carries the value has a deadline of its own, which comes first.
    return ray.get(ref, timeout=FETCH_S)


def _local(value: Any) -> Any:
    """Return a batch or an update with the values of its remote columns, any other value as it is."""
    local = getattr(value, "local", None)
    return value if local is None else local(lambda blocks: _get([block.ref for block in blocks]))


def _guard(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_failure: Callable[[Exception], None] = lambda _: None,
) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as found:
        trace = redact(traceback.format_exc())
        print(trace, file=sys.stderr, flush=True)
        error = out_of_memory(found) or found
        on_failure(error)
        raise RemoteError(type(error).__name__, redact(str(error)), trace, isinstance(error, GrpoRlError)) from None


OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_ACTOR = "actor_rollout_ref.actor"
_MEMORY_KEYS = {
    "actor": f"{_ACTOR}.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, {_ACTOR}.fsdp_config.param_offload and "
    "optimizer_offload, actor_rollout_ref.rollout.gpu_memory_utilization",
    "critic": "critic.ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu, critic.fsdp.param_offload and optimizer_offload",
    "reference": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu or log_prob_micro_batch_size_per_gpu, "
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "rollout": "actor_rollout_ref.rollout.max_num_seqs, gpu_memory_utilization (GPU) or kv_cache_gib (CPU)",
    "reward_model": "reward.reward_model.max_token_len_per_gpu, param_offload",
}


def out_of_memory(error: Exception) -> OutOfMemory | None:
    """Return an error with what was asked for and what is free in this process, where `error` is of memory that ran out; else None."""
    kind, text = type(error).__name__, " ".join(str(error).split()) or "no message"
    if kind not in ("OutOfMemoryError", "MemoryError") and not OUT_OF_MEMORY.search(text):
        return None
    has = machine_memory()
    where, free, total = f"{has.owner}'s memory", float(has.free), float(has.total)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        where, (free, total) = "GPU's memory", torch.cuda.mem_get_info()
    return OutOfMemory(f"{kind}: {text[:300]}; {free / 2**30:,.2f} GiB of {total / 2**30:,.2f} GiB of the {where} are free")


def what_to_do(call: str) -> str:
    """Return which keys to change when memory ran out in `role.method` or `start role`."""
    role = re.split(r"[.\d ]", call.removeprefix("start "))[0].replace("sampling", "rollout")
    return f"turn down {_MEMORY_KEYS[role]}" if role in _MEMORY_KEYS else "give the run more memory"


def _settle_threads() -> None:
    """Set torch to OMP_NUM_THREADS threads: it has not read the variable in a copied process (`forks`)."""
    number = os.environ.get("OMP_NUM_THREADS")
    if number and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(number))


def _redirect_output(log_file: Path) -> None:
    """Redirect to its log everything that this process and its children print, libraries written in C included.

    Secrets are hidden in what Python prints here; in the rest they are hidden at the end of the run.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = HidingStream(sys.stdout), HidingStream(sys.stderr)


_trackers: list[subprocess.Popen[bytes]] = []


def track_apart() -> None:
    """Start Python's tracker of shared memory for this process in a group of its own.

    Ray ends the group of a worker that died, a second after it has asked: with the tracker in it, and children that take
    longer to end, what they shared would stay in memory until the machine is started again.
    """

    def spawn(path: str, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments]
        # Kept, or its destructor would warn of a child that still runs.
        _trackers.append(subprocess.Popen(words, executable=path, pass_fds=passed, process_group=0))
        return _trackers[-1].pid

    before = util.spawnv_passfds
    util.spawnv_passfds = spawn  # type: ignore[assignment]
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = before
