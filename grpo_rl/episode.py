"""The record of an episode, a rollout of several turns: which of its tokens were sampled, and what happened between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ending = Literal["done", "turns", "tokens", "time", "failed"]
"""The end of an episode: by its environment (or a turn without a tool call), or by a limit on turns, tokens or time."""
TRUNCATED: tuple[Ending, ...] = ("turns", "tokens", "time")


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One assistant turn: the place of its sampled tokens in the response, and what it was worth."""

    start: int
    length: int
    reward: float | None = None
    """The reward of the turn; None where the turn has none of its own."""
    cached_tokens: int | None = None
    """Tokens of its context whose keys and values the engine had already; None where the engine does not report it."""
    context_tokens: int = 0
    """Tokens of its context, the prompt included."""
    state: int = 0
    """A number for the state that it was taken in: equal in the turns of one prompt's episodes where the states are."""

    @property
    def end(self) -> int:
        """The index in the response after the turn's last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Episode:
    """The course of an episode. Between and behind the tokens of its turns everything in the response is context."""

    turns: tuple[PlayedTurn, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the row's prompt: assistant turns as sampled, and what came between them."""
    ended: Ending = "done"
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the episode that are logged as `episode/NAME`: tool_calls, failed_calls, malformed_calls, retries."""
    waits_s: tuple[float, ...] = ()
    """Seconds that each answer of the environment took."""
    info: Mapping[str, float] = field(default_factory=dict)
    """The last value of each number that the environment reported."""
    failure: str | None = None
    """environment_error or environment_timeout, where the environment itself failed."""
    failure_cause: str | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and length, in the response, of each run of sampled tokens, ascending."""
        return tuple((turn.start, turn.length) for turn in self.turns if turn.length)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that were sampled."""
        return sum(turn.length for turn in self.turns)

    def score(self, discount: float) -> float:
        """Return the discounted sum of the turns' rewards, as seen from the first turn."""
        return sum(turn.reward * discount**number for number, turn in enumerate(self.turns) if turn.reward is not None)
