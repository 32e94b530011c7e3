"""The word game as an environment: every letter of a guess is marked, as in Wordle, until the word is found."""

from __future__ import annotations

from grpo_rl.config.schema.kinds import Fraction, Turns
from grpo_rl.data.tasks.games.secret_words import IN_PLACE, NAME, UNKNOWN, SecretWord, answer_to, known_after, marks, read_guess
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Answer, Game, Rewards


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

    async def move(self, text: str) -> Answer:
        guess = read_guess(text, self._word)
        self._known = known_after(self._known, guess, self._word.secret)
        said = answer_to(guess, self._word, self._known, self._wording, self._answers)
        if said is None:
            return Answer(solved=True)
        in_place = marks(guess, self._word.secret).count(IN_PLACE) if guess is not None else 0
        return Answer(said, progress=in_place / len(self._word.secret), malformed=guess is None)
