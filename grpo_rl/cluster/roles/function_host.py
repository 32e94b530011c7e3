"""The process on each node that keeps its reward and environment processes (docs/design.md, section 7)."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.background import Watch
from grpo_rl.config.derived import processes_on
from grpo_rl.config.schema.model import EnvironmentConfig
from grpo_rl.config.schema.reward import RewardConfig
from grpo_rl.config.secrets import is_secret_name, remember_environment
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.errors import ClusterError, RewardError
from grpo_rl.frozen import frozen
from grpo_rl.rewards.contract import Outcome, RewardFailure, Sample
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.judge_process import JudgeProcess, Share
from grpo_rl.rewards.runtime.process import Job
from grpo_rl.rewards.runtime.processes import RewardProcesses
from grpo_rl.rewards.sandbox.sandbox import check_available

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import StoredBlock

GATHER_S, LONGEST_GATHER_S = 0.05, 1.0
"""Seconds for which outcomes gather, to be told at once, while more are to come: twice as long each time."""
LOOK_S = 1.0
SentJob = tuple[int, Sequence[str], bool, int, list[Sample]]
"""A job on its way to a host: number, functions, whether they take lists, characters, and the arguments of each response,
whose text may be a `StoredText`."""
SentOutcome = tuple[int, list[Outcome], bool, float]
"""Number, outcomes, whether the call failed as a whole, seconds."""
Event = tuple[str, Any]
"""The name of a service, and what it has to say. With `broken`, why the run cannot go on; with `lost`, why not from here."""
Tell = Callable[[str, Any], None]
BROKEN, LOST, ENVIRONMENT = "broken", "lost", "environment"


@frozen
class StoredText:
    """A response's text, as it lies in a block."""

    block: StoredBlock
    start: int
    length: int

    def __str__(self) -> str:
        return self.block.read()["text"][self.start : self.start + self.length].tobytes().decode("utf-8", "surrogatepass")


@frozen
class ScorerSpec:
    config: RewardConfig
    data_sources: tuple[str, ...]


@frozen
class EnvironmentSpec:
    host: HostSetup
    config: EnvironmentConfig


@frozen
class FunctionSpec:
    """What runs on every node. It travels in a call to the worker, whose arguments no part of Ray shows."""

    scorers: Mapping[str, ScorerSpec | JudgeSpec]
    environments: EnvironmentSpec | None
    needs_sandbox: bool
    logs: Path
    folder: str = field(default_factory=os.getcwd)
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def sizes(self, cores: int) -> dict[str, int]:
        sizes = {
            name: processes_on(cores, scorer.config.num_workers) if isinstance(scorer, ScorerSpec) else 1
            for name, scorer in self.scorers.items()
        }
        if self.environments is not None:
            sizes[ENVIRONMENT] = processes_on(cores, self.environments.config.num_workers)
        return sizes


class FunctionHost:
    """The services of one node. Batches come by `put`; all that has happened goes back by `take`."""

    def __init__(self, spec: FunctionSpec, cores: int, number: int, num_hosts: int) -> None:
        """Start the processes and wait for them. Raises RewardError, with this node's name, if some cannot start here."""
        _take_over(spec)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._services: dict[str, Scorer | Environments] = {}
        self._gather_s = GATHER_S
        self.sizes = spec.sizes(cores)
        self.walls = ""  # around programs that a model writes, in words

        def logs(name: str) -> list[Path]:
            return [spec.logs / f"{name}-{number + num_hosts * place}.log" for place in range(self.sizes[name])]

        try:
            if spec.needs_sandbox:
                check_available()
                self.walls = "programs in a sandbox of user namespaces and a filter of system calls"
            scorers = {name: Scorer(name, scorer, logs(name), self._tell) for name, scorer in spec.scorers.items()}
            self._services |= scorers
            if spec.environments is not None:
                self._services[ENVIRONMENT] = Environments(spec.environments, logs(ENVIRONMENT), self._tell)
            for scorer in scorers.values():
                scorer.processes.check_started()
        except RewardError as error:
            raise RewardError(f"node {socket.gethostname()}: {error}") from error

    def describe(self) -> tuple[str, dict[str, int], str]:
        return socket.gethostname(), self.sizes, self.walls

    def put(self, service: str, batch: Any) -> None:
        self._services[service].put(batch)

    def take(self, wait_s: float) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=wait_s))
            until = time.monotonic() + self._gather_s
            while self._has_more(events):
                events.append(self._events.get(timeout=max(0.0, until - time.monotonic())))
            while True:
                events.append(self._events.get_nowait())
        self._gather_s = min(LONGEST_GATHER_S, 2 * self._gather_s) if self._has_more(events) else GATHER_S
        return events

    def _has_more(self, events: Sequence[Event]) -> bool:
        service = self._services.get(events[-1][0]) if events else None
        return service is not None and service.is_busy

    def close(self) -> None:
        for service in self._services.values():
            service.close()

    def _tell(self, service: str, said: Any) -> None:
        self._events.put((service, said))


class Scorer:
    """The reward processes of a node, or the one that asks the judge: takes jobs, tells their outcomes."""

    def __init__(self, name: str, spec: ScorerSpec | JudgeSpec, logs: Sequence[Path], tell: Tell) -> None:
        self._name, self._tell = name, tell
        self._numbers: dict[Job, int] = {}
        self.processes: RewardProcesses | JudgeProcess
        broken = partial(tell, BROKEN)
        if isinstance(spec, JudgeSpec):
            self.processes = JudgeProcess(spec, self._done, broken, logs[0])
        else:
            self.processes = RewardProcesses(spec.config, self._done, broken, data_sources=spec.data_sources, logs=logs)

    def put(self, batch: Sequence[SentJob] | Share) -> None:
        if isinstance(batch, Share):
            assert isinstance(self.processes, JudgeProcess)
            self.processes.allow(batch)
            return
        try:
            for text in (sample.solution_str for *_, samples in batch for sample in samples):
                if isinstance(text, StoredText):
                    text.block.read()
        except Exception as error:  # of Ray's
            self._tell(LOST, f"a response is lost with the node that sampled it: {type(error).__name__}")
            return
        jobs = []
        for number, functions, batched, size, samples in batch:
            job = Job([partial(Sample, *sample) for sample in samples], functions, batched, size)
            self._numbers[job] = number
            jobs.append(job)
        self.processes.put(jobs)

    @property
    def is_busy(self) -> bool:
        return bool(self._numbers)

    def close(self) -> None:
        self.processes.close()

    def _done(self, jobs: Sequence[Job]) -> None:
        outcomes = [
            (self._numbers.pop(job), [*map(_picklable, job.outcomes)], job.failed_as_whole, job.seconds) for job in jobs
        ]
        self._tell(self._name, outcomes)


def _picklable(outcome: Outcome) -> Outcome:
    """Return an outcome as it can be pickled, which a read-only mapping cannot."""
    return outcome if isinstance(outcome, RewardFailure) else outcome._replace(values=dict(outcome.values))


class Environments(Watch):
    join_timeout_s = 2 * LOOK_S

    def __init__(self, spec: EnvironmentSpec, logs: Sequence[Path], tell: Tell) -> None:
        self._spec, self._logs, self._tell = spec, logs, tell
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_busy = False  # each answer lets an episode go on
        super().__init__("environments")

    def put(self, batch: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        for call in batch:
            self._inbox.put((None, call))

    def close(self) -> None:
        self.stopping.set()
        self._inbox.put((None, None))
        super().close()

    def run(self) -> None:
        pool, config = None, self._spec.config
        try:
            # A process ends with the thread that started it: this one starts all of them.
            limit = None if config.memory_limit_gb is None else int(config.memory_limit_gb * 2**30)
            pool = EnvironmentPool(
                self._spec.host,
                len(self._logs),
                step_timeout_s=config.step_timeout_s,
                memory_limit=limit,
                logs=self._logs,
                inbox=self._inbox,
            )
            while not self.stopping.is_set():
                if events := pool.events(LOOK_S):
                    self._tell(ENVIRONMENT, events)
        except Exception as error:  # a thread's own exception would be lost
            self._tell(BROKEN, ClusterError(f"node {socket.gethostname()}: {error}"))
        finally:
            if pool is not None:
                pool.close()


def _take_over(spec: FunctionSpec) -> None:
    """Make this process's folder, module path and variables those of the command, as far as the node has not its own.

    Variables with the name of a secret, and the judge's key, are the command's in any case.
    """
    if not Path(spec.folder).is_dir():
        raise RewardError(f"node {socket.gethostname()} has no folder {spec.folder}, in which the command was started")
    os.chdir(spec.folder)
    sys.path += [entry for entry in spec.path if entry not in sys.path]
    keys = {scorer.config.api_key_env for scorer in spec.scorers.values() if isinstance(scorer, JudgeSpec)}
    for name, value in spec.variables.items():
        if not name.startswith("RAY_") and (is_secret_name(name) or name in keys or name not in os.environ):
            os.environ[name] = value
    remember_environment()
