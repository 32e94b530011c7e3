"""The process of one machine that asks the judge: what it may ask at once, and another in the place of one that ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from grpo_rl.config.schema.reward import JudgeConfig
from grpo_rl.processes.child import Child, OutputLog, encode
from grpo_rl.rewards.contract import RewardFailure, outcome_of
from grpo_rl.rewards.models.judge_question import ERROR, INVALID, KINDS, TIMEOUT, JudgeSpec
from grpo_rl.rewards.runtime.process import Job
from grpo_rl.rewards.runtime.processes import Broken, Done, Processes

LOOK_S = 1.0
PATIENCE_S = 5.0
"""Seconds for which a process may be silent beyond the longest time of a request."""


class Share(NamedTuple):
    """What one host may ask: requests at once, and seconds from one's beginning to the next's."""

    num_requests: int
    interval_s: float


def share_of(config: JudgeConfig, place: int = 0, num_hosts: int = 1) -> Share:
    """Return the share of a host; with more hosts than requests the last ones may ask nothing."""
    interval_s = 0.0 if config.requests_per_minute is None else 60.0 / config.requests_per_minute
    num_requests = (config.max_concurrency + num_hosts - 1 - place) // num_hosts
    return Share(num_requests, interval_s * min(num_hosts, config.max_concurrency))


class JudgeProcess(Processes):
    """Asks the judge about jobs as they come.

    A process that ends, or says nothing for longer than a request may take, is replaced. If it had several
    jobs, each is asked about again with nothing beside it, so that one which breaks a parser costs the others
    nothing.
    """

    description = "the judge's process"

    def __init__(self, spec: JudgeSpec, done: Done, broken: Broken, log: Path | None = None) -> None:
        self._spec, self._share = spec, share_of(spec.config)
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._asked: dict[int, Job] = {}
        self._serials = itertools.count()
        self._heard = time.monotonic()
        self._child: Child | None = None
        super().__init__(done, broken, [log])

    def put(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self._waiting.extend(jobs)
        self._feed()

    def allow(self, share: Share) -> None:
        """Ask within this share from now on."""
        with self._lock:
            self._share = share
            self._send(encode({"share": share}))
        self._feed()

    def _feed(self) -> None:
        """Send as many jobs as may be asked about at once; a suspect goes alone."""
        failed = []
        with self._lock:
            while self._child is not None and (self._suspects or self._waiting):
                if len(self._asked) >= (1 if self._suspects else self._share.num_requests):
                    break
                job, number = (self._suspects or self._waiting).popleft(), next(self._serials)
                try:
                    fields = encode(job.arguments()[0])
                except (TypeError, ValueError) as error:
                    cause = f"ground_truth or extra_info cannot be sent to the judge's process: {error}"
                    job.outcomes = [RewardFailure(INVALID, cause)]
                    failed.append(job)
                    continue
                if not self._asked:
                    self._heard = time.monotonic()
                self._asked[number] = job
                self._send(b'{"number": %d, "sample": %b}' % (number, fields))
        if failed:
            self._done(failed)

    def _send(self, body: bytes) -> None:
        if self._child is not None:
            try:
                self._child.send(body, self._spec.config.timeout_s)
            except OSError:  # the thread that hears it finds out how it ended
                self._child.kill()

    def _work(self, number: int, log: OutputLog) -> None:
        limit = self._spec.memory_limit_gb
        setup = asdict(self._spec) | {"memory_limit": None if limit is None else int(limit * 2**30)}
        while not self._closed:
            child = Child("grpo_rl.rewards.models.judge", setup, log)
            self._start(number, child)
            with self._lock:
                self._child = child
                self._send(encode({"share": self._share}))
            self._feed()
            cause = self._hear(child)
            child.kill()
            if not self._closed:
                self._ended(cause)

    def _hear(self, child: Child) -> RewardFailure:
        """Hand on answers until the process ends, or is silent for too long; return why."""
        patience_s = self._spec.config.deadline_s + PATIENCE_S
        while True:
            try:
                message = child.receive(LOOK_S)
                self._heard = time.monotonic()
                if not isinstance(message, dict):
                    raise ValueError("the process answered something else")
                with self._lock:
                    job = self._asked.pop(message.get("number", -1), None)
                if job is not None:
                    job.outcomes = [outcome_of(message, KINDS)]
                    self._feed()
                    self._done([job])
            except TimeoutError:
                if self._asked and time.monotonic() > self._heard + patience_s + self._share.interval_s:
                    return RewardFailure(TIMEOUT, f"the judge's process said nothing for {patience_s:.0f} s")
            except (OSError, EOFError, ValueError) as error:
                return RewardFailure(ERROR, child.how_it_ended(error))

    def _ended(self, cause: RewardFailure) -> None:
        """Set aside what a process had; a job that was alone in it has failed."""
        with self._lock:
            self._child = None
            jobs, self._asked = list(self._asked.values()), {}
            if len(jobs) > 1:
                self._suspects.extend(jobs)
                return
        for job in jobs:
            job.outcomes = [cause]
        self._done(jobs)
