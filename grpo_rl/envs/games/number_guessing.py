"""Number guessing: a secret whole number, and higher or lower as the answer to a guess; its rows and its environment."""

from __future__ import annotations

import math
import random
import re
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction, Operand, Turns
from grpo_rl.data.tasks.made_rows import LazyRows, Row, row_of
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Play, Rewards, Wording, random_play, refuse

NAME = "number_guessing"
WHOLE_NUMBER = re.compile(r"(?<![0-9])-?[0-9]{1,9}(?![0-9])")
Answers = Literal["direction", "range"]
"""`direction`: higher or lower; `range`: the lowest and the highest number that are left, too."""


def number_guessing(
    *,
    num_rows: Count = 8192,
    low: Operand = 1,
    high: Operand = 100,
    turns: Turns = 8,
    answers: Answers = "direction",
    wording: Wording = "words",
    play: Play = "none",
    sensible: Fraction = 0.0,
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of the game `number_guessing`, each with a number from `low` to `high` that is equally likely any of them.

    `answers` says what a guess is answered with. `turns` are the guesses of a game of random play (`play=random`): any of the
    numbers, whatever was answered, but with the probability `sensible` one that the answers leave. There are no splits: a
    number that is never the secret would be learnt as such. Row i is drawn from (seed, i). Raises ConfigError for options out
    of range.
    """
    refuse(NAME, (0 <= low < high < 10**9, f"low={low} and high={high} must be 0 <= low < high < 1000000000"))

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        prompt = f"{written(low, high, wording)}-{high}"
        if wording == "words":
            prompt = (
                f"I have a whole number from {low} to {high} in mind. Guess it: write one number in each turn, and I answer whether "
                "mine is higher or lower."
            )
        truth = {"secret": rng.randint(low, high), "low": low, "high": high}
        row = row_of(NAME, prompt, truth, {"index": index, "wording": wording, "answers": answers}, "game")
        game = NumberGuessing()

        def guess() -> str:
            return written(rng.randint(*(game.left if rng.random() < sensible else (low, high))), high, wording)

        return row if play == "none" else random_play(row, game, guess, turns)

    return LazyRows(num_rows, make)


def written(number: int, high: int, wording: str) -> str:
    """Return a number as it is written: in short wording with as many digits as the highest one."""
    return f"{number:0{len(str(high))}d}" if wording == "short" else str(number)


class NumberGuessing(Game):
    """Rows of `task:number_guessing`. Progress is the share of the logarithm of all numbers that the answers have ruled out.

    With `strict` a guess that the answers have ruled out loses the game.
    """

    name = NAME

    def __init__(self, *, turns: Turns = 8, partial: Fraction = 0.5, rewards: Rewards = "end", strict: bool = False) -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)
        self._strict = strict

    def begin(self, start: Start) -> None:
        self._secret, self._low, self._high = (int(start.ground_truth[key]) for key in ("secret", "low", "high"))
        if not self._low <= self._secret <= self._high or self._low == self._high:
            raise ValueError("the secret lies outside of its bounds")
        self.left = (self._low, self._high)
        """The lowest and the highest number that the answers leave."""
        self._wording = start.extra_info.get("wording", "words")
        self._answers = start.extra_info.get("answers", "direction")

    def state(self) -> str:
        return str(self.left)

    def move(self, text: str) -> MoveResult:
        found = WHOLE_NUMBER.findall(text)
        guess, (low, high) = int(found[-1]) if found else None, self.left
        if guess == self._secret:
            return MoveResult(solved=True)
        malformed = lost = False
        if guess is None or not self._low <= guess <= self._high:
            malformed, said = True, f"Answer with a whole number from {self._low} to {self._high}."
        else:
            lost = self._strict and not low <= guess <= high
            is_low = guess < self._secret
            said = "higher" if is_low else "lower"
            self.left = (max(low, guess + 1), high) if is_low else (low, min(high, guess - 1))
        if self._wording == "short":
            said = {"higher": "+", "lower": "-"}.get(said, "?")
        low, high = self.left
        if self._answers == "range" and self._wording == "short":
            said = f"{written(low, self._high, 'short')}-{written(high, self._high, 'short')}"
        elif self._answers == "range":
            said += f" It is from {low} to {high}." if malformed else f": from {low} to {high}"
        progress = 1 - math.log(high - low + 1) / math.log(self._high - self._low + 1)
        return MoveResult(said, progress=progress, lost=lost, malformed=malformed)
