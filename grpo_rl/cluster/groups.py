"""Worker groups: the processes of one role, called together, with a deadline and a clear cause for every failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_rl import faults
from grpo_rl.cluster.host import Host, RemoteError
from grpo_rl.cluster.placement import Slot
from grpo_rl.errors import CheckpointError, ClusterError, ConfigError, DataError, GrpoRlError, RewardError

LOG_TAIL_LINES = 12
# How long to look for a dead process when a worker reports trouble: its neighbours see a broken connection first.
BLAME_S = 2.0
# What a worker says of a user's mistake is raised again as what it was, with its exit code.
_USER_ERRORS: dict[str, type[GrpoRlError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError, RewardError)
}


class WorkerDied(ClusterError):
    """A worker's process has ended."""


class Worker:
    """A handle to one process."""

    def __init__(self, role: str, rank: int, slot: Slot, log_file: Path, environment: dict[str, str], threads: int) -> None:
        self.name = f"{role}{rank}"
        self.log_file = log_file
        self.pid: int | None = None
        strategy = PlacementGroupSchedulingStrategy(slot.placement_group, slot.bundles[0])
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpu_ids)} if slot.gpu_ids else {}
        self.actor: Any = (
            ray.remote(Host)
            .options(num_cpus=0, max_concurrency=threads, scheduling_strategy=strategy)
            .remote(self.name, str(log_file), {**environment, **devices})
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Start a call; `wait_all` waits for it."""
        told = faults.told()
        if told is not None:  # the worker's conditions name what only the controller knows, such as the step
            return self.actor.call_told.remote(told, method, *args, **kwargs)
        return self.actor.call.remote(method, *args, **kwargs)

    def describe(self, error: Exception) -> str:
        """Why a call to this worker failed: its own words, or how the process ended and the last lines of its log."""
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, RemoteError):
            return f"{cause}\n  log: {self.log_file}"
        reason = "the process died" if isinstance(error, ray.exceptions.RayActorError) else type(error).__name__
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return f"{reason} ({first_line})\n  log: {self.log_file}\n{self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines of the worker's log, indented."""
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return "  (no log)"
        return "\n".join(f"  | {line}" for line in lines)

    def kill(self) -> None:
        """End the process at once."""
        ray.kill(self.actor)


class WorkerGroup:
    """All processes of a role, in rank order."""

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
            Worker(role, rank, slot, log_dir / f"{role}{rank}.log", environment, threads_per_worker)
            for rank, slot in enumerate(slots)
        ]

    def __len__(self) -> int:
        return len(self.workers)

    def where(self, timeout_s: float) -> list[tuple[str, int, int]]:
        """Node address, process id and a free port of every worker."""
        places = wait_all(
            self.workers, [w.actor.where.remote() for w in self.workers], timeout_s, f"start {self.role} processes"
        )
        for worker, (_, pid, _) in zip(self.workers, places, strict=True):
            worker.pid = pid
        return places

    def start_build(self, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[ray.ObjectRef]:
        """Start making the worker object in every process; one tuple of arguments per rank."""
        return [w.actor.build.remote(factory, *a) for w, a in zip(self.workers, arguments, strict=True)]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; the results by rank."""
        return self.call_each(method, [args] * len(self.workers))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; the results by rank."""
        refs = [w.call(method, *a) for w, a in zip(self.workers, arguments, strict=True)]
        return wait_all(self.workers, refs, self.call_timeout_s, f"{self.role}.{method}")

    def shutdown(self) -> None:
        """End all processes of the group."""
        for worker in self.workers:
            worker.kill()


def wait_all(
    workers: Sequence[Worker],
    refs: Sequence[ray.ObjectRef],
    timeout_s: float,
    what: str,
    on_tick: Callable[[], None] | None = None,
) -> list[Any]:
    """The results of `refs`, one per worker, in order.

    The first failure ends the wait: in a group that works in step, the others would only hang.

    Raises what `fetch` raises; a process that died is named rather than the neighbours that noticed.
    ClusterError also at the deadline, naming who did not answer.
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
            raise ClusterError(f"{what}: no answer from {names} within {timeout_s:.0f} s\n  log: {logs}")
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
        kind = WorkerDied if isinstance(error, ray.exceptions.RayActorError) else ClusterError
        raise kind(f"{what} failed on {worker.name}: {worker.describe(error)}") from error


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
