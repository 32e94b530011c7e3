"""The contract of environments and tools: the protocols that an episode is played by, and the values that pass between them.

An episode is one rollout of several turns: the policy writes an assistant turn, the environment answers with an
observation, and so on until it says that the episode is done. One object is made per episode, in one of the pooled
environment processes, from the options of the configuration; so attributes of the object are the episode's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Message = dict[str, Any]
"""One chat message: `role`, `content`, and what the chat template reads besides."""


@dataclass(frozen=True, slots=True)
class Start:
    """The row that an episode begins with. The same row and seed make the same episode."""

    uid: str
    data_source: str
    messages: tuple[Message, ...]
    """The chat messages of the row's prompt, without what `reset` adds."""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """A number of this episode, for environments that draw."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that an assistant turn contains, as its format's parser read it."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn, as it was sampled."""

    index: int
    """0 for the first turn of the episode."""
    text: str
    """The turn decoded without special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """One sentence for each call that could not be read, which says what is wrong with it."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    token_ids: np.ndarray | None = None
    """int32 [tokens] of the turn, for environments that read tokens."""
    raw_text: str = ""
    """The turn decoded with its special tokens, in which some formats write tool calls, behind a `<think>` that the template opened."""
    context_tokens: int = 0
    """The number of tokens that the turn was sampled behind."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn, or what it adds before the first one."""

    messages: tuple[Message, ...] = ()
    """Messages that follow the turn, of role `user` or `tool`. Empty only if the episode is done."""
    reward: float | None = None
    """The reward of the turn; None if the turn has none of its own."""
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged: the mean over episodes of each name's last value becomes the metric env/NAME."""
    replaces_prompt: bool = False
    """True where the messages that `reset` returns stand in place of the row's own, and not behind them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in OpenAI's form that the chat template shows in this episode, in place of the configuration's; `reset` may return
    them. Their calls are turns like others, which the environment answers itself."""
    state: str | None = None
    """The state that the next turn is taken in, for estimators that compare turns of equal states (gigpo); None: the messages."""


class Environment(Protocol):
    """The other side of an episode. A constructor takes the configured options as keywords."""

    async def reset(self, start: Start) -> Observation:
        """Begin the episode. The messages returned stand behind the row's own, before the first assistant turn."""

    async def step(self, turn: Turn) -> Observation:
        """Answer an assistant turn. An exception ends the episode as failed, with its text in the log."""

    async def close(self) -> None:
        """Release what the episode holds. It is called once, also after a failure or a deadline."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, which the policy reads."""

    text: str
    reward: float | None = None
    failed: bool = False
    """True if the call failed in the policy's sight (a wrong argument, an error of its program): counted, not fatal."""


class Tool(Protocol):
    """A function that assistant turns may call. One object is made per episode, as of an environment."""

    schema: Mapping[str, Any]
    """The function's name, description and JSON schema of its parameters, in OpenAI's form {"name", "description", "parameters"}."""

    async def begin(self, start: Start) -> None:
        """Make the state of the episode."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. An exception is a failed call: its last line goes back to the policy."""

    async def close(self) -> None:
        """Release the state."""


class SimpleTool:
    """A base of tools that make no state at the beginning, or release none at the end: many episodes never call."""

    async def begin(self, start: Start) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def text_tool(name: str, description: str, argument: str, what: str) -> Mapping[str, Any]:
    """Return the schema of a tool with one argument, a text, in OpenAI's form."""
    properties = {argument: {"type": "string", "description": what}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"name": name, "description": description, "parameters": parameters}
