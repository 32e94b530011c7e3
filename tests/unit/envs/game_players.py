"""Scripted players of the games: the best that one can do, and random ones. A player is a function from what it read to its move."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.envs.contract import Environment, Start, Turn
from grpo_rl.envs.games.grid_world import STEPS, Grid, GridPlace
from grpo_rl.envs.games.word_game import marks

Player = Callable[[list[tuple[str, str]]], str]
"""A function from the moves so far, each with its answer, to the next move."""


@dataclass
class Episode:
    """What came out of an episode."""

    answers: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(reward for reward in self.rewards if reward is not None)

    @property
    def solved(self) -> bool:
        return bool(self.info["solved"])


def start_of(row: dict[str, Any], seed: int = 0) -> Start:
    return Start(
        uid="row",
        data_source=row["data_source"],
        messages=tuple(row["prompt"]),
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=row["extra_info"],
        seed=seed,
    )


def play(environment: Environment, row: dict[str, Any], player: Player, seed: int = 0, most: int = 1000) -> Episode:
    """The episode of a row, played to its end."""

    async def whole() -> Episode:
        episode, moves = Episode(), []
        first = await environment.reset(start_of(row, seed))
        episode.answers += [message["content"] for message in first.messages]
        for index in range(most):
            move = player(moves)
            seen = await environment.step(Turn(index=index, text=move))
            episode.rewards.append(seen.reward)
            episode.info = seen.info
            if seen.done:
                assert not seen.messages
                break
            assert seen.messages and all(message["role"] in ("user", "tool") for message in seen.messages)
            episode.answers.append("\n".join(message["content"] for message in seen.messages))
            moves.append((move, episode.answers[-1]))
        await environment.close()
        return episode

    return asyncio.run(whole())


def says(*moves: str) -> Player:
    """A player that says these in turn."""
    left = iter(moves)
    return lambda seen: next(left)


def halving(low: int, high: int) -> Player:
    def move(seen: list[tuple[str, str]]) -> str:
        bottom, top = low, high
        for guess, answer in seen:
            if answer in ("+", "higher"):
                bottom = int(guess) + 1
            else:
                top = int(guess) - 1
        return str((bottom + top) // 2)

    return move


def random_number(low: int, high: int, rng: random.Random) -> Player:
    return lambda seen: str(rng.randint(low, high))


def eliminating(letters: str, length: int) -> Player:
    """The first word that all marks allow."""
    words = ["".join(word) for word in itertools.product(letters, repeat=length)]
    return lambda seen: next(word for word in words if all(marks(guess, word) == answer for guess, answer in seen))


def random_word(letters: str, length: int, rng: random.Random) -> Player:
    return lambda seen: "".join(rng.choice(letters) for _ in range(length))


def shortest_way(row: dict[str, Any]) -> Player:
    truth = row["reward_model"]["ground_truth"]
    way = Grid(tuple(truth["lines"]), tuple(truth["start"])).shortest()
    assert way is not None
    return says(*way)


def random_walk(rng: random.Random) -> Player:
    return lambda seen: rng.choice(list(STEPS))


def reached(row: dict[str, Any], moves: list[str]) -> GridPlace:
    """The place that these directions lead to."""
    truth = row["reward_model"]["ground_truth"]
    grid = Grid(tuple(truth["lines"]), tuple(truth["start"]))
    place = grid.first()
    for move in moves:
        place = grid.after(place, move)
    return place
