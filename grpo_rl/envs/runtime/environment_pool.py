"""The environment processes of a run: which episode is in which, deadlines, and losses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_rl.envs.runtime.episode_host import CANCEL_S, HostSetup
from grpo_rl.errors import ClusterError
from grpo_rl.frozen import frozen
from grpo_rl.processes.child import START_S, Child, OutputLog, encode

SEND_S = 5.0
"""After which a process that takes no messages is lost."""

What = Literal["answered", "failed", "timeout", "lost"]
Op = Literal["start", "reset", "step", "close"]


@frozen
class Event:
    episode: str
    what: What
    answer: Mapping[str, Any] | None = None
    cause: str = ""
    seconds: float = 0.0
    """Seconds since the work was asked for."""


class EnvironmentProcess:
    """What it sends is put into `inbox` as (process, message), with None for its end."""

    def __init__(
        self, number: int, setup: dict[str, Any], log: OutputLog, inbox: queue.SimpleQueue[Any], *, is_retry: bool
    ) -> None:
        """`is_retry` if the one before it ended before it was ready."""
        self.number, self.is_retry = number, is_retry
        self.episodes: set[str] = set()
        self.is_ready = False
        self.child = Child("grpo_rl.envs.runtime.episode_host", setup, log)
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Kills a process that takes nothing more."""
        body = encode(message)
        try:
            self.child.send(body, SEND_S)
        except OSError:
            self.child.kill()

    def obituary(self) -> str:
        how = self.child.how_it_ended(TimeoutError("the process does not answer any more"))
        return self.child.with_last_output(how.replace("the process", "the environment process", 1))

    def _read(self, inbox: queue.SimpleQueue[Any]) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while isinstance(message := self.child.receive(), dict):
                inbox.put((self, message))
        self.child.kill()
        inbox.put((self, None))


@dataclass(slots=True, eq=False)
class _Asked:
    serial: int
    process: EnvironmentProcess
    op: Op
    began: float
    deadline: float
    heard: bool = False
    """The process has noticed that it has to close the episode."""


class EnvironmentPool:
    """Used from one thread; nothing but `events` waits.

    An episode whose answer is late has to be ended: what works on it is cancelled. Work that does not end
    then, because it computes or blocks, retires its process, which gets no further episodes and ends with its
    last one. A process that notices nothing any more is killed: its other episodes are lost, and may be begun
    again.
    """

    def __init__(
        self,
        host: HostSetup,
        num_workers: int = 2,
        *,
        max_episodes: int = 512,
        step_timeout_s: float = 60.0,
        memory_limit: int | None = None,
        logs: Sequence[Path] = (),
        inbox: queue.SimpleQueue[Any] | None = None,
    ) -> None:
        """Each process takes `max_episodes` at a time; `memory_limit` is its address space in bytes.

        Another thread makes a call by putting (None, (method, arguments)) into `inbox`.
        """
        self.max_episodes, self.step_timeout_s = max_episodes, step_timeout_s
        self._message = {"host": dataclasses.asdict(host), "memory_limit": memory_limit}
        self._logs = [OutputLog(path) for path in logs] or [OutputLog() for _ in range(num_workers)]
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue() if inbox is None else inbox
        self._serials = itertools.count()
        self._asked: dict[str | int | EnvironmentProcess, _Asked] = {}
        """By the name of an episode the work whose answer it waits for, by its serial number each closing of one (the name may be begun
        again before that has ended), and the start of each process that is not ready."""
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        """Episodes for which there is no room yet."""
        self._closed = False
        self._processes = [self._start(number) for number in range(num_workers)]
        self._retired: list[EnvironmentProcess] = []
        """Without further episodes, because some work cannot be ended."""

    @property
    def pids(self) -> list[int]:
        return [process.child.pid for process in self._processes]

    @property
    def num_waiting(self) -> int:
        """Answers that have not come yet, those of episodes without room included."""
        return len(self._waiting) + sum(work.op in ("reset", "step") for work in self._asked.values())

    def begin(self, episode: str, start: Mapping[str, Any]) -> None:
        self._waiting.append((episode, dict(start)))
        self._admit()

    def step(self, episode: str, turn: Mapping[str, Any]) -> None:
        if (process := self._process_of(episode)) is not None:  # else it was lost, which an event says
            self._ask(process, episode, "step", dict(turn))

    def end(self, episode: str) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] != episode)
        if (process := self._process_of(episode)) is not None:
            process.episodes.discard(episode)
            self._asked.pop(episode, None)
            self._ask(process, episode, "close", None)
            self._admit()

    def events(self, wait_s: float = 0.0) -> list[Event]:
        """Raises ClusterError if processes cannot be started."""
        until = time.monotonic() + wait_s
        events: list[Event] = []
        while True:
            events += self._past_deadlines()
            current_time = time.monotonic()
            deadline = min((work.deadline for work in self._asked.values()), default=until)
            seconds_left = 0.0 if events else max(0.0, min(until, deadline) - current_time)
            with contextlib.suppress(queue.Empty):
                while True:
                    process, message = self._inbox.get(timeout=seconds_left)
                    seconds_left = 0.0
                    if process is not None:
                        events += self._ended(process) if message is None else self._read(process, message)
                    elif message is not None:
                        getattr(self, message[0])(*message[1])
            if events or current_time >= until:
                return events

    def close(self) -> None:
        self._closed = True
        for process in [*self._processes, *self._retired]:
            process.child.kill()
        for log in self._logs:
            log.close()

    def _process_of(self, episode: str) -> EnvironmentProcess | None:
        return next((process for process in [*self._processes, *self._retired] if episode in process.episodes), None)

    def _start(self, number: int, *, is_retry: bool = False) -> EnvironmentProcess:
        process = EnvironmentProcess(number, self._message, self._logs[number], self._inbox, is_retry=is_retry)
        self._note(process, process, "start", START_S)
        return process

    def _note(self, name: str | EnvironmentProcess, process: EnvironmentProcess, op: Op, limit_s: float) -> int:
        """Note a piece of work; return its serial number."""
        serial, start_time = next(self._serials), time.monotonic()
        self._asked[serial if op == "close" else name] = _Asked(serial, process, op, start_time, start_time + limit_s)
        return serial

    def _admit(self) -> None:
        """Once all processes are ready: the first would get all episodes."""
        while self._waiting and all(process.is_ready for process in self._processes):
            process = min(self._processes, key=lambda candidate: len(candidate.episodes))
            if len(process.episodes) >= self.max_episodes:
                return
            episode, start = self._waiting.popleft()
            process.episodes.add(episode)
            self._ask(process, episode, "reset", start)

    def _ask(self, process: EnvironmentProcess, episode: str, op: Op, values: Any) -> None:
        serial = self._note(episode, process, op, CANCEL_S if op == "close" else self.step_timeout_s)
        process.send({"id": episode, "op": op, "serial": serial, "values": values})

    def _read(self, process: EnvironmentProcess, message: dict[str, Any]) -> list[Event]:
        if not process.is_ready:
            if "failed" in message:
                process.child.kill()
                raise ClusterError(f"the environment process cannot start: {message['failed']}")
            process.is_ready = True
            self._forget_work(process)
            self._admit()
            return []
        key = message["serial"] if message["serial"] in self._asked else message["id"]
        work = self._asked.get(key)
        if work is None or work.serial != message["serial"]:
            return []
        if "heard" in message:
            work.heard, work.deadline = True, time.monotonic() + self.step_timeout_s
            return []
        del self._asked[key]
        if "stuck" in message:
            self._retire(process)
        elif work.op == "close":
            self._end_empty()
        if work.op == "close":
            return []
        episode, seconds = message["id"], time.monotonic() - work.began
        if "failed" in message:
            return [Event(episode, "failed", cause=message["failed"], seconds=seconds)]
        return [Event(episode, "answered", message["answer"], seconds=seconds)]

    def _forget_work(self, process: EnvironmentProcess) -> None:
        self._asked = {key: work for key, work in self._asked.items() if work.process is not process}

    def _past_deadlines(self) -> list[Event]:
        """A process that does not close an episode in time gets no other, or is killed."""
        events: list[Event] = []
        current_time = time.monotonic()
        for key, late in [(key, work) for key, work in self._asked.items() if work.deadline <= current_time]:
            if late.op == "start":
                late.process.child.kill()
                raise ClusterError(f"an environment process did not start within {START_S:g} s; {late.process.obituary()}")
            del self._asked[key]
            if late.op != "close":
                cause = f"no answer within step_timeout_s={self.step_timeout_s:g}"
                events.append(Event(str(key), "timeout", cause=cause, seconds=current_time - late.began))
            elif late.heard:
                self._retire(late.process)
            else:
                late.process.child.kill()
        return events

    def _retire(self, process: EnvironmentProcess) -> None:
        if process in self._processes:
            self._processes[self._processes.index(process)] = self._start(process.number)
            self._retired.append(process)
        self._end_empty()

    def _end_empty(self) -> None:
        busy = {work.process for work in self._asked.values()}
        for process in [candidate for candidate in self._retired if not candidate.episodes and candidate not in busy]:
            self._retired.remove(process)
            process.child.kill()

    def _ended(self, process: EnvironmentProcess) -> list[Event]:
        """Another process takes its place."""
        if self._closed:
            return []
        cause = process.obituary()
        self._forget_work(process)
        if process in self._retired:
            self._retired.remove(process)
        if process in self._processes:
            if process.is_retry and not process.is_ready:
                raise ClusterError(f"an environment process cannot start: {cause}")
            fresh = self._start(process.number, is_retry=not process.is_ready)
            self._processes[self._processes.index(process)] = fresh
        return [Event(episode, "lost", cause=cause) for episode in sorted(process.episodes)]
