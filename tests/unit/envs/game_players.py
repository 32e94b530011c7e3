"""Scripted players of the games: the best that one can do, and random ones. A player is a function from what it read to its move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.envs.contract import Environment, Start, Turn
from grpo_rl.envs.games.grid_world import Grid, GridPlace

Player = Callable[[list[tuple[str, str]]], str]
"""A function from the moves so far, each with its answer, to the next move."""


@dataclass
class Episode:
    """What came out of an episode."""

    answers: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    info: Mapping[str, float] = field(default_factory=dict)
    states: list[str | None] = field(default_factory=list)
    """The states that the environment names before each turn."""

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
        episode.states.append(first.state)
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
            episode.states.append(seen.state)
            moves.append((move, episode.answers[-1]))
        await environment.close()
        return episode

    return asyncio.run(whole())


def says(*moves: str) -> Player:
    """A player that says these in turn."""
    left = iter(moves)
    return lambda seen: next(left)


def reached(row: dict[str, Any], moves: list[str]) -> GridPlace:
    """The place that these directions lead to."""
    truth = row["reward_model"]["ground_truth"]
    grid = Grid(tuple(truth["lines"]), tuple(truth["start"]))
    place = grid.first()
    for move in moves:
        place = grid.after(place, move)
    return place
