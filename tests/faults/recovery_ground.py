"""A real Ray session with a pool of tiny replicas and a tiny actor, supervised as in a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.processes.forks import MODULES
from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_sets import Worker, wait_all
from grpo_rl.cluster.recovery.replicas import Replicas
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool
from grpo_rl.cluster.roles.weight_sync import Transfer
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig, TrainerConfig
from grpo_rl.telemetry.terminal.console import Console

HEARTBEAT_S = 1.0
COPIED = (*MODULES, "transformers.models.qwen3.modeling_qwen3", "armed_ranks", "tiny_roles")
START_S = 120.0
STEP_S = 120.0


@contextmanager
def ray_with_slots(count: int) -> Iterator[Pool]:
    """A local Ray whose processes find the modules beside this file."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        stack.enter_context(ray_session(RayInitConfig(), 2, copied=COPIED))
        pool = Pool(1, count, use_gpu=False, timeout_s=START_S)
        yield pool
        pool.release()


class Lines(Console):
    """A console that keeps what it warns of, with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[tuple[float, str]] = []

    def warn(self, message: str) -> None:
        self.warnings.append((time.monotonic(), message))


@dataclass
class Ground:
    """The places, logs and workers that the tests of one module share."""

    slots: Pool
    logs: Path
    lines: Lines = field(default_factory=Lines)
    worker_sets: list[SupervisedSet] = field(default_factory=list)
    supervisors: list[Supervisor] = field(default_factory=list)

    def supervisor(self, **trainer: Any) -> Supervisor:
        settings = {"heartbeat_s": HEARTBEAT_S, "max_restarts": 100, "start_timeout_s": START_S} | trainer
        made = Supervisor(TrainerConfig(**settings), self.lines)
        self.supervisors.append(made)
        return made

    def worker_set(
        self, role: str, size: int, supervisor: Supervisor, threads: int = 1, stateful: bool = False
    ) -> SupervisedSet:
        made = SupervisedSet(
            role,
            self.slots.slots()[:size],
            log_dir=self.logs,
            environment={"OMP_NUM_THREADS": "1"},
            call_timeout_s=STEP_S,
            threads_per_worker=threads,
            supervisor=supervisor,
            stateful=stateful,
        )
        self.worker_sets.append(made)
        return made

    def ranks(self, role: str, size: int, factory: Callable[..., Any], supervisor: Supervisor, stateful: bool) -> SupervisedSet:
        """A built worker set, whose recipe gives each rank its number."""
        worker_set = self.worker_set(role, size, supervisor, stateful=stateful)

        def recipe() -> list[Any]:
            worker_set.where(START_S)
            return worker_set.start_build(factory, [(rank,) for rank in range(size)])

        wait_all(worker_set.workers, worker_set.begin(recipe), START_S, f"start {role}")
        worker_set.built()
        return worker_set

    def pool(self, size: int, factory: Callable[..., Any], argument: Any, actors: SupervisedSet, **more: Any) -> ReplicaPool:
        """A pool of so many replicas that get their weights from these actors; `more` are further PoolOptions."""
        supervisor = actors.supervisor
        assert supervisor is not None
        worker_set = self.worker_set("rollout", size, supervisor, threads=3)
        worker_set.where(START_S)
        wait_all(worker_set.workers, worker_set.start_build(factory, [(argument,)] * size), START_S, "start rollout")

        def build(worker: Worker) -> Any:
            return worker.actor.build.remote(factory, argument)

        options = PoolOptions(max_num_seqs=4, sleeps=False, verify_checksum=False, step_timeout_s=STEP_S, **more)
        transfer = Transfer("object_store", actors, worker_set, 1, START_S)
        return ReplicaPool(Replicas(worker_set, build, supervisor), transfer, options)

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.close()
        for worker_set in self.worker_sets:
            worker_set.shutdown()


def is_alive(pid: int | None) -> bool:
    """Return whether a process with this id runs or is stopped; one that has ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
