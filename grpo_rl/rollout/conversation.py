"""The tokens of a response of several turns as one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from grpo_rl.rollout.reports import joined, pack, unpack
from grpo_rl.rollout.requests import rollout_of
from grpo_rl.types import Completion, Ending, Episode, FinishReason, PlayedTurn, Prompt, Rollout, Support, Versions, extended

_DTYPES: tuple[type[np.int32] | type[np.float32], ...] = (np.int32, np.float32, np.int32, np.int32)


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """Its arrays are copies: the blocks of the turns may be freed."""

    prompt: Prompt = None  # type: ignore[assignment]
    keeps_support: bool = False
    pieces: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    """Token ids, log-probs, and counts and ids of the tokens that each token was sampled from."""
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
        return np.concatenate([self.prompt.token_ids, *(piece[0] for piece in self.pieces)]).astype(np.int32, copy=False)

    def add_turn(self, turn: Rollout, text: str) -> None:
        """Add a turn's tokens, with the log-probs and versions of their own sampling."""
        num_ids, num_before = len(turn.response_ids), len(self.prompt.token_ids) + self.length
        self.turns.append(PlayedTurn(self.length, num_ids, None, turn.cached_tokens, num_before, self.state))
        support = turn.support if self.keeps_support else None
        counts, token_ids = ((), ()) if support is None else (support.counts, support.token_ids)
        self._add(turn.response_ids, turn.rollout_logprobs, counts, token_ids)
        for version, number in turn.versions:
            self.versions = extended(self.versions, version, number)
        self.finish_reason = turn.finish_reason
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens without log-prob that nothing trains."""
        num_ids = len(token_ids)
        # Each could only be itself.
        self._add(token_ids, np.zeros(num_ids), *((np.ones(num_ids), token_ids) if self.keeps_support else ((), ())))

    def _add(self, *columns: ArrayLike) -> None:
        self.pieces.append(tuple(np.array(column, dtype) for column, dtype in zip(columns, _DTYPES, strict=True)))
        self.length += len(self.pieces[-1][0])

    def joined(self, sample: int, ended: Ending, **facts: Any) -> Rollout:
        """Return the conversation up to its last turn; `facts` go into its episode."""
        while self.pieces and self.turns and self.length > self.turns[-1].end:
            self.length -= len(self.pieces.pop()[0])
        text = "\n\n".join(message["content"] for message in self.messages if message["role"] == "assistant")
        columns = zip(*self.pieces, strict=True) if self.pieces else ((),) * len(_DTYPES)
        tokens, logprobs, counts, ids = (joined(arrays, dtype) for arrays, dtype in zip(columns, _DTYPES, strict=True))
        support = Support(counts, ids) if self.keeps_support and self.pieces else None
        finish_reason: FinishReason = "length" if ended == "tokens" else "stop"
        completion = Completion("", tokens, logprobs, finish_reason, self.versions, support, text)
        (whole,) = unpack(*pack([completion]))
        episode = Episode(turns=tuple(self.turns), messages=tuple(self.messages), ended=ended, **facts)
        return rollout_of(self.prompt, sample, whole, episode)
