"""What every process is doing, said once where a phase of a step takes far too long, or before a worker is given up."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import ray

from grpo_rl.cluster.processes.worker_group import Doing, WorkerGroup, stack_of
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.processes.child import CHILDREN
from grpo_rl.processes.family import state
from grpo_rl.telemetry.status import Status

LOOK_S = 0.5
LEAST_S = 60.0
SLOWER_THAN_EVER = 10.0
ANSWER_S = 2.0
"""Seconds in which a process that runs Python says what it is doing."""


class StuckReport(threading.Thread):
    """Watches how long each phase of a step takes, and reports once what each process is doing where one passes its deadline.

    The deadline is `trainer.stuck_s`; without one, ten times the longest that the phase ever took, at least a minute. Where it was
    never done before, it is half of the shortest time after which something would be given up.
    """

    def __init__(
        self, trainer: TrainerConfig, status: Status, worker_groups: Sequence[WorkerGroup], warn: Callable[[str], None]
    ) -> None:
        super().__init__(name="stuck", daemon=True)
        self._given_s = trainer.stuck_s
        self._first_s = min(trainer.start_timeout_s, trainer.step_timeout_s, trainer.collective_timeout_s) / 2
        self._status, self._worker_groups, self._warn = status, worker_groups, warn
        self._longest: dict[str, float] = {}
        self._reported = ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        self.join(2 * ANSWER_S)

    def run(self) -> None:
        place, since = self._status.where(), time.monotonic()
        while not self._over.wait(LOOK_S):
            now, seconds = self._status.where(), time.monotonic() - since
            phase = place.rpartition(", ")[2]
            if now != place:
                self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)
                place, since = now, time.monotonic()
            elif self._status.has_begun and seconds > self.deadline(phase):
                self.report(f"{place} goes on for {seconds:.0f} s")

    def deadline(self, phase: str) -> float:
        """Return the seconds after which this phase is reported."""
        longest = self._longest.get(phase)
        if self._given_s is not None:
            return self._given_s
        return self._first_s if longest is None else max(LEAST_S, SLOWER_THAN_EVER * longest)

    def report(self, why: str) -> None:
        """Print what each process is doing, once in each phase of each step. May be called in any thread."""
        with self._lock:
            place = self._status.where()
            if place == self._reported or self._over.is_set():
                return
            self._reported = place
            lines = [f"stuck? {why}. What each process is doing:", *self._controller(), *self._workers(), *_children()]
        self._warn("\n".join(lines))

    def _controller(self) -> Iterator[str]:
        main, frames = threading.main_thread().ident, sys._current_frames()
        for ident in sorted(frames, key=lambda one: one != main):
            stack = stack_of(ident)
            if ident == main or any("/trainer/" in line for line in stack):
                yield f"  controller (pid {os.getpid()}): {self._status.where()}"
                yield from (f"    {line}" for line in stack)

    def _workers(self) -> Iterator[str]:
        workers = [worker for worker_group in self._worker_groups for worker in list(worker_group.workers)]
        asked = {worker.doing(): worker for worker in workers}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        for ref, worker in asked.items():
            doing: list[Doing] | None = None
            if ref in answered:
                try:
                    doing = ray.get(ref, timeout=ANSWER_S)
                except ray.exceptions.RayError as error:
                    yield f"  {worker.name} (pid {worker.pid}): {type(error).__name__}"
                    continue
            if doing is None:
                method, since = worker.asked
                here = worker.pid is not None and worker.address == ray.util.get_node_ip_address()
                words = f", {state(worker.pid)}" if here and worker.pid is not None else ""
                last = f"; asked for {method} {time.monotonic() - since:.1f} s ago" if method else ""
                yield f"  {worker.name} (pid {worker.pid}): no answer within {ANSWER_S:g} s{words}{last}"
            elif not doing:
                yield f"  {worker.name} (pid {worker.pid}): waits for a call"
            for what, seconds, stack in doing or ():
                yield f"  {worker.name} (pid {worker.pid}): {what} for {seconds:.1f} s"
                yield from (f"    {line}" for line in stack)


def _children() -> Iterator[str]:
    """Yield what the processes do that run functions of rewards and environments."""
    for child in sorted(CHILDREN, key=lambda one: one.pid):
        if child.alive:
            yield f"  {child.name} (pid {child.pid}): {state(child.pid)}; its last message was {child.quiet_s:.1f} s ago"
            yield from (f"    {line}" for line in child.stack())
