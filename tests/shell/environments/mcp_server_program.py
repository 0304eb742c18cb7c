"""An MCP server over standard input and output, as the tests of `mcp_tools` start it."""

import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two
    whole numbers."""
    return str(a + b)


@server.tool()
def refuse(text: str) -> str:
    """Never of use."""
    raise ValueError(f"got {text}, expected something else")


@server.tool()
def repeat(text: str, times: int) -> str:
    """A text, some times over."""
    return text * times


@server.tool()
def sleep(seconds: float) -> str:
    """Answer later."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(str(os.getpid()))
    server.run("stdio")
