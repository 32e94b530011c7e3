"""Games as environments: known transcripts, rewards, hostile moves, and what scripted players reach."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from game_players import (
    play,
    says,
    start_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.data.tasks.arithmetic import arithmetic
from grpo_rl.envs.environments import ENVIRONMENTS, Named, made
from grpo_rl.envs.games.answers_in_turns import ArithmeticInTurns
from grpo_rl.envs.games.game import Game
from grpo_rl.envs.games.grid_world import GridWorld, grid_world
from grpo_rl.envs.games.word_game import WordGame, marks, word_game
from grpo_rl.errors import ConfigError


def word_row(secret: str, letters: str = "abcde", wording: str = "short") -> dict[str, Any]:
    row = word_game(num_rows=1, letters=letters, length=len(secret), wording=wording)[0]
    return {**row, "reward_model": {"ground_truth": {"secret": secret, "letters": letters}}}


# ---- the word game -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("abc", "abc", "+++"),
        ("abc", "bca", "ooo"),
        ("abc", "ade", "+--"),
        ("aab", "baa", "o+o"),
        ("aaa", "abc", "+--"),
        ("baa", "acc", "-o-"),
        ("aba", "bab", "oo-"),
        ("ccd", "cce", "++-"),
    ],
)
def test_letters_are_marked_as_in_wordle(guess: str, secret: str, expected: str) -> None:
    assert marks(guess, secret) == expected


def test_a_word_is_guessed_by_its_marks() -> None:
    episode = play(WordGame(), word_row("cab"), says("abc", "is it cba", "cab"))
    assert episode.answers == ["ooo", "+oo"]
    assert episode.states == ["abcde|abcde|abcde", "bcde|acde|abde", "c|acde|bde"]
    assert episode.rewards == [None, None, 1.0]


def test_rewards_of_turns_have_the_sum_of_the_episodes_reward() -> None:
    row = word_row("cab")
    for moves in (["abc", "bab", "cba"], ["abc", "cba", "cab"], ["?", "cad", "cad"]):
        by_turns = play(WordGame(turns=3, rewards="turns"), row, says(*moves))
        at_the_end = play(WordGame(turns=3, rewards="end"), row, says(*moves))
        assert all(reward is not None for reward in by_turns.rewards)
        assert by_turns.total == pytest.approx(at_the_end.total, abs=1e-12)
        assert at_the_end.rewards[:-1] == [None] * (len(moves) - 1)


# ---- the grid world ------------------------------------------------------------------------------------------

MAP = {"lines": ["..G", ".#.", ".K."], "start": [0, 0]}


def grid_row(wording: str = "short") -> dict[str, Any]:
    row = grid_world(num_rows=1, wording=wording)[0]
    return {**row, "reward_model": {"ground_truth": MAP}}


def test_the_goal_opens_with_the_key_only() -> None:
    episode = play(GridWorld(), grid_row(), says("e", "e", "w", "south", "go s", "east", "e", "north", "n"))
    assert episode.answers == [
        "01#G#.-",  # the goal in the east
        "01#G#.-",  # is locked
        "00#..#-",
        "10.#.#-",
        "20.K##-",
        "21#.#.k",  # the key
        "22.##.k",
        "12G#.#k",
    ]
    assert episode.rewards == [None] * 8 + [1.0]
    # Before the locked door, back again, and with the key in hand.
    assert len(set(episode.states)) == 7 and episode.states[1] == episode.states[2]


# ---- arithmetic --------------------------------------------------------------------------------


def test_a_sum_may_be_corrected() -> None:
    row = {**arithmetic(num_rows=1)[0], "reward_model": {"ground_truth": "445"}}
    episode = play(ArithmeticInTurns(turns=5), row, says("435", "450", "four", " 445 "))
    assert episode.answers == ["+", "-", "?"]
    assert episode.rewards == [None, None, None, 1.0]
    assert episode.info["malformed"] == 1


# ---- all games -----------------------------------------------------------------------------------------------

GAMES: list[tuple[type[Game], dict[str, Any]]] = [
    (WordGame, word_row("cab")),
    (WordGame, word_row("cab", wording="words")),
    (GridWorld, grid_row()),
    (ArithmeticInTurns, arithmetic(num_rows=1)[0]),
]


@pytest.mark.parametrize("move", ["", "\x00", "9" * 10_000, "\U0001f600", "<answer></answer>", "ab"])
@pytest.mark.parametrize(("game", "row"), GAMES)
def test_a_malformed_move_is_answered_counted_and_costs_its_turn(game: type[Game], row: dict[str, Any], move: str) -> None:
    episode = play(game(turns=3), row, says(move, move, move))
    assert len(episode.rewards) == 3 and len(episode.answers) == 2 and all(episode.answers)
    assert episode.total == 0
    assert episode.info == {"solved": 0.0, "turns": 3.0, "malformed": 3.0}


@settings(max_examples=150, deadline=None)
@given(moves=st.lists(st.text(max_size=40), min_size=4, max_size=4), which=st.integers(0, len(GAMES) - 1))
def test_whatever_is_written_the_rewards_are_numbers_from_0_to_1(moves: list[str], which: int) -> None:
    game, row = GAMES[which]
    episode = play(game(turns=4, rewards="turns"), row, says(*moves))
    assert all(reward is not None and math.isfinite(reward) and reward >= 0 for reward in episode.rewards)
    assert 0 <= episode.total <= 1


@pytest.mark.parametrize(("game", "row"), GAMES)
def test_a_row_of_another_game_is_refused_with_its_name(game: type[Game], row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"environment {game.name}: row .* has no ground truth of this game"):
        asyncio.run(game().reset(start_of({**row, "reward_model": {"ground_truth": {"other": 1}}})))


def test_wrong_options_are_refused() -> None:
    for options, said in (
        ({"turns": 0}, "turns=0"),
        ({"partial": 1.0}, "partial=1.0"),
        ({"rewards": "both"}, "rewards='both'"),
    ):
        with pytest.raises(ConfigError, match=f"word_game.*{said}"):
            made(Named("word_game", options), ENVIRONMENTS, "environment")
