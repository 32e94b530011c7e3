"""An environment of one's own: a safe whose three-digit code is found by how many digits are right. To play it, run this file.

It answers a turn with an observation, and gives a reward when the episode is over. To train on it: `environment.name` is
`examples/own_environment.py:Safe`, with rows of `task:episodes`; see docs/agents.md.
"""

from __future__ import annotations

import asyncio
import random

from grpo_rl.envs.contract import Observation, Start, Turn


class Safe:
    """The environment: one object is made for each episode, with the configured options as keywords."""

    def __init__(self, *, turns: int = 12) -> None:
        self.turns = turns

    async def reset(self, start: Start) -> Observation:
        self.code = f"{random.Random(start.seed).randrange(1000):03d}"
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        right = sum(one == other for one, other in zip(turn.text.strip(), self.code, strict=False))
        opened = turn.text.strip() == self.code
        done = opened or turn.index + 1 == self.turns
        answer = {"role": "user", "content": f"{right} right"}
        return Observation(
            () if done else (answer,), reward=float(opened) if done else None, done=done, info={"opened": float(opened)}
        )

    async def close(self) -> None:
        pass


async def play() -> Observation:
    """Play one episode by hand: digit by digit, each raised until one more is right."""
    safe = Safe(turns=40)
    await safe.reset(Start(uid="0", data_source="safe", messages=(), seed=7))
    guess, turns = "000", 0
    seen = await safe.step(Turn(turns, guess))
    for place in range(3):
        for digit in "123456789":
            right, turns = int(seen.messages[0]["content"][0]), turns + 1
            tried = guess[:place] + digit + guess[place + 1 :]
            seen = await safe.step(Turn(turns, tried))
            now = 3 if seen.done else int(seen.messages[0]["content"][0])
            print(f"{tried}: {now} right")
            if seen.done:
                return seen
            if now > right:
                guess = tried
            if now != right:  # more: it is this digit; less: it was the one before
                seen = await safe.step(Turn(turns := turns + 1, guess))
                break
    return seen


if __name__ == "__main__":
    last = asyncio.run(play())
    print(f"opened {last.info['opened']:.0f}, reward {last.reward}")
