"""Tools of a real MCP server over its standard input and output."""

import os
import pickle
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from profiles import profile

from grpo_fn import testing
from grpo_fn.core.environment import Message, ToolCall, play_script
from grpo_fn.core.problem import Problem
from grpo_fn.rewards import math
from grpo_fn.shell.environments import mcp_tools
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool

pytest.importorskip("mcp", reason="NOT TESTED without the mcp library: tools of MCP servers")

PROGRAM = Path(__file__).resolve().with_name("mcp_server_program.py")
COMMAND = (sys.executable, str(PROGRAM))
KNOBS = {
    "command": COMMAND,
    "variables": (),
    "grade": math.correct,
    "instructions": "Tools:\n{tools}",
    "max_turns": 3,
    "deadline": 30.0,
    "max_output": 300,
}
PROBLEM = Problem(0, "What is 2 + 3?", "5", {})


@pytest.fixture(scope="module")
def server():
    """One connection for what leaves the server as it is."""
    os.environ["MCP_TEST_KEY"] = "given"
    made = mcp_tools.ToolServer(COMMAND, ("MCP_TEST_KEY",), 30.0, 300)
    yield made
    made.close()
    del os.environ["MCP_TEST_KEY"]


def asks(name, **arguments):
    return Message("assistant", "", calls=(ToolCall(name, arguments),))


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def ends_soon(pid):
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("repeat", {"text": "ab", "times": 1000}, "ab" * 150),
        ("variable", {"name": "MCP_TEST_KEY"}, "given"),
        ("add", {"a": "two", "b": 3}, "error: Error executing tool add: 1 validation error"),
        ("refuse", {"text": "x"}, "error: Error executing tool refuse"),
        ("nothing", {}, "error: got the tool 'nothing', expected one of add, refuse, repeat"),
        ("repeat", {"text": "\ud800", "times": 1}, "error: arguments of repeat: got 'utf-8' codec can't encode"),
    ],
)
def test_a_call_is_answered_and_what_is_wrong_with_it_is_an_observation(server, name, arguments, said):
    answer = server.answer(ToolCall(name, arguments))
    assert answer.startswith(said)
    assert len(answer) <= 300


def test_the_environment_is_fit_for_a_run():
    texts = st.text(max_size=20)
    numbers = st.one_of(st.integers(), st.floats(), texts)
    calls = st.one_of(
        st.builds(lambda text: asks("repeat", text=text, times=2), texts),
        st.builds(lambda a, b: asks("add", a=a, b=b), numbers, numbers),
    )
    with profile(max_examples=10):
        testing.check_environment(mcp_tools.environment(**KNOBS), messages=calls, max_turns=3)


def test_an_episode_in_a_worker_calls_the_tools_and_is_graded():
    environment = mcp_tools.environment(**KNOBS)
    assert not environment.pure
    with EnvironmentPool(environment, workers=1, deadline=60.0, memory_mb=4096) as pool:
        start = pool.start(PROBLEM, 0).result()
        system, user = start.messages
        first, tool, *_ = system.content.splitlines()
        described = '{"type": "function", "function": {"name": "add", "description": "Add two whole numbers.'
        assert (first, tool[: len(described)], user.content) == ("Tools:", described, "What is 2 + 3?")
        called = pool.step(start.state, asks("add", a=2, b=3)._replace(malformed="got '{', expected JSON"), 1).result()
        assert called.messages == (Message("tool", "5", "add"), Message("tool", "error: got '{', expected JSON"))
        died = pool.step(called.state, asks("end"), 2).result()
        assert "it ended while at the tool end" in died.failure
        again = pool.step(called.state, asks("add", a=4, b=4), 3).result()
        assert again.messages == (Message("tool", "8", "add"),)
        ended = pool.step(called.state, Message("assistant", r"\boxed{5}"), 3).result()
        assert (ended.reward, ended.done) == (1.0, True)


@pytest.mark.slow
def test_a_tool_that_hangs_is_a_failure_and_its_server_ends(tmp_path):
    written = tmp_path / "pid"
    server = mcp_tools.ToolServer((*COMMAND, str(written)), (), 30.0, 300)
    server.describe()
    pid = int(written.read_text())
    assert is_running(pid)
    server.deadline = 0.3
    with pytest.raises(RuntimeError, match=r"got no answer within 0\.3 s, waiting for the tool sleep"):
        server.answer(ToolCall("sleep", {"seconds": 60.0}))
    assert ends_soon(pid)
    server.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED elsewhere: servers that die with a killed worker")
def test_a_worker_that_is_killed_leaves_no_server(tmp_path):
    written = tmp_path / "pid"
    environment = mcp_tools.environment(**KNOBS | {"command": (*COMMAND, str(written))})
    with EnvironmentPool(environment, workers=1, deadline=8.0, memory_mb=4096) as pool:
        start = pool.start(PROBLEM, 0).result()
        assert not start.failure
        pool.deadline = 0.5
        assert "late" in pool.step(start.state, asks("sleep", seconds=60.0), 1).result().failure
        assert ends_soon(int(written.read_text()))


@pytest.mark.parametrize(
    ("command", "variables", "deadline", "said"),
    [
        (("no-such-program",), (), 5.0, "got no program 'no-such-program', expected one on PATH"),
        (("true",), (), 5.0, "it ended while starting"),
        (("sleep", "60"), (), 0.3, r"got no answer within 0\.3 s, waiting for starting"),
        (COMMAND, ("HOME", "NOT_SET_ANYWHERE"), 5.0, "got no value of NOT_SET_ANYWHERE, expected these variables set"),
    ],
)
def test_a_server_that_does_not_start_says_so(command, variables, deadline, said):
    server = mcp_tools.ToolServer(command, variables, deadline, 300)
    with pytest.raises(RuntimeError, match=said):
        server.describe()


TWICE = """
import json, sys
tool = {"name": "same", "inputSchema": {"type": "object"}}
info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
results = {"initialize": info, "tools/list": {"tools": [tool, tool]}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = {"error": {"code": -32601, "message": "unknown"}}
        if asked["method"] in results:
            result = {"result": results[asked["method"]]}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **result}), flush=True)
"""


def test_a_name_twice_is_refused(tmp_path):
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    server = mcp_tools.ToolServer((sys.executable, str(program)), (), 30.0, 300)
    with pytest.raises(ValueError, match="got two tools of the name 'same', expected each name once"):
        server.describe()


def test_making_it_starts_nothing_and_pickling_it_keeps_the_knobs():
    environment = mcp_tools.environment(**KNOBS | {"command": ("no-such-program",)})
    answer = Message("assistant", r"\boxed{5}")
    opened = pickle.loads(pickle.dumps(mcp_tools.environment(**KNOBS | {"instructions": ""})))
    assert play_script(opened, PROBLEM, [answer], 0)[1][0].reward == 1.0
    assert environment.step({"prompt": "?", "answer": "5", "turns": 0}, answer, 0).reward == 1.0


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"command": "server"}, "command: got 'server', expected a program and its arguments"),
        ({"deadline": 0.0}, r"deadline: got 0\.0, expected more than 0"),
    ],
)
def test_bad_knobs_are_refused(knobs, said):
    with pytest.raises(ValueError, match=said):
        mcp_tools.environment(**KNOBS | knobs)
