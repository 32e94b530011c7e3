"""The word game: a secret word over a few letters, whose guesses are marked as in Wordle; its rows and its environment."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction, Turns
from grpo_rl.data.tasks.made_rows import LazyRows, Row, refuse, row_of
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Play, Rewards, Wording, random_play

NAME = "word_game"
IN_PLACE, ELSEWHERE, NOWHERE = "+", "o", "-"
WORD = re.compile(r"[a-z]+")
LONGEST_WORD = 12
UNKNOWN = "."
Answers = Literal["marks", "known"]
"""`marks`: those of the guess; `known`: the letters that any guess has found in their place, too."""


def word_game(
    *,
    num_rows: Count = 8192,
    letters: str = "abcde",
    length: Count = 3,
    turns: Turns = 6,
    answers: Answers = "marks",
    wording: Wording = "words",
    play: Play = "none",
    sensible: Fraction = 0.0,
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of the game `word_game`, each with a word of `length` of the `letters`, any of them in every place.

    `answers` says what a guess is answered with. `turns` are the guesses of a game of random play (`play=random`): each letter is
    any of the letters, whatever was answered, but with the probability `sensible` one that the marks of its place leave. There
    are no splits: a word that is never the secret would be learnt as such. Row i is drawn from (seed, i). Raises ConfigError for options out of range.
    """
    refuse(
        NAME,
        (
            WORD.fullmatch(letters) is not None and len(set(letters)) == len(letters) >= 2,
            f"letters={letters!r} must be two or more of a to z, each once",
        ),
        (1 <= length <= LONGEST_WORD, f"length={length} must be from 1 to {LONGEST_WORD}"),
    )
    prompt = f"{letters}{length}"
    if wording == "words":
        prompt = (
            f"I have a word of {length} letters in mind; each is one of {' '.join(letters)}, and one may come several times. Guess "
            f"it: write one word of {length} of these letters in each turn, last in your answer. I mark every letter: {IN_PLACE} in "
            f"its place, {ELSEWHERE} elsewhere in the word, {NOWHERE} not there."
        )

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        secret = "".join(rng.choice(letters) for _ in range(length))
        extra = {"index": index, "wording": wording, "answers": answers}
        row = row_of(NAME, prompt, {"secret": secret, "letters": letters}, extra, "game")
        game = WordGame()

        def guess() -> str:
            return "".join(rng.choice(some if rng.random() < sensible else letters) for some in game.left)

        return row if play == "none" else random_play(row, game, guess, turns)

    return LazyRows(num_rows, make)


def marks(guess: str, secret: str) -> str:
    """Return a mark for each letter of the guess. A letter of the secret is marked once: those in place come first, then from the left.

    `marks("aab", "baa")` is `o+o`.
    """
    left = Counter(there for here, there in zip(guess, secret, strict=True) if here != there)
    found = ""
    for here, there in zip(guess, secret, strict=True):
        if here != there and left[here] > 0:
            left[here] -= 1
            found += ELSEWHERE
        else:
            found += IN_PLACE if here == there else NOWHERE
    return found


class WordGame(Game):
    """Rows of `task:word_game`. Progress is the share of the guess's letters that stand in their place.

    In short wording a letter that is known stands in the place of its mark: after `abc` and `add` for `adb`, `ado`.
    """

    name = NAME

    def __init__(self, *, turns: Turns = 6, partial: Fraction = 0.5, rewards: Rewards = "end") -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)

    def begin(self, start: Start) -> None:
        self._secret, self._letters = (str(start.ground_truth[key]) for key in ("secret", "letters"))
        if not self._secret or not set(self._secret) <= set(self._letters):
            raise ValueError("the secret has letters that the game does not have")
        self._known = UNKNOWN * len(self._secret)
        self.left = [self._letters] * len(self._secret)
        """The letters that the marks leave for each place, as far as those of the place itself say."""
        self._wording = start.extra_info.get("wording", "words")
        self._answers = start.extra_info.get("answers", "marks")

    def state(self) -> str:
        return "|".join(self.left)

    def move(self, text: str) -> MoveResult:
        found, length = WORD.findall(text.lower()), len(self._secret)
        guess = found[-1] if found else ""
        if guess == self._secret:
            return MoveResult(solved=True)
        malformed = len(guess) != length or not set(guess) <= set(self._letters)
        if malformed:
            said = "?" * length
            if self._wording == "words":
                said = f"Answer with a word of {length} letters, each one of {' '.join(self._letters)}."
        else:
            said = marks(guess, self._secret)
            places = list(zip(self._known, guess, self._secret, self.left, strict=True))
            self._known = "".join(here if here == there else was for was, here, there, _ in places)
            self.left = [here if here == there else left.replace(here, "") for _, here, there, left in places]
        progress = 0.0 if malformed else said.count(IN_PLACE) / length
        if self._answers == "known" and self._wording == "short":
            said = "".join(mark if letter == UNKNOWN else letter for mark, letter in zip(said, self._known, strict=True))
        elif self._answers == "known":
            said += f" Known: {self._known}"
        return MoveResult(said, progress=progress, malformed=malformed)


def main() -> None:
    for message in word_game(num_rows=1, play="random", wording="short")[0]["messages"]:
        print(message["role"], message["content"])


if __name__ == "__main__":
    main()
