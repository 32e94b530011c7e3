"""Rewards computed beside the sampling, in supervised processes: a deadline for each, a kind for every failure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_rl.config.schema import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.rewards.calls import Component
from grpo_rl.rewards.compose import RewardFunction, place, sample_of
from grpo_rl.rewards.failures import ERROR, INVALID, KINDS, TIMEOUT, RewardFailure, summary
from grpo_rl.rewards.pool import KILL_S, START_TIMEOUT_S, OutputLog, Reply, Worker, setup_of
from grpo_rl.rewards.results import Result, read_result
from grpo_rl.rewards.wire import encode
from grpo_rl.types import GREEDY, Rollout

Key = tuple[str, int]
Outcome = Result | RewardFailure


@dataclass(slots=True)
class _Job:
    """One request to a process: a response for all functions, or many for those that take lists."""

    rollouts: list[Rollout]
    components: list[Component]
    batched: bool = False
    outcomes: list[list[Outcome]] = field(default_factory=list)
    """For each rollout, one of each component; shorter after a failure. Written once, before `done`."""
    done: bool = False


class RewardRunner:
    """Scores rollouts in `reward.num_workers` processes as they are submitted; implements `roles.Rewarder`.

    A response that is not scored within `reward.timeout_s` costs its process, which is killed with all that it started and
    replaced; so does one that kills it. What becomes of the rollout says `reward.on_failure`. No result depends on
    which process answers first: functions that take lists are called in `wait`, with all its rollouts in their order.
    """

    def __init__(
        self,
        function: RewardFunction,
        config: RewardConfig,
        *,
        data_sources: Iterable[str] = (),
        log_folder: Path | None = None,
    ) -> None:
        """Start the processes. They load what the rules for `data_sources` need, and print to `log_folder`/reward-N.log."""
        self._function, self._config = function, config
        self.factors = function.factors
        self._singly = [component for component in function.components if not component.batched]
        self._batched = [component for component in function.components if component.batched]
        self._setup = setup_of(config, sorted(set(data_sources)))
        self._jobs: dict[Key, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._ready: set[int] = set()
        """Places whose process can be asked."""
        self._broken: str | None = None
        self._last_news = time.monotonic()
        self.pids: dict[int, int] = {}
        """The process of each place, for those who watch them."""
        paths = [None if log_folder is None else log_folder / f"reward-{place}.log" for place in range(config.num_workers)]
        self._threads = [threading.Thread(target=self._work, args=(i, path), daemon=True) for i, path in enumerate(paths)]
        for thread in self._threads:
            thread.start()

    def check_started(self) -> None:
        """Return when every process is ready, also those that replace others. Raises RewardError, with the cause, when one cannot start."""
        deadline = time.monotonic() + START_TIMEOUT_S + KILL_S
        with self._changed:
            while len(self._ready) < len(self._threads) and self._broken is None and time.monotonic() < deadline:
                self._changed.wait(1.0)
            if self._broken is not None or len(self._ready) < len(self._threads):
                raise RewardError(self._broken or f"the reward processes did not start within {START_TIMEOUT_S:g} s")

    def submit(self, rollout: Rollout) -> None:
        """Start scoring; returns at once. The same rollout given again while it is pending is scored once."""
        if self._closed:
            raise RuntimeError("the reward runner is closed")
        pending = self._jobs.get(_key(rollout))
        if pending is None or pending.rollouts[0].response_ids != rollout.response_ids:
            job = self._jobs[_key(rollout)] = _Job([rollout], self._singly, done=not self._singly, outcomes=[[]])
            if not job.done:
                self._queue.put(job)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts, each with `reward`, `reward_parts` and, where they are read, `steps`, or with `failure`.

        Submits those that were not. What a failed one has for a reward says `reward.on_failure`. Raises RewardError, with
        counts by kind and the first causes, when one failed and the run shall stop, and when all sampled ones have.
        """
        for rollout in rollouts:
            self.submit(rollout)
        jobs = [self._jobs[_key(rollout)] for rollout in rollouts]
        together = _Job(list(rollouts), self._batched, batched=True)
        if self._batched and rollouts:
            self._queue.put(together)
            self._await([*jobs, together])
        else:
            together.outcomes = [[] for _ in rollouts]
            self._await(jobs)
        for rollout, job, further in zip(rollouts, jobs, together.outcomes, strict=True):
            self._settle(rollout, [*job.outcomes[0], *further])
            self._jobs.pop(_key(rollout), None)
        self._judge(rollouts)
        return list(rollouts)

    def close(self) -> None:
        """Kill the processes and end the threads; what is pending is given up."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + KILL_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---- what a rollout gets -------------------------------------------------------------------------

    def _settle(self, rollout: Rollout, outcomes: Sequence[Outcome]) -> None:
        try:
            rollout.reward, rollout.reward_parts, rollout.steps = self._function.assemble(rollout, outcomes)
            rollout.failure = rollout.failure_cause = None
        except RewardFailure as failure:
            rollout.failure, rollout.failure_cause = failure.kind, failure.cause
            rollout.reward = self._config.failure_value if self._config.on_failure == "value" else None
            rollout.reward_parts, rollout.steps = {}, None

    def _judge(self, rollouts: Sequence[Rollout]) -> None:
        failures = [(r.failure, r.failure_cause or "") for r in rollouts if r.failure is not None]
        if failures and self._config.on_failure == "stop":
            raise RewardError(f"{summary(failures, len(rollouts))} (reward.on_failure=stop)")
        if failures and all(rollout.failure is not None for rollout in rollouts if rollout.sample_index != GREEDY):
            raise RewardError(f"no response has a reward: {summary(failures, len(rollouts))}")

    # ---- the threads, each with one process -----------------------------------------------------------

    def _await(self, jobs: Sequence[_Job]) -> None:
        # Some process starts or answers all the time; silence means that the supervision itself is broken.
        patience = START_TIMEOUT_S + self._config.timeout_s + 2 * KILL_S
        self._last_news = time.monotonic()
        with self._changed:
            while left := [job for job in jobs if not job.done]:
                if self._broken is not None:
                    raise RewardError(self._broken)
                if time.monotonic() - self._last_news > patience:
                    raise RewardError(f"no reward ended for {patience:.0f} s; {len(left)} are waited for")
                self._changed.wait(1.0)

    def _work(self, number: int, log_path: Path | None) -> None:
        log = OutputLog(log_path)
        worker: Worker | None = None
        try:
            worker = self._start(number, log)
            while (job := self._queue.get()) is not None and not self._closed:
                if not worker.alive:
                    worker = self._start(number, log)
                job.outcomes = self._outcomes(job, worker)
                if worker.num_asked > 2 and worker.died_by_itself:
                    # An earlier call may have left it broken: a response answers only for a process that no other has used.
                    worker = self._start(number, log)
                    job.outcomes = self._outcomes(job, worker)
                self._tell(job, number, worker)
                if not worker.alive and not self._closed:
                    worker = self._start(number, log)
        except Exception as error:  # a thread's own exception would be lost
            self._break(f"reward processes: {error}")
        finally:
            if worker is not None:
                worker.kill()
            log.close()

    def _start(self, number: int, log: OutputLog) -> Worker:
        """A process that can be asked. Raises RewardError when it cannot be started."""
        worker = Worker(self._setup, log, lambda: self._closed)
        self.pids[number] = worker.pid
        trouble = worker.start_up()
        if trouble is not None:
            limit = self._config.memory_limit_gb
            hint = "" if limit is None else f" (its memory ends at reward.memory_limit_gb={limit:g})"
            raise RewardError(f"the process of the reward functions cannot start: {trouble}{hint}")
        with self._changed:
            self._ready.add(number)
            self._last_news = time.monotonic()
            self._changed.notify_all()
        return worker

    def _outcomes(self, job: _Job, worker: Worker) -> list[list[Outcome]]:
        try:
            samples = [sample_of(rollout) for rollout in job.rollouts]
            request = encode({"samples": samples, "batched": job.batched})
        except (TypeError, ValueError) as error:
            failure = RewardFailure(ERROR, f"ground_truth or extra_info cannot be sent to a reward function: {error}")
            return [[failure] for _ in job.rollouts]
        reply = worker.ask(request, len(job.components), self._config.timeout_s)
        if reply.answers and isinstance(reply.answers[-1], dict) and reply.answers[-1].get("exit"):
            worker.kill()
        return _read_reply(job, reply, self._config.timeout_s)

    def _tell(self, job: _Job, number: int, worker: Worker) -> None:
        with self._changed:
            job.done = True
            if not worker.alive:
                self._ready.discard(number)
            self._last_news = time.monotonic()
            self._changed.notify_all()

    def _break(self, why: str) -> None:
        with self._changed:
            if not self._closed:
                self._broken = why
            self._changed.notify_all()


def _read_reply(job: _Job, reply: Reply, timeout_s: float) -> list[list[Outcome]]:
    """Each rollout's outcomes: what was answered, and at the first answer that is missing why it is."""
    rows: list[list[Outcome]] = [[] for _ in job.rollouts]
    for component, answer in zip(job.components, reply.answers, strict=False):
        given = answer.get("answers") if job.batched and isinstance(answer, dict) and "failure" not in answer else None
        column = given if isinstance(given, list) and len(given) == len(rows) else [answer] * len(rows)
        for row, rollout, one in zip(rows, job.rollouts, column, strict=True):
            row.append(_read_answer(one, place(component.name, rollout)))
    if reply.ended is not None:
        name = job.components[len(reply.answers)].name
        for row, rollout in zip(rows, job.rollouts, strict=True):
            row.append(_missing(reply, timeout_s, rollout).at(place(name, rollout)))
    return rows


def _missing(reply: Reply, timeout_s: float, rollout: Rollout) -> RewardFailure:
    if reply.timed_out:
        cause = f"took longer than reward.timeout_s={timeout_s:g} (response of {len(rollout.text)} characters)"
        return RewardFailure(TIMEOUT, cause)
    return RewardFailure(ERROR, str(reply.ended))


def _read_answer(answer: Any, where: str) -> Outcome:
    """What a process says of one response; its word is checked like a function's, as that may be who wrote it."""
    try:
        if isinstance(answer, dict) and answer.get("failure") in KINDS:
            raise RewardFailure(answer["failure"], str(answer.get("cause")))
        if not isinstance(answer, dict) or "result" not in answer:
            raise RewardFailure(INVALID, "the process answered something else")
        return read_result(answer["result"])
    except RewardFailure as failure:
        return failure.at(where)


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index
