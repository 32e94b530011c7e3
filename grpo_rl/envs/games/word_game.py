"""The word game: a secret word over a few letters, whose guesses are marked as in Wordle; its rows and its environment."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Literal, NamedTuple

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction, Turns
from grpo_rl.data.tasks.made_rows import LazyRows, Row
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Play, Rewards, Wording, game_row, played, refuse

NAME = "word_game"
IN_PLACE, ELSEWHERE, NOWHERE = "+", "o", "-"
WORD = re.compile(r"[a-z]+")
MOST_LETTERS, LONGEST_WORD = 26, 12
UNKNOWN = "."
Answers = Literal["marks", "known"]
"""`marks`: those of the guess; `known`: the letters that any guess has found in their place, too."""


class SecretWord(NamedTuple):
    """A secret and the letters that it may consist of."""

    secret: str
    letters: str


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
    are no splits, as in number_guessing. Row i is drawn from (seed, i). Raises ConfigError for options out of range.
    """
    refuse(
        NAME,
        (
            WORD.fullmatch(letters) is not None and len(set(letters)) == len(letters) >= 2,
            f"letters={letters!r} must be two or more of a to z, each once",
        ),
        (1 <= length <= LONGEST_WORD, f"length={length} must be from 1 to {LONGEST_WORD}"),
    )

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        word = SecretWord(_drawn(rng, letters, length), letters)
        extra = {"index": index, "wording": wording, "answers": answers}
        row = game_row(NAME, prompt_of(word, wording), word._asdict(), extra)
        if play == "none":
            return row
        left, known = [letters] * length, UNKNOWN * length

        def move() -> str:
            return "".join(rng.choice(some if rng.random() < sensible else letters) for some in left)

        def answer(text: str) -> str | None:
            nonlocal known
            for place, (here, there) in enumerate(zip(text, word.secret, strict=True)):
                left[place] = here if here == there else left[place].replace(here, "")
            known = known_after(known, text, word.secret)
            return answer_to(text, word, known, wording, answers)

        return played(row, move, answer, turns)

    return LazyRows(num_rows, make)


def _drawn(rng: random.Random, letters: str, length: int) -> str:
    return "".join(rng.choice(letters) for _ in range(length))


def prompt_of(word: SecretWord, wording: str) -> str:
    """Return the question: letters and length, `abcde3` in short."""
    length = len(word.secret)
    if wording == "short":
        return f"{word.letters}{length}"
    return (
        f"I have a word of {length} letters in mind; each is one of {' '.join(word.letters)}, and one may come several times. Guess "
        f"it: write one word of {length} of these letters in each turn, last in your answer. I mark every letter: {IN_PLACE} in its "
        f"place, {ELSEWHERE} elsewhere in the word, {NOWHERE} not there."
    )


def read_guess(text: str, word: SecretWord) -> str | None:
    """Return the last word of the text, in small letters; None where it is not of the length and the letters of the game."""
    found = WORD.findall(text.lower())
    guess = found[-1] if found else ""
    return guess if len(guess) == len(word.secret) and set(guess) <= set(word.letters) else None


def marks(guess: str, secret: str) -> str:
    """Return a mark for each letter of the guess. A letter of the secret is marked once: those in place come first, then from the left.

    `marks("aab", "baa")` is `o+o`.
    """
    left = Counter(there for here, there in zip(guess, secret, strict=True) if here != there)
    found = []
    for here, there in zip(guess, secret, strict=True):
        if here == there:
            found.append(IN_PLACE)
        elif left[here] > 0:
            left[here] -= 1
            found.append(ELSEWHERE)
        else:
            found.append(NOWHERE)
    return "".join(found)


def known_after(known: str, guess: str | None, secret: str) -> str:
    """Return the letters that are known to be in their place after a guess (None: a malformed one), with `UNKNOWN` for all others."""
    if guess is None:
        return known
    return "".join(was if here != there else here for was, here, there in zip(known, guess, secret, strict=True))


def answer_to(guess: str | None, word: SecretWord, known: str, wording: str, answers: str) -> str | None:
    """Return the answer to a guess (None: a malformed one), `known` being what is known after it; None where it is the secret.

    In short wording a letter that is known stands in the place of its mark: after `abc` and `add` for `adb`, `ado`.
    """
    if guess == word.secret:
        return None
    malformed = f"Answer with a word of {len(word.secret)} letters, each one of {' '.join(word.letters)}."
    said = marks(guess, word.secret) if guess is not None else "?" * len(word.secret) if wording == "short" else malformed
    if answers == "marks":
        return said
    if wording == "short":
        return "".join(mark if letter == UNKNOWN else letter for mark, letter in zip(said, known, strict=True))
    return f"{said} Known: {known}"


class WordGame(Game):
    """Rows of `task:word_game`. Progress is the share of the guess's letters that stand in their place."""

    name = NAME

    def __init__(self, *, turns: Turns = 6, partial: Fraction = 0.5, rewards: Rewards = "end") -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)

    def begin(self, start: Start) -> None:
        ground_truth = start.ground_truth
        self._word = SecretWord(str(ground_truth["secret"]), str(ground_truth["letters"]))
        self._known = UNKNOWN * len(self._word.secret)
        self._wording = start.extra_info.get("wording", "words")
        self._answers = start.extra_info.get("answers", "marks")
        if not self._word.secret or not set(self._word.secret) <= set(self._word.letters):
            raise ValueError("the secret has letters that the game does not have")

    async def move(self, text: str) -> MoveResult:
        guess = read_guess(text, self._word)
        self._known = known_after(self._known, guess, self._word.secret)
        said = answer_to(guess, self._word, self._known, self._wording, self._answers)
        if said is None:
            return MoveResult(solved=True)
        in_place = marks(guess, self._word.secret).count(IN_PLACE) if guess is not None else 0
        return MoveResult(said, progress=in_place / len(self._word.secret), malformed=guess is None)
