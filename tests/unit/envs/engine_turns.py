"""A pool of single turns over one engine in this process, with a record of everything that the engine returned."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from grpo_rl.rollout.engine import RolloutEngine
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.rollout.requests import rollout_id
from grpo_rl.types import Completion, Prompt, Request, Rollout, Sampling


class EngineTurns:
    """`TurnPool` over an engine: it steps while somebody waits."""

    version = 0

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.record: dict[str, tuple[Request, Completion]] = {}
        """Every request that was answered, with the engine's own completion."""
        self._wanted: dict[str, tuple[Prompt, Request]] = {}
        self._ended: dict[str, Rollout] = {}
        self.num_rests = 0

    def rest(self) -> None:
        assert not self._wanted and not self._ended
        self.num_rests += 1

    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        requests = [Request(rollout_id(prompt, 0), prompt.token_ids, sampling) for prompt, sampling, _ in turns]
        for request, (prompt, _, _) in zip(requests, turns, strict=True):
            assert request.request_id not in self._wanted
            self._wanted[request.request_id] = prompt, request
        self.engine.submit(requests)
        return [request.request_id for request in requests]

    def completed(self, wait_s: float) -> Iterator[Rollout]:
        until = time.monotonic() + wait_s
        while True:
            for one in list(self._ended):
                yield self._ended.pop(one)
            if not self.engine.num_unfinished or time.monotonic() > until:
                return
            for completion in self.engine.step():
                if completion.request_id in self._wanted:
                    prompt, request = self._wanted.pop(completion.request_id)
                    self.record[completion.request_id] = request, completion
                    (own,) = unpack(*pack([completion]))
                    reason, versions = own.finish_reason, own.versions
                    self._ended[completion.request_id] = Rollout(
                        prompt, 0, own.response_ids, own.logprobs, reason, versions, support=own.support, text=own.text
                    )

    def forget(self, ids: Collection[str]) -> None:
        for one in ids:
            self._wanted.pop(one, None)
            self._ended.pop(one, None)
