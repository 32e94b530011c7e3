"""Rows of the games: the same by seed, in verl's format, with games of random play to begin from."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest
from game_players import play, reached, says, start_of

from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.envs.environments import Named
from grpo_rl.envs.games.grid_world import Grid, GridWorld, grid_world
from grpo_rl.envs.games.word_game import WordGame
from grpo_rl.envs.runtime.episode_host import EpisodeHost, HostSetup

TASKS = ("word_game", "grid_world", "episodes")
PLAYED = (
    ("task:word_game?letters=abc&length=2&turns=6&sensible=0.3&wording=short&play=random", WordGame(turns=6)),
    ("task:word_game?letters=abc&length=3&turns=6&answers=known&wording=short&play=random", WordGame(turns=6)),
    ("task:word_game?letters=abc&length=3&turns=6&answers=known&sensible=0.5&play=random", WordGame(turns=6)),
    ("task:grid_world?size=4&turns=20&wording=short&play=random", GridWorld(turns=20)),
)


@pytest.mark.parametrize("task", TASKS)
def test_a_row_depends_on_seed_and_index_alone(task: str) -> None:
    rows = task_rows(f"task:{task}?num_rows=20")
    assert list(rows) == list(task_rows(f"task:{task}?num_rows=30"))[:20]
    if task != "episodes":
        assert list(rows) != list(task_rows(f"task:{task}?num_rows=20&seed=1"))


@pytest.mark.parametrize(("spec", "environment"), PLAYED)
def test_random_play_is_what_the_environment_answers(spec: str, environment: Any) -> None:
    lengths = Counter()
    for row in list(task_rows(spec))[:40]:
        messages = row["messages"][1:]
        assert row["messages"][0] == row["prompt"][0]
        assert [message["role"] for message in messages] == ["assistant", "user"] * (len(messages) // 2) + ["assistant"]
        moves = [message["content"] for message in messages[::2]]
        fresh = type(environment)(turns=environment._turns)
        episode = play(fresh, row, says(*moves))
        assert episode.answers == [message["content"] for message in messages[1::2]]
        assert episode.solved or len(moves) == environment._turns
        lengths[episode.solved] += 1
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
            assert grid.solved(reached(row, way)) and not grid.solved(reached(row, way[:-1]))
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
