"""A rollout pool in this process whose responses take as many ticks as they have tokens, and the policy that it samples."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from test_sync_trainer import Policy

from grpo_rl.rollout.requests import WholeBatches
from grpo_rl.types import GREEDY, Batch, Metrics, Prompt, Rollout, Sampling, Versions, extended


@dataclass(slots=True, eq=False)
class Running:
    """A response that is being sampled."""

    prompt: Prompt
    sample: int
    remaining: int
    versions: Versions = ()


class Pool(WholeBatches):
    """One engine of `slots` requests; a tick gives each running request a token of the weights it has then.

    While the policy is updated so many ticks pass as `Actor.ticks` says. Responses of even samples are right.
    """

    def __init__(self, length: Callable[[str, int], int] = lambda uid, sample: 2, slots: int = 8) -> None:
        self.length, self.slots = length, slots
        self.version = 0
        self.calls: list[str] = []
        self.samplings: list[Sampling] = []
        self.asked: list[tuple[str, int]] = []
        """The uid of each prompt that was asked for, and the version then."""
        self.keeps_weights = False
        self.is_used_by_another_thread = False
        self.ticks_left = 0
        self.is_done = threading.Event()
        self._thread = threading.get_ident()
        self._queue: deque[Running] = deque()
        self._running: list[Running] = []
        self._ended: list[Running] = []

    def sync_weights(self, actor: Any) -> Metrics:
        self._check()
        assert not self.keeps_weights, "another thread is training"
        self.calls.append(f"sync {actor.version}")
        self.version = actor.version
        return {}

    @contextmanager
    def keep_weights(self) -> Iterator[None]:
        self.keeps_weights = True
        try:
            yield
        finally:
            self.keeps_weights = False

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        self._check()
        self.calls.append(f"submit {len(prompts)}x{n}")
        self.samplings.append(sampling)
        ids = []
        for prompt in prompts:
            self.asked.append((prompt.uid, self.version))
            for sample in [*range(n), *([GREEDY] if greedy else [])]:
                self._queue.append(Running(prompt, sample, self.length(prompt.uid, sample)))
                ids.append(f"{prompt.uid}/{sample}")
        return ids

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        self._check()
        while True:
            wanted = [response for response in self._ended if only is None or self._id(response) in only]
            for response in wanted:
                self._ended.remove(response)
                yield self._rollout(response)
            if not self._queue and not self._running:
                self.is_done.set()
                return
            if wait_s is not None and self.ticks_left == 0:
                self.is_done.set()
                time.sleep(0.001)
                return
            if wait_s is not None:
                self.ticks_left -= 1
            if only is not None and not {self._id(response) for response in [*self._queue, *self._running, *self._ended]} & set(
                only
            ):
                return
            self.tick()

    @property
    def is_sampling(self) -> bool:
        return bool(self._queue or self._running or self._ended)

    def tick(self) -> None:
        while self._queue and len(self._running) < self.slots:
            self._running.append(self._queue.popleft())
        for response in list(self._running):
            response.remaining -= 1
            response.versions = extended(response.versions, self.version, 1)
            if response.remaining <= 0:
                self._running.remove(response)
                self._ended.append(response)

    def forget(self, ids: Collection[str]) -> None:
        self._check()
        self._queue = deque(response for response in self._queue if self._id(response) not in ids)
        self._running = [response for response in self._running if self._id(response) not in ids]
        self._ended = [response for response in self._ended if self._id(response) not in ids]

    def generate(self, prompts, n, sampling, on_finish=None, *, greedy=False):  # type: ignore[no-untyped-def]
        self.calls.append("generate")
        return super().generate(prompts, n, sampling, on_finish, greedy=greedy)

    def rest(self) -> None: ...

    def _check(self) -> None:
        """The pool is used from response thread."""
        if threading.get_ident() != self._thread:
            self.is_used_by_another_thread = True

    def _id(self, response: Running) -> str:
        return f"{response.prompt.uid}/{response.sample}"

    def _rollout(self, response: Running) -> Rollout:
        length = sum(number for _, number in response.versions)
        right = response.sample % 2 == 0 if response.sample != GREEDY else False
        ids = (*[2] * (length - 1), 3 if right else 4)
        text = str(response.prompt.ground_truth) if right else "no idea"
        return Rollout(response.prompt, response.sample, ids, (-0.5,) * length, "stop", response.versions, text=text)


class Actor(Policy):
    """The policy whose update takes as long as `ticks` of the pool."""

    def __init__(self, pool: Pool, ticks: int = 3) -> None:
        super().__init__()
        self.pool, self.ticks = pool, ticks
        self.threads: set[str] = set()

    def update(self, batch: Batch) -> Metrics:
        self.threads.add(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.pool.keeps_weights
            self.pool.is_done.clear()
            self.pool.ticks_left = self.ticks
            deadline = time.monotonic() + 120
            while self.pool.is_sampling and not self.pool.is_done.wait(0.01):
                assert time.monotonic() < deadline, "nothing takes in what ends"
        return super().update(batch)
