"""One episode on its way: the tokens so far, those that were sampled and those that came between, and the rollout they make."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_rl.envs.chat_deltas import ChatDeltas
from grpo_rl.envs.contract import Message
from grpo_rl.episode import Ending, Episode, PlayedTurn
from grpo_rl.rollout.reports import joined, pack, unpack
from grpo_rl.types import Completion, FinishReason, Prompt, Rollout, Sampling, Support, Versions, extended


@dataclass(slots=True, eq=False)
class Playing:
    """An episode that was asked for and has not ended."""

    id: str
    row: Prompt
    """The row's own prompt."""
    sample: int
    sampling: Sampling
    """The way in which its first turn is sampled; `max_tokens` is the room for all turns and what comes between."""
    seed: int = 0
    """The environment's seed."""
    attempt: int = 0
    wave: int = 0
    """The number of times that episodes were forgotten before this one was asked for: engines may still answer requests of those."""
    prompt: Prompt = field(init=False)
    """The row's prompt with what the environment adds to it, once it has answered `reset`."""
    asked: str | None = None
    """The id of the turn that is being sampled, in the pool of turns."""
    began: float | None = None
    """The moment, by time.monotonic, at which the first turn was asked for."""
    pieces: list[np.ndarray] = field(default_factory=list)
    """The response so far: turns and context in their order."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    supports: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Counts and ids of the tokens that each token of the response was sampled from, where the sampling returns them."""
    length: int = 0
    versions: Versions = ()
    turns: list[PlayedTurn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    deltas: ChatDeltas | None = None
    """The renderer of its context; None: the one of all, because its environment has shown no tools of its own."""
    finish_reason: FinishReason = "stop"
    """The way in which the last turn ended."""
    state: int = 0
    """The number of the state that the next turn is taken in."""

    def __post_init__(self) -> None:
        self.prompt = self.row

    @property
    def name(self) -> str:
        """The name of this attempt, for the environment processes."""
        return f"{self.id}#{self.attempt}" if self.wave == 0 else f"{self.id}#{self.wave}.{self.attempt}"

    @property
    def turn_id(self) -> str:
        """The uid of the prompt with which the next turn is asked for."""
        return f"{self.name}/turn-{len(self.turns)}"

    def again(self) -> Playing:
        """Return a new attempt at the same episode, with the same seed."""
        retried = Playing(self.id, self.row, self.sample, self.sampling, self.seed, self.attempt + 1, self.wave)
        retried.counts["retries"] = self.attempt + 1
        return retried

    def room(self, max_model_len: int) -> int:
        """Return for how many further tokens there is room."""
        return min(self.sampling.max_tokens, max_model_len - len(self.prompt.token_ids)) - self.length

    def context(self) -> np.ndarray:
        """Return all tokens so far, the prompt's first: what the next turn is sampled behind."""
        return np.concatenate([self.prompt.token_ids, *self.pieces]).astype(np.int32, copy=False)

    def add_turn(self, turn: Rollout, text: str) -> None:
        """Take in a turn as the engine sampled it: its tokens, with the log-probs and versions of their own sampling; and its text."""
        ids = np.array(turn.response_ids, dtype=np.int32)
        before = len(self.prompt.token_ids) + self.length
        self.turns.append(PlayedTurn(self.length, len(ids), None, turn.cached_tokens, before, self.state))
        self.pieces.append(ids)
        self.logprobs.append(np.array(turn.rollout_logprobs, dtype=np.float32))
        if self.sampling.returns_support:
            counts, left = np.empty(0, np.int32), np.empty(0, np.int32)
            if turn.support is not None:
                counts, left = np.array(turn.support.counts, np.int32), np.array(turn.support.token_ids, np.int32)
            self.supports.append((counts, left))
        for version, number in turn.versions:
            self.versions = extended(self.versions, version, number)
        self.length += len(ids)
        self.finish_reason = turn.finish_reason
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens that were not sampled: they have no log-prob, and nothing trains them."""
        ids = token_ids.astype(np.int32, copy=False)
        self.pieces.append(ids)
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32))
        if self.sampling.returns_support:  # each could only be itself
            self.supports.append((np.ones(len(ids), dtype=np.int32), ids))
        self.length += len(ids)

    def comes_to(self, state: str | None, messages: Sequence[Message]) -> None:
        """Note the state that the next turn is taken in: the one that the environment names, else what its messages say."""
        named = "\0".join(f"{one['role']}\0{one['content']}" for one in messages) if state is None else state
        digest = hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self.state = int.from_bytes(digest, "big", signed=True)

    def rewarded(self, reward: float | None) -> None:
        """Note the reward of the last turn."""
        if reward is not None:
            self.turns[-1] = replace(self.turns[-1], reward=reward)

    def rollout(self, ended: Ending, failure: tuple[str, str] | None = None) -> Rollout:
        """Return the whole episode as a rollout; `failure` is the kind and the cause where its environment failed.

        What stands behind the last turn is left out: nothing follows from it. The tokens are a block of their own.
        """
        while self.pieces and self.turns and self.length > self.turns[-1].end:
            self.length -= len(self.pieces.pop())
            self.logprobs.pop()
            if self.supports:
                self.supports.pop()
        text = "\n\n".join(one["content"] for one in self.messages if one["role"] == "assistant")
        support = None
        if self.supports:
            counts, ids = zip(*self.supports, strict=True)
            support = Support(joined(counts, np.int32), joined(ids, np.int32))
        finish_reason: FinishReason = "length" if ended == "tokens" else "stop"
        tokens, logprobs = joined(self.pieces, np.int32), joined(self.logprobs, np.float32)
        (whole,) = unpack(*pack([Completion(self.id, tokens, logprobs, finish_reason, self.versions, support, text)]))
        kind, cause = failure if failure is not None else (None, None)
        return Rollout(
            prompt=self.prompt if self.turns else self.row,
            sample_index=self.sample,
            response_ids=whole.response_ids,
            rollout_logprobs=whole.logprobs,
            finish_reason=finish_reason,
            versions=self.versions,
            support=whole.support,
            text=whole.text,
            episode=Episode(
                turns=tuple(self.turns),
                messages=tuple(self.messages),
                ended=ended,
                counts={name: float(value) for name, value in self.counts.items()},
                waits_s=tuple(self.waits_s),
                info=dict(self.info),
                failure=kind,
                failure_cause=cause,
            ),
        )
