"""The protocols that an episode is played by, and the values that pass between them.

An episode is one rollout of several turns: the policy writes an assistant turn, the environment answers with
an observation, until it says that the episode is done. One object is made per episode, in a pooled
environment process: its attributes are the episode's state.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, Protocol

import numpy as np

from grpo_rl.frozen import frozen

Message = dict[str, Any]
"""`role`, `content`, and what the chat template reads besides."""


@frozen
class Start:
    """The row of an episode; the same row and seed make the same episode."""

    uid: str
    data_source: str
    messages: tuple[Message, ...]
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """For environments that draw random numbers."""


@frozen
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@frozen
class Turn:
    index: int
    text: str
    """The turn decoded without special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """A sentence for each call that could not be read."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    token_ids: np.ndarray | None = None
    """int32 [tokens]"""
    raw_text: str = ""
    """With special tokens, in which some formats write calls, behind a `<think>` that the template opened."""
    context_tokens: int = 0
    """Tokens before the turn."""


@frozen
class Observation:
    messages: tuple[Message, ...] = ()
    """Of role `user` or `tool`. Empty only if the episode is done."""
    reward: float | None = None
    """The reward of the turn, if it has one of its own."""
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    """Logged: the mean over episodes of each name's last value is the metric env/NAME."""
    replaces_prompt: bool = False
    """Messages of `reset` take the place of the row's own."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Returned by `reset`: tools in OpenAI's form that the chat template shows in place of the
    configuration's. The environment answers their calls."""
    state: str | None = None
    """Of the next turn, for estimators that compare turns of equal states (gigpo); None: the messages."""


class Environment(Protocol):
    """The other side of an episode. A constructor takes the configured options as keywords."""

    async def reset(self, start: Start) -> Observation:
        """The messages stand behind the row's own, before the first assistant turn."""

    async def step(self, turn: Turn) -> Observation:
        """An exception ends the episode as failed, with its text in the log."""

    async def close(self) -> None:
        """Called once, also after a failure or a deadline."""


@frozen
class ToolResult:
    text: str
    reward: float | None = None
    failed: bool = False
    """In the policy's sight (a wrong argument, an error of its program): counted, not fatal."""


class Tool(Protocol):
    """A function that assistant turns may call. One object is made per episode."""

    schema: Mapping[str, Any]
    """{"name", "description", "parameters"} as OpenAI has it."""

    async def begin(self, start: Start) -> None: ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """An exception is a failed call: its last line goes back to the policy."""

    async def close(self) -> None: ...


async def result_of(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Await the function's result; a function that is not async runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
    result = await asyncio.to_thread(function, *arguments, **options)
    return await result if inspect.isawaitable(result) else result


class SimpleTool:
    """For tools that make no state at the beginning, or release none at the end."""

    async def begin(self, start: Start) -> None:
        return

    async def close(self) -> None:
        return


def text_tool(name: str, description: str, argument: str, what: str) -> Mapping[str, Any]:
    """The schema of a tool with one argument, a text."""
    properties = {argument: {"type": "string", "description": what}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"name": name, "description": description, "parameters": parameters}
