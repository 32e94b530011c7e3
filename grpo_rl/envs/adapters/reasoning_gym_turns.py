"""Data sets of reasoning-gym as games: the answer to a wrong one says so, and it may be corrected."""

from __future__ import annotations

import asyncio

from grpo_rl.config.schema.kinds import Fraction, Turns
from grpo_rl.envs.contract import Start
from grpo_rl.envs.games.game import Game, MoveResult, Rewards
from grpo_rl.gym import SOURCE_PREFIX
from grpo_rl.rewards.rules.reasoning_gym_rule import reasoning_gym


class ReasoningGymInTurns(Game):
    """Rows of `reasoning_gym:NAME`, judged by the data set's own scorer. Progress is its score; `turns=1` asks once, without feedback."""

    name = "reasoning_gym"

    def __init__(
        self, *, turns: Turns = 3, partial: Fraction = 0.5, rewards: Rewards = "end", show_score: bool = False
    ) -> None:
        super().__init__(turns=turns, partial=partial, rewards=rewards)
        self._show_score = show_score

    def begin(self, start: Start) -> None:
        if not start.data_source.startswith(SOURCE_PREFIX) or "gym" not in start.extra_info:
            raise ValueError("extra_info has no gym")
        self._row = start

    async def move(self, text: str) -> MoveResult:
        row = self._row
        # Some scorers take long on some answers: the other episodes of the process do not wait for them.
        found = await asyncio.to_thread(reasoning_gym, row.data_source, text, row.ground_truth, dict(row.extra_info))
        if found["acc"]:
            return MoveResult(solved=True)
        score = min(1.0, max(0.0, found["score"]))
        shown = f" It scores {score:.2f} of 1." if self._show_score else ""
        return MoveResult(f"That is not the right answer.{shown} Try again.", progress=score, malformed=bool(found["refused"]))
