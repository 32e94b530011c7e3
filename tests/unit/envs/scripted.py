"""An engine and environments that do what a script says, in this process: for many random episodes in little time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_rl.envs.runtime.environment_pool import Event
from grpo_rl.types import Completion, Request, Support, Versions


class ScriptedEngine:
    """Answers each request with random tokens, in random order; the version of its weights rises now and then."""

    def __init__(self, ids: Sequence[int], stop_ids: Sequence[int], seed: int, longest: int = 6) -> None:
        self.random = random.Random(seed)
        self.ids, self.stop_ids, self.longest = list(ids), list(stop_ids), longest
        self.weight_version = 0
        self._waiting: list[Request] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Completion]:
        if self.random.random() < 0.2:
            self.weight_version += 1
        ended = self.random.sample(self._waiting, self.random.randint(0, len(self._waiting)))
        for request in ended:
            self._waiting.remove(request)
        return [self._completion(request) for request in ended]

    def _completion(self, request: Request) -> Completion:
        limit = request.sampling.max_tokens
        length = self.random.randint(1, self.longest)
        ids = [*self.random.choices(self.ids, k=length - 1), self.random.choice(self.stop_ids)]
        reason: Any = "stop"
        if length > limit:
            ids, reason = ids[:limit], "length"
        old = self.random.randint(0, len(ids))
        versions: Versions = tuple(
            run for run in ((self.weight_version - 1, old), (self.weight_version, len(ids) - old)) if run[1]
        )
        support = None
        if request.sampling.returns_support:
            left = [[token, *self.random.choices(self.ids, k=self.random.randint(0, 3))] for token in ids]
            support = Support(
                np.array([len(one) for one in left], np.int32), np.array([one for some in left for one in some], np.int32)
            )
        logprobs = [self.random.uniform(-9, -0.001) for _ in ids]
        return Completion(request.request_id, ids, logprobs, reason, versions, support)  # type: ignore[arg-type]


class ScriptedEnvironments:
    """Answers in random order; `answer(start, turn)` says what, with None for `reset`."""

    def __init__(
        self, answer: Callable[[Mapping[str, Any], Mapping[str, Any] | None], Mapping[str, Any]], seed: int = 0
    ) -> None:
        self.answer, self.random = answer, random.Random(seed)
        self.open: dict[str, Mapping[str, Any]] = {}
        self.ended: list[str] = []
        self._due: list[Event] = []

    @property
    def num_waiting(self) -> int:
        return len(self._due)

    def begin(self, episode: str, start: Mapping[str, Any]) -> None:
        self.open[episode] = start
        self._due.append(Event(episode, "answered", self.answer(start, None)))

    def step(self, episode: str, turn: Mapping[str, Any]) -> None:
        self._due.append(Event(episode, "answered", self.answer(self.open[episode], turn)))

    def end(self, episode: str) -> None:
        del self.open[episode]
        self.ended.append(episode)
        self._due = [event for event in self._due if event.episode != episode]

    def events(self, wait_s: float = 0.0) -> list[Event]:
        chosen = self.random.sample(self._due, self.random.randint(0, len(self._due)))
        self._due = [event for event in self._due if event not in chosen]
        return chosen

    def close(self) -> None: ...


def answered(
    messages: Sequence[Mapping[str, Any]] = (), reward: float | None = None, *, done: bool = False, **counts: int
) -> dict[str, Any]:
    return {
        "messages": list(messages),
        "reward": reward,
        "done": done,
        "info": {},
        "counts": counts,
        "replaces_prompt": False,
        "tools": [],
        "state": None,
    }
