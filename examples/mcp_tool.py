"""A tool that asks a server of the Model Context Protocol (MCP), and a small server to ask. To call it once, run this file.

It needs the package mcp, which vLLM brings. To train with it: `tools={examples/mcp_tool.py:ServerTool: {}}` below
`actor_rollout_ref.rollout.multi_turn`, with `command` for another server; see docs/agents.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from mcp.server import MCPServer

from grpo_rl.envs.contract import SimpleTool, ToolResult


class ServerTool(SimpleTool):
    """One tool of the server that `command` starts. Each call has a session of its own, so that no call waits for another."""

    schema: Mapping[str, Any] = {
        "name": "count_letters",
        "description": "Count how often a letter stands in a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "letter": {"type": "string"}},
            "required": ["word", "letter"],
        },
    }

    def __init__(self, *, command: Sequence[str] = (sys.executable, __file__, "serve")) -> None:
        self._server = StdioServerParameters(command=command[0], args=list(command[1:]))

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with Client(stdio_client(self._server)) as client:
            result = await client.call_tool(self.schema["name"], dict(arguments))
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return ToolResult(text, failed=bool(result.is_error))


def serve() -> None:
    """Run the server on this process's standard input and output."""
    server = MCPServer("letters")

    @server.tool()
    def count_letters(word: str, letter: str) -> int:
        return word.count(letter)

    server.run("stdio")


async def call_once() -> None:
    tool = ServerTool()
    result = await tool.call({"word": "strawberry", "letter": "r"})
    refused = await tool.call({"word": "strawberry"})
    print(f"count_letters: {result.text}; without a letter: {'failed' if refused.failed else refused.text}")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else asyncio.run(call_once())
