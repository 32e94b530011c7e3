"""Tools of a server of the Model Context Protocol, which is started as a program and talked to over its standard streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Thread
from typing import Any

from grpo_rl.envs.contract import SimpleTool, ToolResult
from grpo_rl.errors import ConfigError

START_S = 30.0
"""Seconds that a server may take to start and to list its tools."""
ALIVE_S = 2.0
"""Seconds that a server may take to list its tools, after a call that failed."""
Command = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
"""A server's command line, and the environment variables that it has beside a few of this process (PATH, HOME)."""


class McpConnection:
    """A running server. One task opens and closes it, because the library's scopes must be left by the task that entered them."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def client(self) -> Any:
        """Return the library's client, once the server is there. Raises ToolServerError where it does not start."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except TimeoutError:
            raise ToolServerError(f"the MCP server {self._command[0][0]} did not answer within {START_S:g} s") from None

    async def end_if_lost(self) -> None:
        """End the connection where the server does not answer any more, so that the next call starts another one."""
        try:
            await asyncio.wait_for((await self.client()).list_tools(), ALIVE_S)
        except Exception:
            await self.close()

    async def close(self) -> None:
        """End the server, and wait until it has ended."""
        self._stop.set()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters

        (program, *words), variables = self._command
        try:
            async with Client(StdioServerParameters(command=program, args=words, env=dict(variables))) as client:
                self._ready.set_result(client)
                await self._stop.wait()
        except Exception as error:  # a server that has ended later fails the calls that wait for it
            if not self._ready.done():
                reason: BaseException = error
                while isinstance(reason, BaseExceptionGroup):
                    reason = reason.exceptions[0]
                self._ready.set_exception(ToolServerError(f"the MCP server {program} did not start: {_cause(reason)}"))
                self._ready.exception()  # read, so that asyncio does not report it where no call waits for it


def _cause(error: BaseException) -> str:
    """Return what an error says; some, such as an answer that does not come in time, say nothing."""
    late = f"no answer within {START_S:g} s" if isinstance(error, TimeoutError) else type(error).__name__
    return str(error) or late


class ToolServerError(RuntimeError):
    """An error: the server of a tool is not there."""


_SHARED: dict[tuple[asyncio.AbstractEventLoop, Command], McpConnection] = {}


class McpTool(SimpleTool):
    """The tool named `tool` of the MCP server that `command` (a program and its words) starts, with `variables` in its environment.

    With `shared`, which is for servers without state, all episodes of an environment process use one server; otherwise each episode
    starts its own with its first call. A server that has ended is started again by the next call. The schema is the server's own.
    """

    def __init__(
        self, *, command: Sequence[str] | str, tool: str, variables: Mapping[str, str] | None = None, shared: bool = True
    ) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError("tool mcp: the package mcp is not installed; pip install 'grpo_rl[envs]'") from error
        words = (command,) if isinstance(command, str) else tuple(str(word) for word in command)
        if not words or not words[0]:
            raise ConfigError("tool mcp: command is empty; expected a program and its words, such as [python, server.py]")
        self._command: Command = (words, tuple(sorted((str(k), str(v)) for k, v in (variables or {}).items())))
        self._tool, self._shared = tool, shared
        self._own: McpConnection | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """The server's own schema of the tool. Raises ConfigError where the server does not start, or has no such tool."""
        found = schemas(self._command)
        if self._tool not in found:
            raise ConfigError(
                f"tool mcp: the server {' '.join(self._command[0])} has no tool {self._tool!r}; it has {', '.join(found)}"
            )
        return found[self._tool]

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        connection = self._connection()
        client = await connection.client()
        try:
            result = await client.call_tool(self._tool, dict(arguments))
        except Exception:
            await connection.end_if_lost()
            raise
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        return ToolResult("\n".join(texts), failed=bool(result.is_error))

    async def close(self) -> None:
        """End the episode's own server. A shared one ends with its process."""
        if self._own is not None:
            await self._own.close()
            self._own = None

    def _connection(self) -> McpConnection:
        if not self._shared:
            if self._own is None or self._own.ended:
                self._own = McpConnection(self._command)
            return self._own
        key = (asyncio.get_running_loop(), self._command)
        if key not in _SHARED or _SHARED[key].ended:
            _SHARED[key] = McpConnection(self._command)
        return _SHARED[key]


@lru_cache(maxsize=16)
def schemas(command: Command) -> dict[str, dict[str, Any]]:
    """Return the schemas of all tools of a server by name; it is started for that once. Raises ConfigError where it does not start."""
    outcome: list[dict[str, dict[str, Any]] | BaseException] = []

    def ask() -> None:
        try:
            outcome.append(asyncio.run(_listed(command)))
        except BaseException as error:
            outcome.append(error)

    # A thread of its own: the calling one may be running an event loop already.
    thread = Thread(target=ask, daemon=True, name="mcp-schemas")
    thread.start()
    thread.join(2 * START_S)
    found = outcome[0] if outcome else TimeoutError(f"no answer within {2 * START_S:g} s")
    if isinstance(found, BaseException):
        raise ConfigError(
            f"tool mcp: the server {' '.join(command[0])} could not be asked for its tools: {_cause(found)}"
        ) from found
    return found


async def _listed(command: Command) -> dict[str, dict[str, Any]]:
    connection = McpConnection(command)
    try:
        client = await connection.client()
        listed = await asyncio.wait_for(client.list_tools(), START_S)
        return {
            tool.name: {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
            for tool in listed.tools
        }
    finally:
        with contextlib.suppress(Exception):
            await connection.close()
