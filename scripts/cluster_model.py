"""A discrete-event model of the schedules: replicas with continuous batching, a trainer, a controller, weight transfers.

Time goes from event to event (SimPy), not token by token: in a replica all requests that are being sampled advance at the
same pace, so that the next completion is known until the batch changes. A replica is one event process however many GPUs
it spans, which is why thousands of GPUs fit. The rates come from cluster_rates.py.
"""

from __future__ import annotations

import heapq
import math
import statistics
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

try:
    import simpy
except ModuleNotFoundError:
    sys.exit("the model of clusters needs the package simpy: bash scripts/setup.sh simulate, or pip install '.[simulate]'")

MOST_TOKENS_AT_A_PACE = 512
"""Tokens that a batch advances before its pace is computed anew: the context that is read grows meanwhile."""
LEFT = 1e-6
"""Tokens that a request may lack to be at its end: the clock is a sum of floating-point numbers."""
LEFT_S = 1e-9
"""Seconds that the trainer may lack to be at its end, for the same reason."""
SCHEDULES = ("colocated", "sync", "one_step_off", "async")
"""`colocated` is trainer.schedule=sync on shared GPUs, `sync` the same with pools of their own."""


@dataclass(frozen=True)
class EngineRates:
    """The seconds that a replica needs.

    A decode step of b requests with c tokens of context takes overhead_s + max(weights_s + c * context_s, b * sequence_s):
    reading weights and cache from memory, or computing, whichever takes longer.
    """

    overhead_s: float
    sequence_s: float
    weights_s: float = 0.0
    context_s: float = 0.0
    prefill_token_s: float = 0.0
    max_sequences: int = 256

    def step_s(self, num_sequences: int, context: float) -> float:
        """Return the seconds of one decode step."""
        return self.overhead_s + max(self.weights_s + context * self.context_s, num_sequences * self.sequence_s)


@dataclass(frozen=True)
class TrainerRates:
    """The seconds of all passes over one batch.

    fixed_s and the longest of three: computing all tokens, the rank with the longest sequence, and moving the shards of the
    weights once for each micro-batch, which overlaps with computing.
    """

    fixed_s: float
    token_s: float
    rank_token_s: float = 0.0
    """Seconds per token on one rank."""
    micro_batch_s: float = 0.0
    micro_batch_tokens: float = float("inf")
    """The tokens of one micro-batch, over all ranks together."""

    def batch_s(self, tokens: float, longest: float) -> float:
        """Return the seconds of one batch."""
        shards_s = max(1, math.ceil(tokens / self.micro_batch_tokens)) * self.micro_batch_s
        return self.fixed_s + max(tokens * self.token_s, longest * self.rank_token_s, shards_s)


@dataclass(frozen=True)
class ClusterRates:
    """The seconds of everything that takes time, whatever the lengths of the responses."""

    engine: EngineRates
    trainer: TrainerRates
    num_replicas: int = 1
    transfer_s: float = 0.0
    """Seconds in which weights go to the engines, and neither side works."""
    controller_rollout_s: float = 0.0
    """Seconds of the controller, which is one process, for each response that ends."""
    controller_step_s: float = 0.0
    """Seconds of the controller between a complete batch and its training."""
    reward_s: float = 0.0
    """Seconds from the end of a response to its reward."""
    switch_s: float = 0.0
    """Seconds in which shared GPUs change between sampling and training; colocated only."""
    recomputes_cache: bool = False
    """True where new weights make the engines read the prompts and responses of unfinished requests anew: async only,
    trainer.asynchronous.keep_cache=false."""
    engine_factors: tuple[float, ...] = (1.0,)
    """Factors of the engines' seconds, one of which is drawn for each step: how much measured steps differ from the rates.

    Where two sides wait for each other, a mean step is longer than the means of both sides say.
    """
    trainer_factors: tuple[float, ...] = (1.0,)
    engine_slowdown: float = 1.0
    """The factor of the engines' seconds while the trainer works, and `trainer_slowdown` that of the trainer's while an
    engine does: both sides of one machine share caches, memory bandwidth and clock. 1 for pools on devices of their own."""
    trainer_slowdown: float = 1.0


@dataclass(frozen=True)
class Work:
    """The work of one step: groups to sample and to train, and their lengths."""

    num_groups: int
    group_size: int
    prompt_length: int
    lengths: Callable[[int], np.ndarray]
    """A function that returns that many lengths of responses, int64."""
    steps: int = 8
    max_staleness: int = 1


@dataclass
class Group:
    """The responses to one prompt, from their submission to their training."""

    number: int
    lengths: np.ndarray
    version: int
    """The version of the weights at the submission: that of its oldest token, or an older one."""
    missing: int = 0
    trained_at: int | None = None
    """The version that it was trained on with; the difference is its staleness."""

    def tokens(self, prompt_length: int) -> int:
        return int(self.lengths.sum()) + len(self.lengths) * prompt_length


@dataclass
class Result:
    """The times of a simulated training, and its groups."""

    steps_s: list[float]
    """Seconds of each step, from the end of a weight transfer to the end of the next."""
    groups: list[Group]
    trainer_s: float
    transfer_s: float
    controller_s: float
    total_s: float
    busy_s: float
    """Mean over the replicas of the seconds in which a request was being sampled."""
    filled: float
    """Mean number of requests in a replica while it is busy, as a share of its slots."""

    def step_s(self, skip: int = 2) -> float:
        """Return the mean seconds of a step, without the first ones, in which pipelines fill, and as many last ones."""
        return statistics.fmean(self.steps_s[skip : len(self.steps_s) - skip] or self.steps_s)

    def staleness(self) -> list[int]:
        """Return the staleness of each trained group, in versions."""
        return [group.trained_at - group.version for group in self.groups if group.trained_at is not None]


class Replica:
    """One engine: requests wait in the pool's queue until one of its slots is free."""

    def __init__(self, env: simpy.Environment, rates: EngineRates, pool: Pool) -> None:
        self.env, self.rates, self.pool = env, rates, pool
        self.active: list[tuple[float, int, int, Group]] = []
        """A heap of (tokens on the replica's clock at which the request ends, number of the request, length, group)."""
        self.num_taken = 0
        self.assigned = 0
        self.clock = self.context = self.owed_s = 0.0
        self.busy_s = self.filled_s = 0.0
        self.paused = self.sampling = False
        self.wake = env.event()
        self._cached: set[int] = set()
        env.process(self._run())

    def take(self, group: Group, length: int) -> None:
        """Begin a request. The prompt of a group is read once; other requests of the batch wait meanwhile."""
        if group.number not in self._cached:
            self._cached.add(group.number)
            self.owed_s += self.pool.prompt_length * self.rates.prefill_token_s
        self.context += self.pool.prompt_length
        heapq.heappush(self.active, (self.clock + length, self.num_taken, length, group))
        self.num_taken += 1
        self.assigned += 1

    def read_again(self) -> None:
        """Compute keys and values of all that is unfinished anew, before anything more is sampled; each prompt once."""
        prompts = len({group.number for _, _, _, group in self.active})
        tokens = self.context - (len(self.active) - prompts) * self.pool.prompt_length
        self.owed_s += tokens * self.rates.prefill_token_s

    def look(self) -> None:
        """Compute the next completion anew: a request came, or a pause began or ended."""
        if not self.wake.triggered:
            self.wake.succeed()

    def _run(self) -> Generator[Any, Any, None]:
        while True:
            self.wake = self.env.event()
            self._samples(not self.paused and bool(self.active))
            if not self.sampling:
                yield self.wake
                continue
            slowdown = self.pool.slowdown
            pace = self.rates.step_s(len(self.active), self.context) * self.pool.factor
            tokens = min(self.active[0][0] - self.clock, MOST_TOKENS_AT_A_PACE)
            started, batch = self.env.now, len(self.active)
            yield self.env.timeout((self.owed_s + tokens * pace) * slowdown) | self.wake
            self._advance(self.env.now - started, slowdown, pace, batch)

    def _samples(self, sampling: bool) -> None:
        """Note whether this replica works from now on: the trainer's pace may depend on it."""
        if sampling != self.sampling:
            self.sampling = sampling
            self.pool.num_sampling += 1 if sampling else -1
            if not self.pool.load_changed.triggered:
                self.pool.load_changed.succeed()

    def _advance(self, seconds: float, slowdown: float, pace: float, batch: int) -> None:
        """Count what was sampled in these seconds, each `slowdown` times as long, and hand over what has ended."""
        self.busy_s += seconds
        self.filled_s += seconds * batch
        worked = seconds / slowdown
        paid = min(self.owed_s, worked)
        self.owed_s -= paid
        tokens = (worked - paid) / pace if pace > 0 else 0.0
        self.clock += tokens
        self.context += tokens * batch
        ended = []
        while self.active and self.active[0][0] <= self.clock + LEFT:
            _, _, length, group = heapq.heappop(self.active)
            self.context -= length + self.pool.prompt_length
            self.assigned -= 1
            ended.append(group)
        if not self.active:
            self.context = 0.0
        if ended:
            self.pool.ended(self, ended)


class Pool:
    """All replicas: each request goes to the one with the fewest, up to its slots; the others wait in order."""

    def __init__(self, env: simpy.Environment, rates: ClusterRates, work: Work) -> None:
        self.env, self.rates, self.prompt_length = env, rates, work.prompt_length
        self.factor = 1.0
        """The factor of the engines' seconds in the step that is going on."""
        self.slowdown = 1.0
        """The factor of the engines' seconds because the trainer works at this moment."""
        self.num_sampling = 0
        """The number of replicas that work at this moment; `load_changed` happens when it changes."""
        self.load_changed = env.event()
        self.queue: deque[tuple[Group, int]] = deque()
        self.replicas = [Replica(env, rates.engine, self) for _ in range(rates.num_replicas)]
        self.complete: list[Group] = []
        """Groups with all their rewards, in the order in which they became complete."""
        self.unfinished: Counter[int] = Counter()
        """The number of groups that are not complete, by the version at their submission."""
        self.changed = env.event()
        self.controller_s = 0.0
        self._controller_free = 0.0

    def submit(self, groups: Sequence[Group]) -> None:
        """Ask for the responses of these groups."""
        for group in groups:
            group.missing = len(group.lengths)
            self.unfinished[group.version] += 1
            self.queue.extend((group, int(length)) for length in group.lengths)
        slots = self.rates.engine.max_sequences
        # (requests, number): the tie is broken the same way each time
        fewest = [(one.assigned, place) for place, one in enumerate(self.replicas) if one.assigned < slots]
        heapq.heapify(fewest)
        touched = set()
        while self.queue and fewest:
            assigned, place = fewest[0]
            self.replicas[place].take(*self.queue.popleft())
            touched.add(place)
            if assigned + 1 < slots:
                heapq.heapreplace(fewest, (assigned + 1, place))
            else:
                heapq.heappop(fewest)
        for place in touched:
            self.replicas[place].look()

    def ended(self, replica: Replica, groups: Sequence[Group]) -> None:
        """Give the free slots to what waits, and pass on what is complete by way of rewards and the controller."""
        while self.queue and replica.assigned < self.rates.engine.max_sequences:
            replica.take(*self.queue.popleft())
        for group in groups:
            cost = self.rates.controller_rollout_s
            self.controller_s += cost
            self._controller_free = max(self._controller_free, self.env.now + self.rates.reward_s) + cost
            group.missing -= 1
            if group.missing == 0:
                self.env.process(self._completed(group, self._controller_free - self.env.now))

    def pause(self, paused: bool) -> None:
        """Hold the engines, or let them go on with the same requests, after a transfer that took time: what they sampled is
        counted when they are held."""
        for replica in self.replicas:
            replica.paused = paused
            if not paused and self.rates.recomputes_cache:
                replica.read_again()
            replica.look()

    def beside(self, seconds: float) -> Generator[Any, Any, None]:
        """Let the trainer work for so many seconds: either side is slower for as long as the other one works, too."""
        self._trains(True)
        left = seconds
        while left > LEFT_S:
            factor = self.rates.trainer_slowdown if self.num_sampling else 1.0
            self.load_changed = self.env.event()
            started = self.env.now
            yield self.env.timeout(left * factor) | self.load_changed
            left -= (self.env.now - started) / factor
        self._trains(False)

    def _trains(self, training: bool) -> None:
        """Set the engines' pace, and let them compute their next completion anew."""
        self.slowdown = self.rates.engine_slowdown if training else 1.0
        for replica in self.replicas:
            replica.look()

    def _completed(self, group: Group, delay: float) -> Generator[Any, Any, None]:
        yield self.env.timeout(delay)
        self.complete.append(group)
        self.unfinished[group.version] -= 1
        if not self.changed.triggered:
            self.changed.succeed()

    def wait_for(self, is_enough: Callable[[], bool]) -> Generator[Any, Any, None]:
        """Wait until the complete groups are enough."""
        while not is_enough():
            self.changed = self.env.event()
            yield self.changed


@dataclass
class Simulation:
    """One training of `work.steps` steps under one schedule."""

    rates: ClusterRates
    work: Work
    schedule: str
    env: simpy.Environment = field(default_factory=simpy.Environment)
    version: int = 0
    groups: list[Group] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    trainer_s: float = 0.0
    transfer_s: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self) -> Result:
        """Simulate all steps."""
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: there are {', '.join(SCHEDULES)}")
        self.pool = Pool(self.env, self.rates, self.work)
        step = {"one_step_off": self._one_step_off, "async": self._async}.get(self.schedule, self._sync)
        self.env.run(until=self.env.process(step()))
        replicas, slots = self.pool.replicas, self.rates.engine.max_sequences
        busy_s = sum(replica.busy_s for replica in replicas)
        filled_s = sum(replica.filled_s for replica in replicas)
        return Result(
            self.steps_s,
            self.groups,
            self.trainer_s,
            self.transfer_s,
            self.pool.controller_s + self.rates.controller_step_s * self.work.steps,
            self.env.now,
            busy_s / len(replicas),
            filled_s / busy_s / slots if busy_s else 0.0,
        )

    # ---- the schedules -------------------------------------------------------------------------------------

    def _sync(self) -> Generator[Any, Any, None]:
        """Sample with the present weights, train, send the weights."""
        switch_s = self.rates.switch_s if self.schedule == "colocated" else 0.0
        for _ in range(self.work.steps):
            began = self.env.now
            self._submit(self.work.num_groups)
            yield from self.pool.wait_for(lambda: len(self.pool.complete) >= self.work.num_groups)
            yield self.env.timeout(switch_s)
            yield from self._train(self._take())
            yield self.env.timeout(switch_s)
            yield from self._send()
            self.steps_s.append(self.env.now - began)

    def _one_step_off(self) -> Generator[Any, Any, None]:
        """Train one batch while the next one is sampled with the weights of before."""
        batch = self.work.num_groups
        self._submit(batch)
        yield from self.pool.wait_for(lambda: len(self.pool.complete) >= batch)
        for step in range(self.work.steps):
            began = self.env.now
            trained = self._take()
            last = step == self.work.steps - 1
            if not last:
                self._submit(batch)
            yield from self._train(trained)
            if not last:
                yield from self.pool.wait_for(lambda: len(self.pool.complete) >= batch)
            yield from self._send()
            self.steps_s.append(self.env.now - began)

    def _async(self) -> Generator[Any, Any, None]:
        """Keep up to (max_staleness + 1) batches on their way; train what is complete, the groups that are due first."""
        batch, staleness = self.work.num_groups, self.work.max_staleness
        submitted = 0
        for step in range(self.work.steps):
            began = self.env.now
            left = self.work.steps * batch - submitted
            wanted = min((staleness + 1) * batch - (submitted - step * batch), left)
            self._submit(wanted)
            submitted += wanted
            yield from self.pool.wait_for(self._is_ready)
            yield from self._train(self._take())
            self.pool.pause(True)
            yield from self._send()
            self.pool.pause(False)
            self.steps_s.append(self.env.now - began)

    def _is_ready(self) -> bool:
        """Return whether a batch is complete, with all groups that the bound on staleness lets wait no longer."""
        due = self.version - self.work.max_staleness
        late = sum(number for version, number in self.pool.unfinished.items() if version <= due)
        return late == 0 and len(self.pool.complete) >= self.work.num_groups

    # ---- the parts of a step -------------------------------------------------------------------------------

    def _submit(self, number: int) -> None:
        work, first = self.work, len(self.groups)
        lengths = work.lengths(number * work.group_size).reshape(number, work.group_size)
        new = [Group(first + place, lengths[place], self.version) for place in range(number)]
        self.groups += new
        self.pool.factor = float(self.rng.choice(self.rates.engine_factors))
        self.pool.submit(new)

    def _take(self) -> list[Group]:
        """Return a batch of complete groups: the oldest versions first, and of one version those that ended first."""
        order = sorted(range(len(self.pool.complete)), key=lambda place: (self.pool.complete[place].version, place))
        chosen = set(order[: self.work.num_groups])
        taken = [self.pool.complete[place] for place in sorted(chosen)]
        self.pool.complete = [group for place, group in enumerate(self.pool.complete) if place not in chosen]
        return taken

    def _train(self, batch: Sequence[Group]) -> Generator[Any, Any, None]:
        yield self.env.timeout(self.rates.controller_step_s)
        for group in batch:
            assert group.trained_at is None, "a group is trained once"
            group.trained_at = self.version
        tokens = sum(group.tokens(self.work.prompt_length) for group in batch)
        longest = self.work.prompt_length + max(int(group.lengths.max()) for group in batch)
        seconds = self.rates.trainer.batch_s(tokens, longest) * float(self.rng.choice(self.rates.trainer_factors))
        began = self.env.now
        if self.rates.engine_slowdown == self.rates.trainer_slowdown == 1.0:
            yield self.env.timeout(seconds)
        else:
            yield from self.pool.beside(seconds)
        self.trainer_s += self.env.now - began

    def _send(self) -> Generator[Any, Any, None]:
        self.transfer_s += self.rates.transfer_s
        yield self.env.timeout(self.rates.transfer_s)
        self.version += 1


def simulate(rates: ClusterRates, work: Work, schedule: str) -> Result:
    """Return what one training would take."""
    return Simulation(rates, work, schedule).run()


def reduced(rates: ClusterRates, work: Work, most_replicas: int) -> tuple[ClusterRates, Work]:
    """Return a cluster with at most so many replicas and the same load on each, of which all times are those of the whole one.

    Replicas differ only by chance, so a part of them shows what all do; trainer and controller see as much work as before.
    """
    factor = max(1, min(math.ceil(rates.num_replicas / most_replicas), work.num_groups))
    if factor == 1:
        return rates, work
    trainer = replace(
        rates.trainer,
        token_s=rates.trainer.token_s * factor,
        micro_batch_tokens=rates.trainer.micro_batch_tokens / factor,
    )
    smaller = replace(
        rates,
        trainer=trainer,
        num_replicas=max(1, round(rates.num_replicas / factor)),
        controller_rollout_s=rates.controller_rollout_s * factor,
    )
    return smaller, replace(work, num_groups=max(1, round(work.num_groups / factor)))
