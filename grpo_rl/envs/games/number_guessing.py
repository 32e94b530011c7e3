"""Number guessing as an environment: answers higher or lower until the number is found."""

from __future__ import annotations

import math

from grpo_rl.config.schema.kinds import Fraction, Turns
from grpo_rl.data.tasks.games.secret_numbers import NAME, Bounds, SecretNumber, answer_to, read_guess
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Answer, Game, Rewards


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

    async def move(self, text: str) -> Answer:
        guess = read_guess(text, self._number)
        lost = self._strict and guess is not None and not self._bounds.low <= guess <= self._bounds.high
        self._bounds = self._bounds.after(guess, self._number.secret)
        said = answer_to(guess, self._number, self._bounds, self._wording, self._answers)
        if said is None:
            return Answer(solved=True)
        left = self._bounds.high - self._bounds.low + 1
        progress = 1 - math.log(left) / math.log(self._number.high - self._number.low + 1)
        return Answer(said, progress=progress, lost=lost, malformed=guess is None)
