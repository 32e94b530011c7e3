"""The environments `arithmetic` and `gsm8k`: a wrong answer comes back with what is wrong about it, and may be corrected."""

from __future__ import annotations

from grpo_rl.config.schema.kinds import Fraction as Share
from grpo_rl.config.schema.kinds import Turns
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Rewards
from grpo_rl.rewards.rules.number_rules import gsm8k_flexible, to_number

MOST_DIGITS = 20


class ArithmeticInTurns(Game):
    """Rows of `task:arithmetic`. The answer is the turn, spaces around it aside; the feedback is whether the result is higher or lower.

    Progress is the share of digits that stand in their place, counted from the right.
    """

    name = "arithmetic"

    def __init__(self, *, turns: Turns = 4, partial: Share = 0.0, rewards: Rewards = "end", short: bool = True) -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)
        self._words = ("+", "-", "?") if short else ("higher", "lower", "Answer with one whole number, and nothing else.")

    def begin(self, start: Start) -> None:
        self._result = int(start.ground_truth)

    def move(self, text: str) -> MoveResult:
        given, (higher, lower, malformed) = text.strip(), self._words
        digits = given.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
            return MoveResult(malformed, malformed=True)
        value = int(given)
        if value == self._result:
            return MoveResult(solved=True)
        pairs = zip(reversed(digits), reversed(str(abs(self._result))), strict=False)
        alike = sum(one == other for one, other in pairs) if (value < 0) == (self._result < 0) else 0
        longest = max(len(digits), len(str(abs(self._result))))
        # 0037 has the digits of 37 and is another number than 3700 only by its value: all digits alike is no solution by itself.
        progress = min(alike, longest - 1) / longest
        return MoveResult(higher if value < self._result else lower, progress=progress)


class Gsm8kInTurns(Game):
    """Rows of GSM8K, whose ground truth is a number. The answer is the last number of a turn; the feedback is that it is wrong.

    It does the work of verl's Gsm8kInteraction. A ground truth of the row's own `extra_info.interaction_kwargs` has the precedence,
    as there.
    """

    name = "gsm8k"

    def __init__(self, *, turns: Turns = 5, partial: Share = 0.0, rewards: Rewards = "end") -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)

    def begin(self, start: Start) -> None:
        own = start.extra_info.get("interaction_kwargs") or {}
        self._row = start
        self._right = str(own.get("ground_truth", start.ground_truth)).strip()
        if to_number(self._right) is None:
            raise ValueError("the ground truth is no number")

    def move(self, text: str) -> MoveResult:
        found = gsm8k_flexible(self._row.data_source, text, self._right)
        if found["acc"]:
            return MoveResult(solved=True)
        return MoveResult(
            "That is not the right answer. Look for the mistake and answer again.", malformed="answer" not in found
        )


def main() -> None:
    game = ArithmeticInTurns(short=False)
    game.begin(Start("row", "arithmetic", (), ground_truth="42"))
    for answer in ("24", "52", "42"):
        print(answer, "->", game.move(answer).text or "right")


if __name__ == "__main__":
    main()
