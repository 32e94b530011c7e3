"""Number guessing: a secret whole number, the rule by which a guess is answered, its rows and its environment."""

from __future__ import annotations

import math
import random
import re
from typing import Literal, NamedTuple

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction, Operand, Turns
from grpo_rl.data.tasks.made_rows import LazyRows, Row
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Play, Rewards, Wording, game_row, played, refuse

NAME = "number_guessing"
WHOLE_NUMBER = re.compile(r"(?<![0-9])-?[0-9]{1,9}(?![0-9])")
Answers = Literal["direction", "range"]
"""`direction`: higher or lower; `range`: the lowest and the highest number that are left, too."""
TEXTS = {
    "words": {"higher": "higher", "lower": "lower", "malformed": "Answer with a whole number from {low} to {high}."},
    "short": {"higher": "+", "lower": "-", "malformed": "?"},
}


class SecretNumber(NamedTuple):
    """A secret and the bounds that it was drawn from, both included."""

    secret: int
    low: int
    high: int


class Bounds(NamedTuple):
    """The lowest and the highest number that the answers leave."""

    low: int
    high: int

    def after(self, guess: int | None, secret: int) -> Bounds:
        """Return the bounds after the answer to a guess; a malformed one (None) tells nothing."""
        if guess is None or guess == secret:
            return self
        return Bounds(max(self.low, guess + 1), self.high) if guess < secret else Bounds(self.low, min(self.high, guess - 1))


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
    refuse(
        NAME,
        (0 <= low < high < 10**9, f"low={low} and high={high} must be 0 <= low < high < 1000000000"),
    )

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        number = SecretNumber(rng.randint(low, high), low, high)
        extra = {"index": index, "wording": wording, "answers": answers}
        row = game_row(NAME, prompt_of(number, wording), number._asdict(), extra)
        if play == "none":
            return row
        bounds = Bounds(low, high)

        def move() -> str:
            drawn = rng.randint(*(bounds if rng.random() < sensible else (low, high)))
            return written(drawn, number, wording)

        def answer(text: str) -> str | None:
            nonlocal bounds
            guess = read_guess(text, number)
            bounds = bounds.after(guess, number.secret)
            return answer_to(guess, number, bounds, wording, answers)

        return played(row, move, answer, turns)

    return LazyRows(num_rows, make)


def prompt_of(number: SecretNumber, wording: str) -> str:
    """Return the question: `1-100` in short."""
    if wording == "short":
        return f"{written(number.low, number, wording)}-{number.high}"
    return (
        f"I have a whole number from {number.low} to {number.high} in mind. Guess it: write one number in each turn, and I answer "
        "whether mine is higher or lower."
    )


def written(guess: int, number: SecretNumber, wording: str) -> str:
    """Return a guess as it is written: in short wording with as many digits as the highest number."""
    return f"{guess:0{len(str(number.high))}d}" if wording == "short" else str(guess)


def read_guess(text: str, number: SecretNumber) -> int | None:
    """Return the last whole number of the text; None where it has none from `low` to `high`."""
    found = WHOLE_NUMBER.findall(text)
    guess = int(found[-1]) if found else None
    return guess if guess is not None and number.low <= guess <= number.high else None


def answer_to(guess: int | None, number: SecretNumber, bounds: Bounds, wording: str, answers: str) -> str | None:
    """Return the answer to a guess (None: a malformed one), `bounds` being those after it; None where it is the secret."""
    if guess == number.secret:
        return None
    kind = "malformed" if guess is None else "higher" if guess < number.secret else "lower"
    said = TEXTS[wording][kind].format(low=number.low, high=number.high)
    if answers == "direction":
        return said
    if wording == "short":
        return f"{written(bounds.low, number, wording)}-{written(bounds.high, number, wording)}"
    return (
        f"{said} It is from {bounds.low} to {bounds.high}." if guess is None else f"{said}: from {bounds.low} to {bounds.high}"
    )


class NumberGuessing(Game):
    """Rows of `task:number_guessing`. Progress is the share of the logarithm of all numbers that the answers have ruled out.

    With `strict` a guess that the answers have ruled out loses the game.
    """

    name = NAME

    def __init__(self, *, turns: Turns = 8, partial: Fraction = 0.5, rewards: Rewards = "end", strict: bool = False) -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)
        self._strict = strict

    def begin(self, start: Start) -> None:
        ground_truth = start.ground_truth
        self._number = SecretNumber(*(int(ground_truth[key]) for key in SecretNumber._fields))
        self._wording = start.extra_info.get("wording", "words")
        if not self._number.low <= self._number.secret <= self._number.high:
            raise ValueError("the secret lies outside of its bounds")
        self._bounds = Bounds(self._number.low, self._number.high)
        self._answers = start.extra_info.get("answers", "direction")

    async def move(self, text: str) -> MoveResult:
        guess = read_guess(text, self._number)
        lost = self._strict and guess is not None and not self._bounds.low <= guess <= self._bounds.high
        self._bounds = self._bounds.after(guess, self._number.secret)
        said = answer_to(guess, self._number, self._bounds, self._wording, self._answers)
        if said is None:
            return MoveResult(solved=True)
        left = self._bounds.high - self._bounds.low + 1
        progress = 1 - math.log(left) / math.log(self._number.high - self._number.low + 1)
        return MoveResult(said, progress=progress, lost=lost, malformed=guess is None)
