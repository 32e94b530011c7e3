"""A pool of single turns over one engine in this process, with a record of everything that the engine returned."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from grpo_rl.rollout.engine import RolloutEngine
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.rollout.requests import WholeBatches, rollout_id, sampling_of
from grpo_rl.types import Completion, Prompt, Request, Rollout, Sampling


class EngineTurns(WholeBatches):
    """`TurnPool` over an engine: it steps while somebody waits."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.record: dict[str, tuple[Request, Completion]] = {}
        """Every request that was answered, with the engine's own completion."""
        self.requests: dict[str, Request] = {}
        self._wanted: dict[str, tuple[Prompt, int]] = {}
        self._ended: dict[str, Any] = {}
        self.num_rests = 0

    @property
    def version(self) -> int:
        return self.engine.weight_version

    def sync_weights(self, actor: Any) -> dict[str, float]:
        return {}

    def keep_weights(self) -> Any:
        return nullcontext()

    def rest(self) -> None:
        assert not self._wanted
        self.num_rests += 1

    def ask(self, turns: Sequence[tuple[Prompt, Sampling, str]]) -> list[str]:
        return self._ask([(prompt, 0, sampling) for prompt, sampling, _ in turns])

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: Sampling, *, greedy: bool = False) -> list[str]:
        return self._ask([(one, sample, sampling_of(sampling, one.uid, sample)) for one in prompts for sample in range(n)])

    def _ask(self, asked: Sequence[tuple[Prompt, int, Sampling]]) -> list[str]:
        requests = [Request(rollout_id(prompt, sample), prompt.token_ids, sampling) for prompt, sample, sampling in asked]
        for request, (prompt, sample, _) in zip(requests, asked, strict=True):
            assert request.request_id not in self._wanted
            self._wanted[request.request_id] = (prompt, sample)
            self.requests[request.request_id] = request
        self.engine.submit(requests)
        return [request.request_id for request in requests]

    def completed(self, wait_s: float | None = None, only: Collection[str] | None = None) -> Iterator[Rollout]:
        until = None if wait_s is None else time.monotonic() + wait_s
        while True:
            for one in [one for one in self._ended if only is None or one in only]:
                reported, (prompt, sample) = self._ended.pop(one), self._wanted.pop(one)
                yield Rollout(
                    prompt,
                    sample,
                    reported.response_ids,
                    reported.logprobs,
                    reported.finish_reason,
                    reported.versions,
                    support=reported.support,
                    text=reported.text,
                )
            if not self.engine.num_unfinished or (until is not None and time.monotonic() > until):
                return
            for completion in self.engine.step():
                if completion.request_id in self._wanted:
                    self.record[completion.request_id] = (self.requests[completion.request_id], completion)
                    (self._ended[completion.request_id],) = unpack(*pack([completion]))

    def forget(self, ids: Collection[str]) -> None:
        for one in ids:
            self._wanted.pop(one, None)
            self._ended.pop(one, None)
