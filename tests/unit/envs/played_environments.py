"""Environments and tools of tests, as users write them: loaded from this file by the environment processes."""

import asyncio
import json
import os
import random
import re
import signal
import time
from typing import ClassVar

from grpo_rl.envs.contract import Observation, ToolResult


class Echo:
    """Answers every turn with the row's seed and the turn's number; done after `turns`."""

    def __init__(self, turns: int = 3, reward: float | None = 1.0, opening: str = "") -> None:
        self.turns, self.reward, self.opening = turns, reward, opening

    async def reset(self, start):
        self.random = random.Random(start.seed)
        return Observation(({"role": "user", "content": self.opening},) if self.opening else ())

    async def step(self, turn):
        done = turn.index + 1 >= self.turns
        said = "".join(self.random.choice("0123456789+=") for _ in range(self.random.randint(0, 6)))
        messages = () if done else ({"role": "user", "content": said},)
        reward = None if self.reward is None else self.reward * (turn.index + 1)
        return Observation(messages, reward, done, {"turns": turn.index + 1, "digits": len(re.findall(r"\d", turn.text))})

    async def close(self):
        pass


class Waiting(Echo):
    """Waits before each answer."""

    def __init__(self, turns: int = 2, wait_s: float = 0.2, slow: str = "", slow_s: float = 30.0) -> None:
        super().__init__(turns)
        self.wait_s, self.slow, self.slow_s = wait_s, slow, slow_s

    async def reset(self, start):
        self.uid = start.uid
        return await super().reset(start)

    async def step(self, turn):
        await asyncio.sleep(self.slow_s if self.uid == self.slow else self.wait_s)
        return await super().step(turn)


class Blocking(Waiting):
    """Blocks its thread if the other only waits."""

    async def step(self, turn):
        if self.uid == self.slow:
            time.sleep(self.slow_s)
        return await super(Waiting, self).step(turn)


class Holding(Waiting):
    """Holds the interpreter, as a regular expression that never ends does."""

    async def step(self, turn):
        if self.uid == self.slow:
            re.match(r"(a+)+$", "a" * 40 + "b")
        return await super(Waiting, self).step(turn)


class Dying(Echo):
    """Kills its process in the second turn of one row, as often as `times` says (counted in a file)."""

    def __init__(self, path: str, uid: str = "p0", times: int = 1, turns: int = 3) -> None:
        super().__init__(turns)
        self.path, self.uid, self.times = path, uid, times

    async def reset(self, start):
        self.own = start.uid
        return await super().reset(start)

    async def step(self, turn):
        if turn.index == 1 and self.own == self.uid:
            with open(self.path, "a+") as file:
                file.seek(0)
                if len(file.read()) < self.times:
                    file.write("x")
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(turn)


class Wrong(Echo):
    """Does what no environment should: `how` says what."""

    def __init__(self, how: str = "raises") -> None:
        super().__init__(2)
        self.how = how

    async def step(self, turn):
        if self.how == "raises":
            raise ValueError("the puzzle is broken")
        if self.how == "nothing":
            return None
        if self.how == "nan":
            return Observation(({"role": "user", "content": "?"},), float("nan"))
        return Observation(({"role": "assistant", "content": "I speak for you"},))


class Outside(Echo):
    """Says `content` after each turn but the last, gives `reward`, and names its state with half a character."""

    def __init__(self, content: str = "", repeat: int = 1, reward: float = 1.0) -> None:
        super().__init__(2)
        self.content, self.reward = json.loads(content) * repeat, reward

    async def step(self, turn):
        done = turn.index + 1 >= self.turns
        messages = () if done else ({"role": "user", "content": self.content},)
        return Observation(messages, self.reward, done, state="\ud83d")


class Plain:
    """An environment and a tool whose methods are no coroutines."""

    schema: ClassVar = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}

    def __init__(self, returns="3"):
        self.returns = returns

    def begin(self, start):
        pass

    def reset(self, start):
        return Observation(({"role": "user", "content": "go"},))

    def step(self, turn):
        return Observation(reward=1.0, done=True)

    def call(self, arguments):
        if self.returns == "raises":
            raise ValueError("no database")
        return 3 if self.returns == "number" else self.returns

    def close(self):
        pass


class Adding:
    """A tool that adds two numbers and counts its calls."""

    schema: ClassVar = {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    }

    def __init__(self, slow_above: float = 1e9) -> None:
        self.slow_above = slow_above

    async def begin(self, start):
        self.calls = 0

    async def call(self, arguments):
        self.calls += 1
        if arguments["a"] > self.slow_above:
            await asyncio.sleep(60)
        if arguments["b"] == 0:
            raise ValueError("nothing to add")
        return ToolResult(f"{arguments['a'] + arguments['b']} ({self.calls})", reward=0.5)

    async def close(self):
        pass
