"""Processes that wait to take a lost one's place, with everything imported that a worker there needs.

Of the seconds until a new worker works, most go into starting Python and importing torch, transformers or vLLM. A spare
has done that before it is needed. Unless they are always wanted, there is none until a worker has failed for the first
time: a run in which nothing fails pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_rl.cluster.host import BEATS, Host
from grpo_rl.cluster.placement import Slot
from grpo_rl.config import secrets

if TYPE_CHECKING:
    from grpo_rl.cluster.groups import Worker

# A spare answers at once, unless it is dead, stopped, or deep in an import that does not let go of the interpreter.
TAKE_S = 5.0
NAME = "spare"


@dataclass(frozen=True)
class Place:
    """Where a process runs and with what environment: processes that agree in it can stand in for each other."""

    slot: Slot
    environment: Mapping[str, str]
    threads: int
    """Calls that it answers at once."""

    @property
    def key(self) -> Hashable:
        """Bundles of a placement group are on one node; without GPUs nothing else tells them apart."""
        return (self.slot.placement_group.id, self.slot.gpu_ids, tuple(sorted(self.environment.items())), self.threads)

    def start(self, name: str, log_file: Path) -> Any:
        """A new process: a Ray actor of class Host."""
        strategy = PlacementGroupSchedulingStrategy(self.slot.placement_group, self.slot.bundles[0])
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.slot.gpu_ids)} if self.slot.gpu_ids else {}
        remote: Any = ray.remote  # whose types do not know concurrency groups
        return (
            remote(concurrency_groups={BEATS: 1})(Host)
            .options(num_cpus=0, max_concurrency=self.threads, scheduling_strategy=strategy)
            .remote(name, str(log_file), {**self.environment, **devices}, secrets.known())
        )


class Spares:
    """The spares of a run, by place. `take` and `prepare` may be called from any thread."""

    def __init__(self, wanted: Literal["after_failure", "always", "never"]) -> None:
        self.wanted = wanted
        self._waiting: dict[Hashable, list[Any]] = {}
        self._lock = threading.Lock()

    def take(self, place: Place, name: str, log_file: Path) -> Any | None:
        """A spare that from now on goes by this name and writes to this log; None where there is none that answers."""
        while True:
            with self._lock:
                waiting = self._waiting.get(place.key)
                if not waiting:
                    return None
                spare = waiting.pop()
            try:
                ray.get(spare.become.remote(name, str(log_file)), timeout=TAKE_S)
                return spare
            except ray.exceptions.RayError:
                ray.kill(spare)

    def prepare(self, workers: Sequence[Worker]) -> None:
        """See to it that each of these, all at work, could be replaced by a spare."""
        if self.wanted == "never":
            return
        needed: dict[Hashable, int] = {}
        for worker in workers:
            key = worker.place.key
            needed[key] = needed.get(key, 0) + 1
            with self._lock:
                waiting = self._waiting.setdefault(key, [])
                if len(waiting) >= needed[key]:
                    continue
                spare = worker.place.start(NAME, worker.log_file.with_name(f"{NAME}.log"))
                waiting.append(spare)
            # Nobody waits: the list goes from the worker to the spare, which imports beside its work.
            spare.preload.remote(worker.actor.modules.options(concurrency_group=BEATS).remote())

    def close(self) -> None:
        """End them all."""
        with self._lock:
            spares = [spare for waiting in self._waiting.values() for spare in waiting]
            self._waiting, self.wanted = {}, "never"
        for spare in spares:
            ray.kill(spare)
