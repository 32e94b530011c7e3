"""Worker groups: the processes of one role, called together, with a deadline and a clear cause for every failure."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_rl import faults
from grpo_rl.cluster.processes.placement import Place, Slot
from grpo_rl.cluster.processes.worker_host import BEATS, LOOKS, RemoteError, Stored, StoredBlock, what_to_do
from grpo_rl.cluster.session.run_watcher import is_tracker, remove_segments
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
from grpo_rl.processes.family import descendants, is_running, kill_tree, started
from grpo_rl.rollout.engine_environment import own_folder

Arguments = Sequence[tuple[Any, ...]]
"""The arguments of a call to every process, by rank."""

LONG_AND_SILENT = frozenset({"save", "load", "export"})
"""Calls in which a library may hold the interpreter for long: silence is no sign of trouble then."""
LOG_TAIL_LINES = 12
BLAME_S = 2.0
"""Seconds in which a dead process is looked for when a worker reports trouble: its neighbours see a broken connection first."""
TITLE = b"ray::"
"""The beginning of the command lines of Ray's workers: a process of another name has only inherited a worker's id."""
LEAVE_S = 2.0
"""Seconds that workers may take to end; a copy ends within milliseconds, an engine has children to end."""
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
    """An error: a worker cannot go on, and a new process in its place could."""

    def __init__(self, message: str, workers: Sequence[Worker] = ()) -> None:
        super().__init__(message)
        self.workers = tuple(workers)


class WorkerDied(WorkerFailed):
    """An error: a worker's process has ended."""


class WorkerBroken(WorkerFailed):
    """An error: a worker's process reports that what it hosts has ended, or that it has lost its neighbours."""


class NoAnswer(WorkerFailed):
    """Raised for workers that did not answer before the deadline."""


class Worker:
    """A handle to one process."""

    def __init__(self, name: str, place: Place, log_file: Path) -> None:
        self.name = name
        self.place = place
        self.log_file = log_file
        self.pid: int | None = None
        self.address: str | None = None
        self.verdict: str | None = None
        """The reason for which the controller ended the process, if it did."""
        self.excused = False
        """True while the worker's work may keep it from answering: a missing heartbeat means nothing then."""
        self.is_built = True
        """False while a process that came later is being made: nobody waits for it."""
        self.asked: tuple[str, float] = ("", 0.0)
        """The method that was called last, and when."""
        self.actor: Any = place.start(name, log_file)

    def call(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Start a call; `wait_all` waits for it."""
        self.asked = (method, time.monotonic())
        return self.actor.call.remote(method, *args, told=faults.told(), **kwargs)

    def call_for_two(self, method: str, *args: Any) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """Start a call of a method that returns a pair, as two objects: either may be fetched without the other.

        What a call returns belongs to the process that made the call. Above Ray's limit for values that travel in the
        answer itself (100 KiB, `RAY_max_direct_call_object_size`) it lies in the object store of the worker's machine,
        and stays there when the worker dies.
        """
        self.asked = (method, time.monotonic())
        return self.actor.call.options(num_returns=2).remote(method, *args, told=faults.told())

    def call_pair(self, method: str) -> tuple[ray.ObjectRef, ray.ObjectRef]:
        """Start a call, as `call_for_two` does, of any method: whether its result is not None, and the result."""
        return self.actor.call_pair.options(num_returns=2).remote(method)

    def again(self) -> Worker:
        """Another process in the same place, with no worker in it yet."""
        return Worker(self.name, self.place, self.log_file)

    def beat(self, wait_s: float) -> ray.ObjectRef:
        """A sign of life after `wait_s`, whatever else the process does: see `WorkerHost.beat`."""
        return self.actor.beat.options(concurrency_group=BEATS).remote(wait_s)

    def doing(self) -> ray.ObjectRef:
        """What the process is doing, whatever that is: see `WorkerHost.doing`."""
        return self.actor.doing.options(concurrency_group=LOOKS).remote()

    def describe(self, error: Exception) -> str:
        """Return why a call to this worker failed: its own words, or how the process ended and the last lines of its log."""
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, RemoteError):
            missing = cause.kind == ModuleNotFoundError.__name__
            remedy = f"; on its machine, {self.address}: bash scripts/setup.sh" if missing else ""
            return f"{cause}{remedy}\n  log: {self.log_file}"
        if self.verdict is not None:
            return f"{self.verdict}\n  log: {self.log_file}\n{self.log_tail()}"
        reason = "the process died" if isinstance(error, ray.exceptions.RayActorError) else type(error).__name__
        words = cause_line(str(error), at_end=isinstance(error, ray.exceptions.RayTaskError))
        return f"{reason} ({words})\n  log: {self.log_file}\n{self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines of the worker's log, indented."""
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return "  (no log)"
        return "\n".join(f"  | {line}" for line in lines)

    def kill(self, verdict: str | None = None) -> None:
        """End the process and its children at once, even one that is stopped; `verdict` is the reason that errors give."""
        if self.verdict is None:
            self.verdict = verdict
        # The signal first: Ray forgets which process it was, and leaves one that is stopped where it is.
        if self.pid is not None and self.address is not None:
            kill_process(self.pid, self.address)
        ray.kill(self.actor)


class WorkerGroup:
    """All processes of a role, in rank order.

    A process that has died or does not answer makes a call fail with WorkerFailed. For ranks, which work in step, that is
    the end of the group: `main.py` starts the run's processes again, from the newest checkpoint.
    """

    def __init__(
        self,
        role: str,
        slots: Sequence[Slot],
        *,
        log_dir: Path,
        environment: dict[str, str],
        call_timeout_s: float,
        threads_per_worker: int = 1,
    ) -> None:
        self.role = role
        self.call_timeout_s = call_timeout_s
        self.workers = [
            Worker(f"{role}{rank}", Place(slot, environment, threads_per_worker), log_dir / f"{role}{rank}.log")
            for rank, slot in enumerate(slots)
        ]

    def __len__(self) -> int:
        return len(self.workers)

    def where(self, timeout_s: float) -> list[tuple[str, int, int]]:
        """Node address, process id and a free port of every worker."""
        return self.locate(self.workers, timeout_s)

    def locate(self, workers: Sequence[Worker], timeout_s: float) -> list[tuple[str, int, int]]:
        """Return what `where` does, for some of the processes."""
        places = wait_all(workers, [w.actor.where.remote() for w in workers], timeout_s, f"start {self.role} processes")
        for worker, (address, pid, _) in zip(workers, places, strict=True):
            worker.address, worker.pid = address, pid
        return places

    def start_build(self, factory: Callable[..., Any], arguments: Arguments) -> list[ray.ObjectRef]:
        """Start making the worker object in every process."""
        return [w.actor.build.remote(factory, *a) for w, a in zip(self.workers, arguments, strict=True)]

    def store(self, values: Sequence[Any]) -> list[Stored]:
        """Put values that several calls carry into the object store; the result is passed in a value's place."""
        return [Stored(ray.put(value), uuid.uuid4().hex) for value in values]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; the results by rank."""
        return self.call_each(method, [args] * len(self.workers))

    def call_each(self, method: str, arguments: Arguments) -> list[Any]:
        """Call `method` on every rank with its own arguments; the results by rank."""
        for worker in self.workers:
            worker.excused = method in LONG_AND_SILENT
        try:
            return self._wait([w.call(method, *a) for w, a in zip(self.workers, arguments, strict=True)], method)
        finally:
            for worker in self.workers:
                worker.excused = False

    def call_for_two(self, method: str, arguments: Arguments) -> list[tuple[Any, StoredBlock]]:
        """Call a method that returns a pair on every rank; return the first values, and the second ones, which were not fetched."""
        pairs = [w.call_for_two(method, *a) for w, a in zip(self.workers, arguments, strict=True)]
        return [(first, StoredBlock(second)) for first, second in self._firsts(pairs, method)]

    def parts(self, method: str) -> list[ray.ObjectRef]:
        """Return each rank's result as a reference to an object that is in the store, and was not fetched."""
        return [ref for _, ref in self._firsts([w.call_pair(method) for w in self.workers], method)]

    def shutdown(self) -> None:
        """End all processes of the group."""
        end_workers(self.workers)

    def _firsts(self, pairs: Sequence[tuple[ray.ObjectRef, ray.ObjectRef]], method: str) -> list[tuple[Any, ray.ObjectRef]]:
        firsts = self._wait([first for first, _ in pairs], method)
        return [(first, second) for first, (_, second) in zip(firsts, pairs, strict=True)]

    def _wait(self, refs: Sequence[ray.ObjectRef], method: str) -> list[Any]:
        return wait_all(self.workers, refs, self.call_timeout_s, f"{self.role}.{method}")


def cause_line(text: str, *, at_end: bool) -> str:
    """Return the line of an error's text that describes it, without colours: the first, or the last of a traceback."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
    return lines[-1 if at_end else 0].strip() if lines else ""


def wait_all(
    workers: Sequence[Worker],
    refs: Sequence[ray.ObjectRef],
    timeout_s: float,
    what: str,
    on_tick: Callable[[], None] | None = None,
) -> list[Any]:
    """The results of `refs`, one per worker, in order.

    The first failure ends the wait: in a set that works in step, the others would only hang.

    Raises what `fetch` raises; a process that died is named rather than the neighbours that noticed.
    ClusterError also at the deadline, naming the workers that did not answer.
    """
    by_ref = dict(zip(refs, workers, strict=True))
    results: dict[ray.ObjectRef, Any] = {}
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        if on_tick is not None:
            on_tick()
        for ref in done:
            try:
                results[ref] = fetch(by_ref[ref], ref, what)
            except WorkerDied:
                raise
            except ClusterError as error:
                death = _death_among(by_ref, pending, what)
                if death is None:
                    raise
                raise death from error
        if pending and not done and time.monotonic() > deadline:
            names = ", ".join(by_ref[ref].name for ref in pending)
            logs = ", ".join(str(by_ref[ref].log_file) for ref in pending)
            raise NoAnswer(
                f"{what}: no answer from {names} within {timeout_s:.0f} s\n  log: {logs}", [by_ref[ref] for ref in pending]
            )
    return [results[ref] for ref in refs]


def fetch(worker: Worker, ref: ray.ObjectRef, what: str) -> Any:
    """The result of a call that has ended.

    Raises ConfigError, DataError, CheckpointError or RewardError as the worker raised it, WorkerDied when its
    process has ended, ClusterError for everything else, naming worker and call.
    """
    try:
        return ray.get(ref, timeout=60.0)
    except (ray.exceptions.RayError, RemoteError) as error:
        cause = error if isinstance(error, RemoteError) else getattr(error, "cause", None)
        if isinstance(cause, RemoteError) and cause.kind in _USER_ERRORS:
            raise _USER_ERRORS[cause.kind](cause.message) from error
        message = f"{what} failed on {worker.name}: {worker.describe(error)}"
        if isinstance(cause, RemoteError) and cause.kind == OutOfMemory.__name__:
            raise OutOfMemory(
                f"{what} failed on {worker.name}: {cause.message}; {what_to_do(what)}\n  log: {worker.log_file}"
            ) from error
        # Ray's own guard ends the process that uses most of a machine's memory when little is left.
        if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError):
            raise WorkerDied(message, [worker]) from error
        if isinstance(cause, RemoteError) and is_broken(cause):
            raise WorkerBroken(message, [worker]) from error
        raise ClusterError(message) from error


def settle(
    workers: Sequence[Worker],
    refs: Sequence[ray.ObjectRef],
    timeout_s: float,
    what: str,
    on_loss: Callable[[Worker, WorkerFailed], None],
) -> dict[Worker, Any]:
    """The results of those workers that have one; `on_loss` is called for each that failed for good.

    For workers that do not work in step: one's end does not concern the others. Raises what `fetch` raises
    for a failure that a new process would not mend.
    """
    by_ref = dict(zip(refs, workers, strict=True))
    results: dict[Worker, Any] = {}
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for ref in done:
            try:
                results[by_ref[ref]] = fetch(by_ref[ref], ref, what)
            except WorkerFailed as error:
                on_loss(by_ref[ref], error)
        if not done:
            for ref in pending:
                on_loss(by_ref[ref], NoAnswer(f"{what}: no answer from {by_ref[ref].name} within {timeout_s:.0f} s"))
            break
    return results


def is_broken(error: RemoteError) -> bool:
    """Return whether the worker reports that it cannot go on, and not that the request was wrong."""
    return error.kind == ClusterError.__name__ or (
        not error.user_error and (error.kind in _PEER_ERRORS or any(words in error.message for words in _PEER_WORDS))
    )


def _death_among(by_ref: dict[ray.ObjectRef, Worker], pending: list[ray.ObjectRef], what: str) -> WorkerDied | None:
    """The death of a worker that has not answered yet, if there is one within BLAME_S."""
    deadline = time.monotonic() + BLAME_S
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for ref in done:
            try:
                fetch(by_ref[ref], ref, what)
            except WorkerDied as death:
                return death
            except GrpoRlError:
                continue  # another one that noticed
    return None


def end_workers(workers: Sequence[Worker]) -> None:
    """End these processes and all below them, in the way that Ray expects: to Ray, a worker that is only killed has crashed.

    Children are looked up before: without their parent they are like any other process.
    """
    here = ray.util.get_node_ip_address()
    local = [worker.pid for worker in workers if worker.pid is not None and worker.address == here]
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
        if worker.pid is not None and worker.address is not None and worker.address != here:
            kill_process(worker.pid, worker.address)


def kill_process(pid: int, address: str) -> None:
    """Kill the worker with this id on the node at `address`, as `kill_worker` does, in whatever state it is.

    On another node a task of Ray's does it, which is not waited for.
    """
    if address == ray.util.get_node_ip_address():
        kill_worker(pid)
        return
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == address:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(kill_worker).options(num_cpus=0, scheduling_strategy=strategy).remote(pid)


def kill_worker(pid: int) -> None:
    """Kill a worker of this node with all below it, and remove what its engine has left in shared memory.

    Python's trackers of shared memory are left to their work: they remove what the others leave there, and end with the
    last of them.
    """
    kill_tree(pid, title=TITLE, spares=is_tracker)
    folder = own_folder(pid)
    if folder is not None:
        remove_segments(folder)
