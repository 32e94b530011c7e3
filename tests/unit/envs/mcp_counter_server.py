"""A server of the Model Context Protocol with a tool without state, one with state, and one that fails."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


@server.tool()
def bump() -> int:
    """Count the calls."""
    global count
    count += 1
    return count


@server.tool()
def leave() -> str:
    """End the server in the middle of a call."""
    import os

    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
