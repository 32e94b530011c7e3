"""The grid world as an environment: one step in each turn, and a reward at the goal alone."""

from __future__ import annotations

from grpo_rl.config.schema.kinds import Fraction, Turns
from grpo_rl.data.tasks.games.grid_maps import NAME, Grid, read_direction, seen
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Answer, Game, Rewards

MALFORMED = {"words": "Answer with north, east, south or west.", "short": "?"}


class GridWorld(Game):
    """Rows of `task:grid_world`. Progress, which counts only where `partial` is set, is the share of the shortest way that is behind."""

    name = NAME

    def __init__(self, *, turns: Turns = 40, partial: Fraction = 0.0, rewards: Rewards = "end") -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)

    def begin(self, start: Start) -> None:
        ground_truth = start.ground_truth
        row, column = ground_truth["start"]
        self._grid = Grid(tuple(str(line) for line in ground_truth["lines"]), (int(row), int(column)))
        self._wording = start.extra_info.get("wording", "words")
        self._place = self._grid.first()
        self._longest = self._steps_left()

    async def move(self, text: str) -> Answer:
        direction = read_direction(text)
        if direction is None:
            said = (
                MALFORMED[self._wording]
                + ("\n" if self._wording == "words" else "")
                + seen(self._grid, self._place, self._wording)
            )
            return Answer(said, malformed=True)
        self._place = self._grid.after(self._place, direction)
        if self._grid.solved(self._place):
            return Answer(solved=True)
        progress = 1 - self._steps_left() / self._longest if self._partial else 0.0
        return Answer(seen(self._grid, self._place, self._wording), progress=max(0.0, progress))

    def _steps_left(self) -> int:
        way = self._grid.shortest(self._place)
        if not way:
            raise ValueError("no way leads from the start to the goal, or it begins there")
        return len(way)
