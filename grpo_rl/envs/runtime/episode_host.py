"""One episode inside of an environment process: its tools and its environment, and the answer to each assistant turn."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_rl.envs.contract import Environment, Message, Observation, Start, Tool, ToolCall, ToolResult, Turn
from grpo_rl.envs.environments import ENVIRONMENTS, TOOLS, Named, made, schema_of
from grpo_rl.envs.tool_formats import argument_problem, parse
from grpo_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostSetup:
    """The environment and the tools of every episode of a run; plain values, so that they can be sent to a process."""

    environment: Named | None
    tools: tuple[Named, ...] = ()
    format: str = "hermes"
    tool_timeout_s: float = 30.0
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    truncate_side: str = "middle"

    @staticmethod
    def read(values: Mapping[str, Any]) -> HostSetup:
        """Return the setup that `dataclasses.asdict` made plain values of."""
        environment = values["environment"]
        tools = tuple(Named(**one) for one in values["tools"])
        return HostSetup(**{**values, "environment": None if environment is None else Named(**environment), "tools": tools})


@dataclass(slots=True)
class TurnAnswer:
    """The answer to a turn, as it is sent back."""

    messages: list[Message]
    reward: float | None = None
    done: bool = False
    info: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    replaces_prompt: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    state: str | None = None


class EpisodeHost:
    """The environment and the tools of one episode."""

    def __init__(self, setup: HostSetup) -> None:
        self.setup = setup
        self.environment: Environment | None = None
        if setup.environment is not None:
            self.environment = made(setup.environment, ENVIRONMENTS, "environment")
        self.tools: dict[str, Tool] = {}
        self.schemas: dict[str, dict[str, Any]] = {}
        for named in setup.tools:
            tool = made(named, TOOLS, "tool")
            schema = schema_of(named, tool)
            if schema["name"] in self.tools:
                raise ConfigError(f"two tools are called {schema['name']}")
            self.tools[schema["name"]], self.schemas[schema["name"]] = tool, schema

    async def reset(self, values: Mapping[str, Any]) -> TurnAnswer:
        """Begin the episode of a row."""
        start = Start(**{**values, "messages": tuple(values["messages"])})
        for tool in self.tools.values():
            await tool.begin(start)
        if self.environment is None:
            return TurnAnswer([])
        return self._answer(await self.environment.reset(start))

    async def step(self, values: Mapping[str, Any]) -> TurnAnswer:
        """Answer an assistant turn: by its tool calls where it has some, else by the environment; without one it was the last.

        A turn that was cut off, or that is the last one allowed, calls no tools.
        """
        found = parse(self.setup.format, values["raw_text"]) if self.tools else None
        turn = Turn(
            index=values["index"],
            text=values["text"],
            tool_calls=() if found is None else found.calls,
            malformed=() if found is None else found.malformed,
            finish_reason=values["finish_reason"],
            token_ids=np.asarray(values["token_ids"], dtype=np.int32),
            raw_text=values["raw_text"],
            context_tokens=values["context_tokens"],
        )
        counts: Counter[str] = Counter(malformed_calls=len(turn.malformed))
        may_call = turn.finish_reason == "stop" and not values["is_last"]
        if may_call and (turn.tool_calls or turn.malformed):
            return await self._with_calls(turn, counts)
        if self.environment is None:
            return TurnAnswer([], done=turn.finish_reason == "stop" and not turn.tool_calls, counts=dict(counts))
        answer = self._answer(await self.environment.step(turn))
        answer.counts = dict(counts)
        return answer

    async def close(self) -> None:
        """Release the environment and every tool, whichever of them fail at it."""
        holders: list[Tool | Environment] = [
            *self.tools.values(),
            *([self.environment] if self.environment is not None else []),
        ]
        results = await asyncio.gather(*(one.close() for one in holders), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    # ---- tools -------------------------------------------------------------------------------------------

    async def _with_calls(self, turn: Turn, counts: Counter[str]) -> TurnAnswer:
        """Run the turn's calls side by side; what could not be read goes back to the policy like a failed call."""
        calls = turn.tool_calls[: self.setup.max_parallel_calls]
        counts["left_out_calls"] += len(turn.tool_calls) - len(calls)
        counts["tool_calls"] += len(calls)
        results = await asyncio.gather(*(self._call(call, counts) for call in calls))
        messages = [self._message(call, result) for call, result in zip(calls, results, strict=True)]
        for number, problem in enumerate(turn.malformed):
            call = ToolCall("error", {}, f"error{number:04d}")
            messages.append(self._message(call, ToolResult(f"Error: {problem}", failed=True)))
        rewards = [result.reward for result in results if result.reward is not None]
        return TurnAnswer(messages, _finite(sum(rewards)) if rewards else None, counts=dict(counts))

    async def _call(self, call: ToolCall, counts: Counter[str]) -> ToolResult:
        """Return a call's result; whatever goes wrong with it is a result that says so."""
        tool = self.tools.get(call.name)
        if tool is None:
            result = ToolResult(f"Error: there is no tool {call.name!r}; there is {', '.join(sorted(self.tools))}", failed=True)
        elif problem := argument_problem(self.schemas[call.name], call.arguments):
            result = ToolResult(f"Error: {problem}", failed=True)
        else:
            result = await self._run(tool, call, counts)
        counts["failed_calls"] += result.failed
        return result

    async def _run(self, tool: Tool, call: ToolCall, counts: Counter[str]) -> ToolResult:
        timeout_s = self.setup.tool_timeout_s
        try:
            result = await asyncio.wait_for(tool.call(call.arguments), timeout_s)
        except TimeoutError:
            counts["tool_timeouts"] += 1
            return ToolResult(f"Error: {call.name} took longer than {timeout_s:g} s", failed=True)
        except Exception as error:  # a user's code: the policy reads what went wrong
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            counts["tool_errors"] += 1
            return ToolResult(f"Error: {lines[-1]}", failed=True)
        if isinstance(result, str):
            return ToolResult(result)
        if not isinstance(result, ToolResult):
            raise TypeError(f"tool {call.name!r} returned a {type(result).__name__}, not a ToolResult")
        return result

    def _message(self, call: ToolCall, result: ToolResult) -> Message:
        text = cut(str(result.text), self.setup.max_tool_response_length, self.setup.truncate_side)
        return {"role": "tool", "name": call.name, "tool_call_id": call.call_id, "content": text}

    # ---- the environment -----------------------------------------------------------------------------------

    def _answer(self, found: Observation) -> TurnAnswer:
        """Return an observation as it is sent. Raises for one that is no observation, or that no episode can go on with."""
        if not isinstance(found, Observation):
            raise TypeError(f"the environment returned a {type(found).__name__}, not an Observation")
        reward = None if found.reward is None else _finite(found.reward)
        info = {str(name): _finite(value) for name, value in found.info.items()}
        messages = [checked(message) for message in found.messages]
        tools = [dict(tool) for tool in found.tools]
        state = None if found.state is None else str(found.state)
        replaces = bool(found.replaces_prompt)
        return TurnAnswer(messages, reward, bool(found.done), info, replaces_prompt=replaces, tools=tools, state=state)


def checked(message: Any) -> Message:
    """Return a message that a template can render. Raises TypeError for another value."""
    if not isinstance(message, Mapping) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
        raise TypeError(f"a message is {{role, content}} with texts, not {message!r:.80}")
    if message["role"] not in ("user", "tool", "system"):
        raise TypeError("an environment writes user, tool and system messages; those of the assistant are the policy's")
    return dict(message)


def cut(text: str, length: int, side: str) -> str:
    """Return a text of at most `length` characters of the given one, with a mark where some are left out (as verl does)."""
    if len(text) <= length:
        return text
    if side == "left":
        return f"{text[:length]}...(truncated)"
    if side == "right":
        return f"(truncated)...{text[-length:]}"
    half = max(1, length // 2)
    return f"{text[:half]}...(truncated)...{text[-half:]}"


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward or a logged number is {number}; a finite number is needed")
    return number


def with_schemas(setup: HostSetup) -> tuple[HostSetup, list[dict[str, Any]]]:
    """Return the setup with the schemas of its tools, which the chat template shows, in OpenAI's form.

    The tools and the environment are made once for it. Raises ConfigError for a tool or an environment that cannot be found,
    or whose options are wrong, and for two tools of one name.
    """
    schemas = EpisodeHost(setup).schemas.values()
    tools = tuple(replace(named, schema=schema) for named, schema in zip(setup.tools, schemas, strict=True))
    return replace(setup, tools=tools), [{"type": "function", "function": schema} for schema in schemas]
