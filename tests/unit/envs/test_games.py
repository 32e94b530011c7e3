"""Games as environments, and their rows: known transcripts, rewards, hostile moves, games of random play to begin from."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.config.recipes import examples
from grpo_rl.data.tasks.arithmetic import arithmetic
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.envs.contract import Environment, Start, Turn
from grpo_rl.envs.environments import ENVIRONMENTS, Named, made
from grpo_rl.envs.games.game import Game
from grpo_rl.envs.runtime.episode_host import EpisodeHost, HostSetup
from grpo_rl.errors import ConfigError
from grpo_rl.registry import load_function

ArithmeticInTurns = load_function(f"{examples()}/answers_in_turns.py:ArithmeticInTurns")
Grid, GridWorld, grid_world = (
    load_function(f"{examples()}/grid_world.py:{name}") for name in ("Grid", "GridWorld", "grid_world")
)
WordGame, marks, word_game = (load_function(f"{examples()}/word_game.py:{name}") for name in ("WordGame", "marks", "word_game"))


@dataclass
class Played:
    """What came out of an episode."""

    answers: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    info: Mapping[str, float] = field(default_factory=dict)
    states: list[str | None] = field(default_factory=list)
    """The states that the environment names before each turn."""

    @property
    def total(self) -> float:
        return sum(reward for reward in self.rewards if reward is not None)


def start_of(row: dict[str, Any]) -> Start:
    truth = row["reward_model"]["ground_truth"]
    return Start("row", row["data_source"], tuple(row["prompt"]), ground_truth=truth, extra_info=row["extra_info"])


def play(environment: Environment, row: dict[str, Any], *moves: str) -> Played:
    """The episode of a row with these moves, played to its end."""

    async def whole() -> Played:
        played = Played()
        first = await environment.reset(start_of(row))
        assert not first.messages
        played.states.append(first.state)
        for index, move in enumerate(moves):
            seen = await environment.step(Turn(index=index, text=move))
            played.rewards.append(seen.reward)
            played.info = seen.info
            if seen.done:
                assert not seen.messages
                break
            played.answers += [message["content"] for message in seen.messages if message["role"] == "user"]
            played.states.append(seen.state)
        await environment.close()
        return played

    return asyncio.run(whole())


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
    episode = play(WordGame(), word_row("cab"), "abc", "is it cba", "cab")
    assert episode.answers == ["ooo", "+oo"]
    assert episode.states == ["abcde|abcde|abcde", "bcde|acde|abde", "c|acde|bde"]
    assert episode.rewards == [None, None, 1.0]


def test_rewards_of_turns_have_the_sum_of_the_episodes_reward() -> None:
    row = word_row("cab")
    for moves in (["abc", "bab", "cba"], ["abc", "cba", "cab"], ["?", "cad", "cad"]):
        by_turns = play(WordGame(turns=3, rewards="turns"), row, *moves)
        at_the_end = play(WordGame(turns=3, rewards="end"), row, *moves)
        assert all(reward is not None for reward in by_turns.rewards)
        assert by_turns.total == pytest.approx(at_the_end.total, abs=1e-12)
        assert at_the_end.rewards[:-1] == [None] * (len(moves) - 1)


# ---- the grid world ------------------------------------------------------------------------------------------

MAP = {"lines": ["..G", ".#.", ".K."], "start": [0, 0]}


def grid_row(wording: str = "short") -> dict[str, Any]:
    row = grid_world(num_rows=1, wording=wording)[0]
    return {**row, "reward_model": {"ground_truth": MAP}}


def test_the_goal_opens_with_the_key_only() -> None:
    episode = play(GridWorld(), grid_row(), "e", "e", "w", "south", "go s", "east", "e", "north", "n")
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
    episode = play(ArithmeticInTurns(turns=5), row, "435", "450", "four", " 445 ")
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
    episode = play(game(turns=3), row, move, move, move)
    assert len(episode.rewards) == 3 and len(episode.answers) == 2 and all(episode.answers)
    assert episode.total == 0
    assert episode.info == {"solved": 0.0, "turns": 3.0, "malformed": 3.0}


@settings(max_examples=150, deadline=None)
@given(moves=st.lists(st.text(max_size=40), min_size=4, max_size=4), which=st.integers(0, len(GAMES) - 1))
def test_whatever_is_written_the_rewards_are_numbers_from_0_to_1(moves: list[str], which: int) -> None:
    game, row = GAMES[which]
    episode = play(game(turns=4, rewards="turns"), row, *moves)
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


# ---- rows ----------------------------------------------------------------------------------------------------

TASKS = ("word_game", "grid_world", "episodes")
PLAYED = (
    ("task:word_game?letters=abc&length=2&turns=6&sensible=0.3&wording=short&play=random", WordGame, 6),
    ("task:word_game?letters=abc&length=3&turns=6&answers=known&wording=short&play=random", WordGame, 6),
    ("task:word_game?letters=abc&length=3&turns=6&answers=known&sensible=0.5&play=random", WordGame, 6),
    ("task:grid_world?size=4&turns=20&wording=short&play=random", GridWorld, 20),
)


@pytest.mark.parametrize("task", TASKS)
def test_a_row_depends_on_seed_and_index_alone(task: str) -> None:
    rows = task_rows(f"task:{task}?num_rows=20")
    assert list(rows) == list(task_rows(f"task:{task}?num_rows=30"))[:20]
    if task != "episodes":
        assert list(rows) != list(task_rows(f"task:{task}?num_rows=20&seed=1"))


@pytest.mark.parametrize(("spec", "environment", "turns"), PLAYED)
def test_random_play_is_what_the_environment_answers(spec: str, environment: type[Game], turns: int) -> None:
    lengths = Counter()
    for row in list(task_rows(spec))[:40]:
        messages = row["messages"][1:]
        assert row["messages"][0] == row["prompt"][0]
        assert [message["role"] for message in messages] == ["assistant", "user"] * (len(messages) // 2) + ["assistant"]
        moves = [message["content"] for message in messages[::2]]
        episode = play(environment(turns=turns), row, *moves)
        assert episode.answers == [message["content"] for message in messages[1::2]]
        assert episode.info["solved"] or len(moves) == turns
        lengths[bool(episode.info["solved"])] += 1
    assert lengths[False] > 0


def test_maps_are_solvable_and_the_splits_share_none() -> None:
    found = {}
    for split in ("train", "val"):
        rows = grid_world(num_rows=60, size=4, walls=0.3, fewest_steps=3, split=split)
        found[split] = {
            (tuple(row["reward_model"]["ground_truth"]["lines"]), tuple(row["reward_model"]["ground_truth"]["start"]))
            for row in rows
        }
        for row in rows:
            truth = row["reward_model"]["ground_truth"]
            grid = Grid(tuple(truth["lines"]), tuple(truth["start"]))
            way = grid.shortest()
            assert way is not None and len(way) >= 3
            places = list(accumulate(way, grid.after, initial=grid.first()))
            assert [grid.solved(place) for place in places] == [False] * len(way) + [True]
    assert not found["train"] & found["val"]


def test_demonstrations_of_the_calculator_are_what_an_episode_with_it_is() -> None:
    """Each conversation is played again, by the parser, the tool and the environment of a run."""
    rows = task_rows("task:arithmetic?forms=3+3,3-2,2*2&forgotten_carries=1&calculator_calls=0.5&num_rows=60")
    setup = HostSetup(Named("arithmetic", {"turns": 1}), (Named("calculator"),))
    rewards = {True: [], False: []}
    for row in rows:
        turns = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        answers = [message["content"] for message in row["messages"][1:] if message["role"] != "assistant"]
        played, rewarded = asyncio.run(again(setup, row, turns))
        assert played == answers
        rewards[len(turns) == 2].append(rewarded)
    assert set(rewards[True]) == {1.0} and 15 < len(rewards[True]) < 45
    # Without the calculator every carry is forgotten: only the sums without one, and the products, are right.
    assert 0.2 < sum(rewards[False]) / len(rewards[False]) < 0.9


async def again(setup: HostSetup, row: dict[str, Any], turns: list[str]) -> tuple[list[str], float | None]:
    """The answers to these turns, and the last one's reward."""
    host = EpisodeHost(setup)
    start = start_of(row)
    await host.reset({field.name: getattr(start, field.name) for field in dataclasses.fields(start)})
    answers: list[str] = []
    for index, text in enumerate(turns):
        values = {
            "index": index,
            "text": text,
            "raw_text": text,
            "finish_reason": "stop",
            "token_ids": [],
            "context_tokens": 1,
            "is_last": False,
        }
        answer = await host.step(values)
        answers += [message["content"] for message in answer["messages"]]
    await host.close()
    assert answer["done"]
    return answers, answer["reward"]
