"""Questions with the tools of an MCP server, which is started here and spoken with over its standard input and output.

As `environments.tool_use`, with tools that live in another program. Each worker process has one connection, made when
it is first needed; what the tools answered is on the tape.
"""

import json
import os
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_fn.core.environment import Environment, PlainData, Start, ToolCall
from grpo_fn.core.problem import Problem, RewardFn
from grpo_fn.environments import tool_use
from grpo_fn.environments.tool_use import answer_each

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client

Result = TypeVar("Result")

# Starts a server that Linux kills with the thread that started it: one that is at work does not read the end of its
# standard input, and would outlive a worker that was killed.
DIE_TOGETHER = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def environment(
    *,
    command: Sequence[str],
    variables: Sequence[str],
    grade: RewardFn,
    instructions: str,
    max_turns: int,
    deadline: float,
    max_output: int,
) -> Environment:
    """The environment of questions with the tools of an MCP server (extra `mcp`).

    Args:
        command: what starts the server: the program and its arguments.
        variables: names of environment variables that it gets besides HOME, PATH, USER and their like; each is set.
        grade: what the text of the last turn is worth to the problem; reads its prompt and answer alone.
        instructions: system message; `{tools}` in it is the tools' JSON schemas, a line each; "" for none.
        max_turns: turns after which the episode ends without an answer.
        deadline: seconds that the server may take to start and list its tools, and for each call.
        max_output: characters of an answer that are shown, the first ones.

    Returns:
        The environment, which is not pure.

    Raises:
        ValueError: where the package mcp is missing, for no command, and for numbers that are not more than 0.
    """
    if find_spec("mcp") is None:
        raise ValueError("mcp_tools.environment: got no package mcp, expected pip install 'grpo-fn[mcp]'")
    if isinstance(command, str) or not command:
        raise ValueError(f"mcp_tools.environment.command: got {command!r}, expected a program and its arguments")
    for name, value in (("max_turns", max_turns), ("deadline", deadline), ("max_output", max_output)):
        if not value > 0:
            raise ValueError(f"mcp_tools.environment.{name}: got {value}, expected more than 0")
    server = ToolServer(tuple(command), tuple(variables), deadline, max_output)
    answer = partial(answer_each, answer=server.answer)
    return Environment(
        start=partial(start, server=server, instructions=instructions),
        step=partial(tool_use.step, answer=answer, grade=grade, max_turns=max_turns),
        pure=False,
    )


def start(problem: Problem, key: int, *, server: "ToolServer", instructions: str) -> Start:
    """The question, after the instructions with what the server says of its tools."""
    shown = instructions.replace("{tools}", server.describe()) if "{tools}" in instructions else instructions
    return tool_use.start(problem, key, instructions=shown)


@dataclass
class ToolServer:
    """An MCP server and, once it is needed, the connection to it. What is pickled are the knobs.

    A server that ends, does not answer within `deadline` seconds or breaks the protocol raises RuntimeError, which is a
    failure of the environment; the next call starts another.
    """

    command: tuple[str, ...]
    variables: tuple[str, ...]
    deadline: float
    max_output: int
    _connection: "Connection | None" = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.command, self.variables, self.deadline, self.max_output)

    def describe(self) -> str:
        """The tools' schemas, a line of JSON each."""
        return "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self._connected().schemas.values())

    def answer(self, call: ToolCall) -> str:
        """The tool's answer; a text that begins with `error:` if it refuses or does not exist."""
        connection = self._connected()
        if call.name not in connection.schemas:
            return f"error: got the tool {call.name!r}, expected one of {', '.join(connection.schemas)}"
        try:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            return f"error: arguments of {call.name}: got {error}, expected JSON in UTF-8"
        try:
            return connection.call(call.name, call.arguments)[: self.max_output]
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> "Connection":
        if self._connection is None:
            self._connection = Connection(self)
        return self._connection


class Connection:
    """A running server and its tools. Its messages are read in their own thread."""

    def __init__(self, server: ToolServer) -> None:
        from anyio.from_thread import start_blocking_portal

        self._server, self._name = server, " ".join(server.command)
        if shutil.which(server.command[0]) is None:
            raise RuntimeError(f"MCP server {self._name}: got no program {server.command[0]!r}, expected one on PATH")
        if missing := [name for name in server.variables if name not in os.environ]:
            raise RuntimeError(
                f"MCP server {self._name}: got no value of {', '.join(missing)}, expected these variables set"
            )
        self.schemas: dict[str, dict[str, PlainData]] = {}
        stack = ExitStack()
        self._portal: BlockingPortal = stack.enter_context(start_blocking_portal(name="mcp"))
        ready: Future[Client] = Future()
        serving = self._portal.start_task_soon(serve, server, ready)
        stack.callback(serving.cancel)  # ends the server before the portal ends
        self.close = weakref.finalize(self, stack.close)
        try:
            self._client = self._wait(ready, "starting")
            self._list_tools()
        except BaseException:
            self.close()
            raise

    def call(self, name: str, arguments: Mapping[str, PlainData]) -> str:
        """A tool's answer. Raises RuntimeError if the server does not answer."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        calling = self._portal.start_task_soon(self._client.call_tool, name, dict(arguments))
        try:
            found = self._wait(calling, f"the tool {name}")
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise RuntimeError(f"MCP server {self._name}: it ended while at the tool {name}") from error
            return f"error: {error.message}"
        texts = [block.text if block.type == "text" else f"({block.type})" for block in found.content]
        return ("error: " if found.is_error else "") + "\n".join(texts)

    def _list_tools(self) -> None:
        cursor: str | None = None
        while True:
            listing = self._portal.start_task_soon(partial(self._client.list_tools, cursor=cursor))
            page = self._wait(listing, "listing its tools")
            for tool in page.tools:
                if tool.name in self.schemas:
                    raise ValueError(
                        f"MCP server {self._name}: got two tools of the name {tool.name!r}, expected each name once"
                    )
                function = {
                    "name": tool.name,
                    "description": " ".join((tool.description or "").split()),
                    "parameters": tool.input_schema,
                }
                self.schemas[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if cursor is None:
                break
        if not self.schemas:
            raise RuntimeError(f"MCP server {self._name}: got no tools, expected at least 1")

    def _wait(self, future: "Future[Result]", what: str) -> Result:
        try:
            return future.result(self._server.deadline)
        except TimeoutError as error:
            future.cancel()
            raise RuntimeError(
                f"MCP server {self._name}: got no answer within {self._server.deadline:g} s, waiting for {what}"
            ) from error


async def serve(server: ToolServer, ready: "Future[Client]") -> None:
    """Start the server, say so, and keep it until this is cancelled."""
    from anyio import sleep_forever
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    command = server.command
    if sys.platform == "linux":
        command = (sys.executable, "-I", "-S", "-c", DIE_TOGETHER, *command)
    given = {name: os.environ[name] for name in server.variables}
    program = StdioServerParameters(command=command[0], args=list(command[1:]), env=given)
    try:
        async with Client(stdio_client(program, errlog=sys.__stderr__)) as client:
            ready.set_result(client)
            await sleep_forever()
    except Exception as error:
        if not ready.done():
            ready.set_exception(
                RuntimeError(f"MCP server {' '.join(server.command)}: it ended while starting: {error!r}")
            )
