"""Worker groups: the processes of one role, called together, with a deadline and a clear cause for every
failure.

`WorkerHost`, the one Ray actor class, hosts a plain worker object in each process. `Worker` is the
controller's handle to it.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from grpo_rl import faults
from grpo_rl.cluster.processes.placement import NodeSlot, Slot
from grpo_rl.cluster.session.launcher import is_tracker, remove_segments
from grpo_rl.config import secrets
from grpo_rl.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    FunctionError,
    GrpoRlError,
    OutOfMemory,
    RewardError,
)
from grpo_rl.frozen import frozen
from grpo_rl.machine_memory import out_of_memory
from grpo_rl.processes.child import doing as children_doing
from grpo_rl.processes.family import KILLED_FOR_MEMORY, descendants, is_running, kill_tree, oom_kills, started
from grpo_rl.rollout.engine_environment import own_folder
from grpo_rl.workers.instruments import Instruments, PhaseMeasure, device_name

# ---- in the process of a worker ----------------------------------------------------------------------

BEATS, LOOKS, NEWS = "beats", "looks", "news"
"""The threads in which a process answers `beat` and `doing`, and tells its news, while others work."""
Doing = tuple[str, float, list[str]]  # a call at work, its seconds, the stack of its thread
MOST_FRAMES = 12
FETCH_S = 3600.0


class RemoteError(Exception):
    """An exception inside a worker, as text: Ray drops causes that it cannot pickle."""

    def __init__(self, kind: str, message: str, user_error: bool) -> None:
        super().__init__(kind, message, user_error)
        self.kind, self.message, self.user_error = kind, message, user_error

    def __str__(self) -> str:
        return self.message if self.user_error else f"{self.kind}: {self.message}"


@frozen
class Stored:
    """A value in Ray's object store for several calls: a process fetches it once and keeps it, where a
    reference would be deserialised anew in every call.
    """

    ref: Any


class StoredBlock:
    """A block in Ray's object store, freed with the last view of it on whichever process that is."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self._block: Mapping[str, Any] | None = None

    def read(self) -> Mapping[str, Any]:
        """Return the block, whose arrays are views of shared memory. It stays mapped as long as this object is there."""
        if self._block is None:
            self._block = _get(self.ref)
        return self._block

    def __reduce__(self) -> tuple[Callable[..., StoredBlock], tuple[Any]]:
        return StoredBlock, (self.ref,)


class WorkerHost:
    """A host that runs in a process of its own; `build` makes the worker there, `call` calls it.

    The environment is set before anything heavy is imported: visible devices are read when torch is loaded.
    """

    def __init__(self, name: str, log_file: str, environment: dict[str, str], secret: Sequence[str] = ()) -> None:
        os.environ.update(environment)
        # Imports make a million objects that stay, and a collection looks at all of them again and again.
        gc.disable()
        secrets.remember_environment()
        secrets.remember(secret)
        self._worker: Any = None
        self._fetched: tuple[str, Any] = ("", None)  # the `Stored` value that a call carried last
        self.name = name
        self._instruments = Instruments(name)
        self._calls: dict[int, tuple[str, float]] = {}  # those at work, by their threads
        faults.arm()
        faults.tell(worker=name)
        _redirect_output(Path(log_file))

    def where(self) -> tuple[str, int, int]:
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            port = probe.getsockname()[1]
        return address, os.getpid(), port

    def beat(self, wait_s: float) -> tuple[str, float, float | None] | None:
        """Return, after `wait_s`, what the worker is doing, for how many seconds, and the longest it ever
        took; None: nothing.

        An answer shows that the process runs Python; of a worker without the method `activity` it shows
        nothing else.
        """
        time.sleep(wait_s)
        return self._activity()

    def doing(self) -> list[Doing]:
        """Return each call at work with its seconds and stack; then the worker's own thread, and children."""
        current_time = time.monotonic()
        active_calls = [
            (method, current_time - began, stack_of(thread)) for thread, (method, began) in list(self._calls.items())
        ]
        if (at := self._activity()) is not None:
            active_calls.append((at[0], at[1], stack_of(self._worker.thread.ident)))
        return active_calls + children_doing()

    def _activity(self) -> tuple[str, float, float | None] | None:
        activity = getattr(self._worker, "activity", None)
        return None if activity is None else activity()

    def build(self, factory: Callable[..., Any], *args: Any) -> None:
        try:
            with _reported():
                self._worker = factory(*args)
        finally:
            gc.enable()

    def call(self, method: str, *args: Any, told: dict[str, Any] | None = None) -> Any:
        """Call a method of the worker. Raises RemoteError. `told` is the context of the fault points."""
        if told is not None:
            faults.tell(**{**told, "worker": self.name})
        self._calls[threading.get_ident()] = (method, time.monotonic())
        try:
            with _reported():
                values = [self._value(argument) for argument in args]
                with self._instruments.around(self._worker, method):
                    return getattr(self._worker, method)(*values)
        finally:
            del self._calls[threading.get_ident()]

    def observe(self, folder: str | None) -> None:
        self._instruments.observe(folder)

    def measures(self) -> tuple[str | None, dict[str, PhaseMeasure]]:
        return device_name(), self._instruments.measures()

    def _value(self, argument: Any) -> Any:
        if not isinstance(argument, Stored):
            return _local(argument)
        if self._fetched[0] != (key := str(argument.ref)):
            # The old one goes first: two shards of a batch need not fit beside each other.
            self._fetched = ("", None)
            self._fetched = (key, _local(_get(argument.ref)))
        return self._fetched[1]


def stack_of(thread: int | None) -> list[str]:
    """Return the innermost frames of a thread of this process, outermost first, each as file, line and function."""
    frame = sys._current_frames().get(thread or 0)
    entries = traceback.extract_stack(frame, limit=MOST_FRAMES) if frame is not None else []
    return [f"{Path(*Path(entry.filename).parts[-3:])}:{entry.lineno} {entry.name}: {entry.line}" for entry in entries]


def _get(ref: Any) -> Any:
    # The call that carries the value has a deadline of its own, which comes first.
    return ray.get(ref, timeout=FETCH_S)


def _local(value: Any) -> Any:
    """Return a batch or an update with the values of its remote columns, any other value as it is."""
    local = getattr(value, "local", None)
    return value if local is None else local(lambda blocks: _get([block.ref for block in blocks]))


@contextmanager
def _reported() -> Iterator[None]:
    """Raise what fails inside of this context as RemoteError, with its traceback in the log."""
    try:
        yield
    except Exception as raised:
        with suppress(OSError):  # a disk that is full, too
            print(secrets.redact(traceback.format_exc()), file=sys.stderr, flush=True)
        error = out_of_memory(raised) or raised
        raise RemoteError(type(error).__name__, secrets.redact(str(error)), isinstance(error, GrpoRlError)) from None


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


def what_to_do(call: str) -> str:
    role = re.split(r"[.\d ]", call.removeprefix("start "))[0].replace("sampling", "rollout")
    return f"turn down {_MEMORY_KEYS[role]}" if role in _MEMORY_KEYS else "give the run more memory"


def _redirect_output(log_file: Path) -> None:
    """Redirect to its log all that this process and its children print, libraries written in C included.

    Secrets are hidden in what Python prints here; in the rest they are hidden at the end of the run.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = secrets.HidingStream(sys.stdout), secrets.HidingStream(sys.stderr)


def make_worker(name: str, *arguments: Any, **options: Any) -> Any:
    """Return an object of a class of `grpo_rl.workers`, imported in the process that will run it."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(f"grpo_rl.workers.{module}"), kind)(*arguments, **options)


# ---- in the controller ----------------------------------------------------------------------------------

Arguments = Sequence[tuple[Any, ...]]

LONG_AND_SILENT = frozenset({"save", "load", "export"})
LOG_TAIL_LINES = 12
BLAME_S = 2.0
"""Seconds for a dead process to be found if one reports trouble: neighbours see a broken connection first."""
TITLE = b"ray::"
"""The beginning of the command lines of Ray's workers: a process of another name has only inherited a worker's id."""
LEAVE_S = 2.0
# A user's mistake that a worker reports is raised again as the same error, with its exit code.
_USER_ERRORS: dict[str, type[GrpoRlError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError, FunctionError, RewardError)
}


# A collective that lost a peer: torch and gloo have no exception class of their own for all of these.
_PEER_ERRORS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionResetError",
    "BrokenPipeError",
    "ObjectLostError",
)
_PEER_WORDS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "NCCL error")


class WorkerFailed(ClusterError):
    """A worker cannot go on, does not answer, or lost its neighbours; a new process could help."""

    def __init__(self, message: str, workers: Sequence[Worker] = ()) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


class WorkerDied(WorkerFailed): ...


class Worker:
    def __init__(
        self, name: str, slot: Slot | NodeSlot, log_dir: Path, environment: Mapping[str, str], threads: int = 1
    ) -> None:
        self.name = name
        self.slot: Any = slot
        self.log_file = log_dir / f"{name}.log"
        self.pid: int | None = None
        self.address: str | None = None
        self.verdict: str | None = None
        """The reason for which the controller ended the process, if it did."""
        self.excused = False
        """True while the worker's work may keep it from answering: a missing heartbeat means nothing then."""
        self.is_built = True
        """False while a process that came later is being made: nobody waits for it."""
        self.asked: tuple[str, float] = ("", 0.0)
        self._environment, self._threads = environment, threads
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpu_ids)} if slot.gpu_ids else {}
        remote: Any = ray.remote  # Ray's types have no concurrency groups
        host = remote(concurrency_groups={BEATS: 1, LOOKS: 1, NEWS: 1})(WorkerHost)
        host = host.options(max_concurrency=threads, **slot.options)
        self._oom_kills = oom_kills()
        self.actor: Any = host.remote(name, str(self.log_file), {**environment, **devices}, secrets.known())

    @property
    def is_here(self) -> bool:
        return self.address == ray.util.get_node_ip_address()

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        self.asked = (method, time.monotonic())
        return self.actor.call.remote(method, *args, told=faults.told())

    def call_for_two(self, method: str, *args: Any) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """Start a call of a method that returns a pair, as two objects to be fetched apart.

        A value above Ray's limit for answers (100 KiB, `RAY_max_direct_call_object_size`) lies in the object
        store of the worker's machine, belongs to the caller, and stays when the worker dies.
        """
        self.asked = (method, time.monotonic())
        return self.actor.call.options(num_returns=2).remote(method, *args, told=faults.told())

    def another(self, name: str, slot: Slot | NodeSlot) -> Worker:
        return Worker(name, slot, self.log_file.parent, self._environment, self._threads)

    def listen(self, method: str, *args: Any) -> ray.ObjectRef:
        return self.actor.call.options(concurrency_group=NEWS).remote(method, *args)

    def beat(self, wait_s: float) -> ray.ObjectRef:
        return self.actor.beat.options(concurrency_group=BEATS).remote(wait_s)

    def doing(self) -> ray.ObjectRef:
        return self.actor.doing.options(concurrency_group=LOOKS).remote()

    def describe(self, error: Exception) -> str:
        """Return why a call to this worker failed: its own words, or how the process ended and the last lines of its log."""
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, RemoteError):
            missing = cause.kind == ModuleNotFoundError.__name__
            remedy = f"; on its machine, {self.address}: bash scripts/setup.sh" if missing else ""
            return f"{cause}{remedy}\n  log: {self.log_file}"
        died = isinstance(error, ray.exceptions.RayActorError)
        words = cause_line(str(error), at_end=isinstance(error, ray.exceptions.RayTaskError))
        if self.verdict is not None:
            reason = self.verdict
        elif died and self.is_here and oom_kills() > self._oom_kills:  # another machine keeps its own count
            reason = KILLED_FOR_MEMORY
        else:
            reason = f"{'the process died' if died else type(error).__name__} ({words})"
        try:
            lines = [f"  | {line}" for line in self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]]
        except OSError:
            lines = ["  (no log)"]
        return "\n".join([reason, f"  log: {self.log_file}", *lines])

    def kill(self, verdict: str | None = None) -> None:
        """End the process and its children at once, even one that is stopped; `verdict` is the reason that errors give."""
        if self.verdict is None:
            self.verdict = verdict
        # The signal first: Ray forgets which process it was, and leaves one that is stopped where it is.
        self.kill_process()
        ray.kill(self.actor)

    def kill_process(self) -> None:
        """Kill the process in whatever state it is. On another node a task of Ray's does it, which is not waited for."""
        if self.pid is None:
            return
        if self.is_here:
            kill_worker(self.pid)
            return
        for node in ray.nodes():
            if node["Alive"] and node["NodeManagerAddress"] == self.address:
                ray.remote(kill_worker).options(**NodeSlot(node["NodeID"], 0).options).remote(self.pid)


class WorkerGroup:
    """All processes of a role, in rank order.

    A process that died or does not answer makes a call fail with WorkerFailed: for ranks, the end of the
    group.
    """

    def __init__(
        self,
        role: str,
        slots: Sequence[Slot | NodeSlot],
        *,
        log_dir: Path,
        environment: dict[str, str],
        call_timeout_s: float,
        threads_per_worker: int = 1,
    ) -> None:
        self.role = role
        self.call_timeout_s = call_timeout_s
        self.workers = [
            Worker(f"{role}{rank}", slot, log_dir, environment, threads_per_worker) for rank, slot in enumerate(slots)
        ]

    def __len__(self) -> int:
        return len(self.workers)

    def where(self, timeout_s: float, workers: Sequence[Worker] | None = None) -> list[tuple[str, int, int]]:
        workers = self.workers if workers is None else workers
        places = wait_all(workers, [w.actor.where.remote() for w in workers], timeout_s, f"start {self.role} processes")
        for worker, (address, pid, _) in zip(workers, places, strict=True):
            worker.address, worker.pid = address, pid
        return places

    def start_build(self, factory: Callable[..., Any], arguments: Arguments) -> list[ray.ObjectRef]:
        return [w.actor.build.remote(factory, *a) for w, a in zip(self.workers, arguments, strict=True)]

    def store(self, values: Sequence[Any]) -> list[Stored]:
        """Put values that several calls carry into the object store; the result is passed in a value's place."""
        return [Stored(ray.put(value)) for value in values]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; return the results by rank."""
        return self.call_each(method, [args] * len(self.workers))

    def call_each(self, method: str, arguments: Arguments) -> list[Any]:
        for worker in self.workers:
            worker.excused = method in LONG_AND_SILENT
        try:
            return self._wait([w.call(method, *a) for w, a in zip(self.workers, arguments, strict=True)], method)
        finally:
            for worker in self.workers:
                worker.excused = False

    def call_for_two(self, method: str, arguments: Arguments) -> list[tuple[Any, StoredBlock]]:
        """Call a method that returns a pair on every rank; the second values are not fetched."""
        pairs = [w.call_for_two(method, *a) for w, a in zip(self.workers, arguments, strict=True)]
        firsts = self._wait([first for first, _ in pairs], method)
        return [(first, StoredBlock(second)) for first, (_, second) in zip(firsts, pairs, strict=True)]

    def shutdown(self) -> None:
        end_workers(self.workers)

    def _wait(self, refs: Sequence[ray.ObjectRef], method: str) -> list[Any]:
        return wait_all(self.workers, refs, self.call_timeout_s, f"{self.role}.{method}")


def cause_line(text: str, *, at_end: bool = False) -> str:
    """Return the line of an error's text that describes it, without colours: the first, or the last of a traceback."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
    return lines[-1 if at_end else 0].strip() if lines else ""


def wait_all(workers: Sequence[Worker], refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
    """Return the results of `refs`, one per worker, in order.

    The first failure ends the wait: in a set that works in step, the others would only hang. Raises what
    `fetch` raises, naming a process that died rather than the neighbours that noticed, and WorkerFailed at
    the deadline.
    """
    by_ref = dict(zip(refs, workers, strict=True))
    results: dict[ray.ObjectRef, Any] = {}
    for ref in completed_calls(refs, timeout_s):
        try:
            results[ref] = fetch(by_ref[ref], ref, what)
        except WorkerDied:
            raise
        except ClusterError as error:
            for other in completed_calls([pending for pending in refs if pending not in results and pending != ref], BLAME_S):
                try:
                    fetch(by_ref[other], other, what)
                except WorkerDied as death:
                    raise death from error
                except GrpoRlError:
                    continue  # another one that noticed
            raise
    if missing := [by_ref[ref] for ref in refs if ref not in results]:
        names, logs = ", ".join(w.name for w in missing), ", ".join(str(w.log_file) for w in missing)
        raise WorkerFailed(f"{what}: no answer from {names} within {timeout_s:.0f} s\n  log: {logs}", missing)
    return [results[ref] for ref in refs]


def completed_calls(refs: Iterable[ray.ObjectRef], timeout_s: float) -> Iterator[ray.ObjectRef]:
    """Yield the calls as they end, until the deadline."""
    pending, deadline = list(refs), time.monotonic() + timeout_s
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        yield from done
        if not done and time.monotonic() > deadline:
            return


def fetch(worker: Worker, ref: ray.ObjectRef, what: str) -> Any:
    """Return the result of a call that has ended.

    Raises ConfigError, DataError, CheckpointError, FunctionError or RewardError as the worker raised it,
    WorkerDied if its process has ended, OutOfMemory, and ClusterError for everything else, naming worker and
    call.
    """
    try:
        return ray.get(ref, timeout=60.0)
    except (ray.exceptions.RayError, RemoteError) as error:
        cause: Any = error if isinstance(error, RemoteError) else getattr(error, "cause", None)
        kind = cause.kind if isinstance(cause, RemoteError) else ""
        if kind in _USER_ERRORS:
            raise _USER_ERRORS[kind](cause.message) from error
        where = f"{what} failed on {worker.name}"
        if kind == OutOfMemory.__name__:
            raise OutOfMemory(f"{where}: {cause.message}; {what_to_do(what)}\n  log: {worker.log_file}") from error
        message = f"{where}: {worker.describe(error)}"
        # Ray's own guard ends the process that uses most of a machine's memory when little is left.
        if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
            raise WorkerDied(message, [worker]) from error
        if kind and is_broken(cause):
            raise WorkerFailed(message, [worker]) from error
        raise ClusterError(message) from error


def settle(
    calls: Mapping[Worker, ray.ObjectRef], timeout_s: float, what: str, on_loss: Callable[[Worker, WorkerFailed], None]
) -> dict[Worker, Any]:
    """Return the results of those workers that have one; `on_loss` is called for each that failed for good.

    Raises what `fetch` raises for a failure that a new process would not mend.
    """
    unanswered = {ref: worker for worker, ref in calls.items()}
    results: dict[Worker, Any] = {}
    for ref in completed_calls(unanswered, timeout_s):
        worker = unanswered.pop(ref)
        try:
            results[worker] = fetch(worker, ref, what)
        except WorkerFailed as error:
            on_loss(worker, error)
    for worker in unanswered.values():
        on_loss(worker, WorkerFailed(f"{what}: no answer from {worker.name} within {timeout_s:.0f} s"))
    return results


def is_broken(error: RemoteError) -> bool:
    return error.kind == ClusterError.__name__ or (
        not error.user_error and (error.kind in _PEER_ERRORS or any(words in error.message for words in _PEER_WORDS))
    )


def end_workers(workers: Sequence[Worker]) -> None:
    """End these processes and all below them; to Ray, a worker that is only killed has crashed.

    Children are looked up before: without their parent they are like any other process.
    """
    local = [worker.pid for worker in workers if worker.pid is not None and worker.is_here]
    below = {child: started(child) for pid in local for child in descendants(pid)}
    for worker in workers:
        ray.kill(worker.actor)
    deadline = time.monotonic() + LEAVE_S
    while any(map(is_running, local)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in local:
        kill_worker(pid)
    for child, since in below.items():
        if since is not None and started(child) == since and not is_tracker(child):
            kill_tree(child, spares=is_tracker)
    for worker in workers:
        if not worker.is_here:
            worker.kill_process()


def kill_worker(pid: int) -> None:
    """Kill a worker of this node with all below it, and remove what its engine has left in shared memory.

    Python's trackers of shared memory are left to remove what the others leave there.
    """
    kill_tree(pid, title=TITLE, spares=is_tracker)
    folder = own_folder(pid)
    if folder is not None:
        remove_segments(folder)
