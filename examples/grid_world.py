"""The grid world: maps with walls, a goal and, on demand, a key that the goal is locked without; its rows and its environment."""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction, Turns
from grpo_rl.data.tasks.made_rows import LazyRows, Row, refuse, row_of, split_of_text
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Play, Rewards, Wording, random_play
from grpo_rl.errors import ConfigError

NAME = "grid_world"
STEPS = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}
WORDS = {"north": "n", "east": "e", "south": "s", "west": "w", "n": "n", "e": "e", "s": "s", "w": "w"}
WORD = re.compile(r"[a-z]+")
WALL, FREE, GOAL, KEY, PLAYER = "#", ".", "G", "K", "@"
LARGEST, TRIES = 10, 1000

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GridPlace:
    """The state of a game: the player's cell, and whether it has the key (true if the map has none)."""

    cell: Cell
    has_key: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """A map as lines of text, and the cell that the player starts in."""

    lines: tuple[str, ...]
    start: Cell

    def at(self, cell: Cell) -> str:
        """Return what the cell has; a wall outside of the map."""
        row, column = cell
        inside = 0 <= row < len(self.lines) and 0 <= column < len(self.lines[0])
        return self.lines[row][column] if inside else WALL

    def first(self) -> GridPlace:
        return GridPlace(self.start, not any(KEY in line for line in self.lines))

    def after(self, place: GridPlace, direction: str) -> GridPlace:
        """Return where a step leads: nowhere against a wall, and nowhere into the goal without the key."""
        down, right = STEPS[direction]
        cell = (place.cell[0] + down, place.cell[1] + right)
        what = self.at(cell)
        if what == WALL or (what == GOAL and not place.has_key):
            return place
        return GridPlace(cell, place.has_key or what == KEY)

    def solved(self, place: GridPlace) -> bool:
        return self.at(place.cell) == GOAL

    def shortest(self, place: GridPlace | None = None) -> list[str] | None:
        """Return the directions of a shortest way from the place (the start) to the goal; None if there is none."""
        begin = place or self.first()
        ways: dict[GridPlace, list[str]] = {begin: []}
        waiting = deque([begin])
        while waiting:
            here = waiting.popleft()
            if self.solved(here):
                return ways[here]
            for direction in STEPS:
                there = self.after(here, direction)
                if there not in ways:
                    ways[there] = [*ways[here], direction]
                    waiting.append(there)
        return None


def grid_world(
    *,
    num_rows: Count = 8192,
    size: Count = 6,
    walls: Fraction = 0.2,
    key: bool = True,
    fewest_steps: Count = 4,
    turns: Turns = 40,
    wording: Wording = "words",
    play: Play = "none",
    sensible: Fraction = 0.0,
    split: Literal["train", "val"] = "train",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of the game `grid_world`, each with a map of `size` by `size` cells whose shortest way has `fewest_steps` or more.

    `walls` is the share of cells that are walls; with `key` the goal opens only to a player that has been on the key's cell.
    `turns` are the steps of a game of random play (`play=random`): any direction, but with the probability `sensible` that
    of a shortest way. The splits share no map. Row i is drawn from (seed, i). Raises ConfigError for options out of range, and where
    they leave no map.
    """
    refuse(
        NAME,
        (3 <= size <= LARGEST, f"size={size} must be from 3 to {LARGEST}"),
        (0 <= walls <= 0.5, f"walls={walls} must be from 0 to 0.5"),
    )

    def make(index: int) -> Row:
        rng = random.Random(f"{NAME}:{seed}:{index}")
        grid = _drawn(rng, size, walls, key, fewest_steps, split)
        truth = {"lines": list(grid.lines), "start": list(grid.start)}
        row = row_of(NAME, prompt_of(grid, wording), truth, {"index": index, "wording": wording, "split": split}, "game")
        game = GridWorld()

        def step() -> str:
            way = grid.shortest(game.place) if rng.random() < sensible else None
            return way[0] if way else rng.choice(list(STEPS))

        return row if play == "none" else random_play(row, game, step, turns)

    make(0)
    return LazyRows(num_rows, make)


def _drawn(rng: random.Random, size: int, walls: float, key: bool, fewest_steps: int, split: str) -> Grid:
    for _ in range(TRIES):
        cells = [[WALL if rng.random() < walls else FREE for _ in range(size)] for _ in range(size)]
        free = [(row, column) for row in range(size) for column in range(size) if cells[row][column] == FREE]
        if len(free) < 3:
            continue
        start, goal, keys = rng.sample(free, 3)
        cells[goal[0]][goal[1]] = GOAL
        if key:
            cells[keys[0]][keys[1]] = KEY
        grid = Grid(tuple("".join(line) for line in cells), start)
        way = grid.shortest()
        if way is not None and len(way) >= fewest_steps and split_of_text(f"{grid.lines}{grid.start}") == split:
            return grid
    raise ConfigError(
        f"task {NAME}: {TRIES} maps of size={size} with walls={walls} were drawn, and none has a way of {fewest_steps} steps or "
        f"more in split={split}; take larger maps, fewer walls, or a smaller fewest_steps"
    )


def prompt_of(grid: Grid, wording: str) -> str:
    """Return the question. In short: the cells of goal and key, then what is seen at the start: `G31K02 ...`."""
    first = seen(grid, grid.first(), wording)
    marks = [f"{mark}{row}{line.index(mark)}" for mark in (GOAL, KEY) for row, line in enumerate(grid.lines) if mark in line]
    if wording == "short":
        return f"{''.join(marks)} {first}"
    key = f" The goal is locked until you have been on the key ({KEY})." if len(marks) == 2 else ""
    return (
        f"You ({PLAYER}) walk on a map with walls ({WALL}) to the goal ({GOAL}).{key} Answer with one direction in each turn, last in "
        f"your answer: north, east, south or west.\n{first}"
    )


def seen(grid: Grid, place: GridPlace, wording: str) -> str:
    """Return what the player sees: the map; in short its cell, the four cells around it (north, east, south, west), and k with the key.

    `21.#..k` is row 2, column 1, a wall in the east, and the key in hand.
    """
    row, column = place.cell
    if wording == "short":
        around = "".join(grid.at((row + down, column + right)) for down, right in STEPS.values())
        text = f"{row}{column}{around}{'k' if place.has_key else '-'}"
    else:
        lines = list(grid.lines)
        lines[row] = lines[row][:column] + PLAYER + lines[row][column + 1 :]
        text = "\n".join(lines)
    return text.replace(KEY, FREE) if place.has_key else text


class GridWorld(Game):
    """Rows of `task:grid_world`. Progress, which counts only if `partial` is set, is the share of the shortest way that is behind."""

    name = NAME

    def __init__(self, *, turns: Turns = 40, partial: Fraction = 0.0, rewards: Rewards = "end") -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)

    def begin(self, start: Start) -> None:
        row, column = start.ground_truth["start"]
        self._grid = Grid(tuple(str(line) for line in start.ground_truth["lines"]), (int(row), int(column)))
        self._wording = start.extra_info.get("wording", "words")
        self.place = self._grid.first()
        if not (way := self._grid.shortest()):
            raise ValueError("no way leads from the start to the goal, or it begins there")
        self._longest = len(way)

    def state(self) -> str:
        return str(self.place)

    def move(self, text: str) -> MoveResult:
        words = WORD.findall(text.lower())
        direction = WORDS.get(words[-1]) if words else None
        if direction is not None:
            self.place = self._grid.after(self.place, direction)
        if self._grid.solved(self.place):
            return MoveResult(solved=True)
        said = seen(self._grid, self.place, self._wording)
        if direction is None:
            asked = "?" if self._wording == "short" else "Answer with north, east, south or west.\n"
            return MoveResult(asked + said, malformed=True)
        way = self._grid.shortest(self.place) if self._partial else None
        return MoveResult(said, progress=0.0 if way is None else max(0.0, 1 - len(way) / self._longest))


def main() -> None:
    row = grid_world(num_rows=1, size=4)[0]
    print(row["prompt"][0]["content"])
    truth = row["reward_model"]["ground_truth"]
    print("the shortest way:", " ".join(Grid(tuple(truth["lines"]), tuple(truth["start"])).shortest() or ()))


if __name__ == "__main__":
    main()
