"""Rows with conversations of random play, and an environment that counts turns and pays by progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from grpo_rl.config.schema.kinds import Count
from grpo_rl.data.tasks.made_rows import LazyRows, Row, refuse, row_of
from grpo_rl.envs.contract import Message, Observation, Start, Turn
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen

Wording = Literal["words", "short"]
"""`words` for a model that was trained on English, `short` for a small one of single characters."""
Play = Literal["none", "random"]
"""`random`: the row's `messages` are a whole game with random moves, to learn its form from."""
Rewards = Literal["end", "turns"]


def random_play(row: Row, game: Game, move: Callable[[], str], turns: int) -> Row:
    """The row with `messages`: moves, each with the game's answer."""
    game.begin(Start("", game.name, (), row["reward_model"]["ground_truth"], row["extra_info"]))
    messages: list[Message] = list(row["prompt"])
    for turn in range(turns):
        messages.append({"role": "assistant", "content": move()})
        answer = game.move(messages[-1]["content"])
        if answer.solved or turn + 1 == turns:
            break
        messages.append({"role": "user", "content": answer.text})
    return {**row, "messages": messages}


def episodes(*, num_rows: Count = 8192, prompt: str = "Play the game.", data_source: str = "episodes") -> LazyRows:
    """Rows for an environment that makes its game from the episode's seed, without a ground truth.

    Raises ConfigError for options out of range.
    """
    refuse("episodes", (prompt.strip() != "", "prompt is empty"))
    return LazyRows(num_rows, lambda index: row_of(data_source, prompt, "", {"index": index}, "game"))


@frozen
class MoveResult:
    text: str = ""
    solved: bool = False
    progress: float = 0.0
    """Of the game, or the quality of the move, from 0 to 1."""
    malformed: bool = False
    """The move could not be read: it costs its turn."""


class Game(ABC):
    """A turn is a move, and an episode ends when it is solved or its turns are used up.

    An episode is worth 1 if it is solved, else `partial` times the mean progress of its turns. `rewards=end`
    gives that to the last turn; `rewards=turns` gives each turn its share of `partial` and the solving one
    the rest.
    """

    name: str
    """The `data_source` of the game's rows."""

    def __init__(self, *, turns: int, partial: float, rewards: Rewards = "end") -> None:
        if partial >= 1:
            raise ConfigError(f"environment {self.name}: partial={partial} must be less than 1, which a solved game is worth")
        if rewards not in ("end", "turns"):
            raise ConfigError(f"environment {self.name}: rewards={rewards!r} must be end or turns")
        self._turns, self._partial, self._rewards = turns, float(partial), rewards
        self._num_turns = self._num_malformed = 0
        self._worth = 0.0

    async def reset(self, start: Start) -> Observation:
        try:
            self.begin(start)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ValueError(
                f"environment {self.name}: row {start.uid} (data_source {start.data_source!r}) has no ground truth of this game, but "
                f"{str(start.ground_truth)[:100]!r}: {type(error).__name__}: {error}"
            ) from error
        return Observation(state=self.state())

    async def step(self, turn: Turn) -> Observation:
        answer = self.move(turn.text)
        self._num_turns += 1
        self._num_malformed += answer.malformed
        worth = 1.0 if answer.solved else self._worth + self._partial * answer.progress / self._turns
        gained, self._worth = worth - self._worth, worth
        is_over = answer.solved or self._num_turns >= self._turns
        return Observation(
            messages=() if is_over else ({"role": "user", "content": answer.text},),
            reward=gained if self._rewards == "turns" else worth if is_over else None,
            done=is_over,
            info={"solved": float(answer.solved), "turns": float(self._num_turns), "malformed": float(self._num_malformed)},
            state=self.state(),
        )

    async def close(self) -> None:
        return

    def state(self) -> str | None:
        """If it is another than what the last answer says: see `Observation.state`."""
        return None

    @abstractmethod
    def begin(self, start: Start) -> None:
        """Any error means that it is no row of this game."""

    @abstractmethod
    def move(self, text: str) -> MoveResult:
        """May take its time: each episode has a thread of its own."""
