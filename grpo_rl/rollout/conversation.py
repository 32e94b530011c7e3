"""The tokens of a response of several turns as one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_rl.rollout.reports import joined, pack, unpack
from grpo_rl.types import Completion, Ending, Episode, FinishReason, PlayedTurn, Prompt, Rollout, Support, Versions, extended


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """Its arrays are copies: the blocks of the turns may be freed."""

    prompt: Prompt = None  # type: ignore[assignment]
    keeps_support: bool = False
    pieces: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    supports: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Counts and ids of the tokens that each token was sampled from."""
    length: int = 0
    versions: Versions = ()
    turns: list[PlayedTurn] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    state: int = 0

    @classmethod
    def of(cls, rollout: Rollout, *, keeps_support: bool) -> Conversation:
        conversation = cls(prompt=rollout.prompt, keeps_support=keeps_support)
        conversation.add_turn(rollout, str(rollout.text))
        if rollout.episode is not None:
            conversation.turns, conversation.messages = list(rollout.episode.turns), list(rollout.episode.messages)
        return conversation

    def context(self) -> np.ndarray:
        """Return all tokens so far, the prompt's first."""
        return np.concatenate([self.prompt.token_ids, *self.pieces]).astype(np.int32, copy=False)

    def add_turn(self, turn: Rollout, text: str) -> None:
        """Add a turn's tokens, with the log-probs and versions of their own sampling."""
        ids = np.array(turn.response_ids, dtype=np.int32)
        num_before = len(self.prompt.token_ids) + self.length
        self.turns.append(PlayedTurn(self.length, len(ids), None, turn.cached_tokens, num_before, self.state))
        self.pieces.append(ids)
        self.logprobs.append(np.array(turn.rollout_logprobs, dtype=np.float32))
        if self.keeps_support:
            counts, token_ids = np.empty(0, np.int32), np.empty(0, np.int32)
            if turn.support is not None:
                counts, token_ids = np.array(turn.support.counts, np.int32), np.array(turn.support.token_ids, np.int32)
            self.supports.append((counts, token_ids))
        for version, number in turn.versions:
            self.versions = extended(self.versions, version, number)
        self.length += len(ids)
        self.finish_reason = turn.finish_reason
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens without log-prob that nothing trains."""
        ids = token_ids.astype(np.int32, copy=False)
        self.pieces.append(ids)
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32))
        if self.keeps_support:  # each could only be itself
            self.supports.append((np.ones(len(ids), dtype=np.int32), ids))
        self.length += len(ids)

    def joined(self, sample: int, ended: Ending, **facts: Any) -> Rollout:
        """Return the conversation up to its last turn; `facts` go into its episode."""
        while self.pieces and self.turns and self.length > self.turns[-1].end:
            self.length -= len(self.pieces.pop())
            self.logprobs.pop()
            if self.supports:
                self.supports.pop()
        text = "\n\n".join(message["content"] for message in self.messages if message["role"] == "assistant")
        support = None
        if self.supports:
            counts, ids = zip(*self.supports, strict=True)
            support = Support(joined(counts, np.int32), joined(ids, np.int32))
        finish_reason: FinishReason = "length" if ended == "tokens" else "stop"
        tokens, logprobs = joined(self.pieces, np.int32), joined(self.logprobs, np.float32)
        completion = Completion("", tokens, logprobs, finish_reason, self.versions, support, text)
        (whole,) = unpack(*pack([completion]))
        return Rollout(
            prompt=self.prompt,
            sample_index=sample,
            response_ids=whole.response_ids,
            rollout_logprobs=whole.logprobs,
            finish_reason=finish_reason,
            versions=self.versions,
            support=whole.support,
            text=whole.text,
            episode=Episode(turns=tuple(self.turns), messages=tuple(self.messages), ended=ended, **facts),
        )
