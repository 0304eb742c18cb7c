"""Sessions of an OpenEnv server: one of openenv-core, and servers that break its protocol."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_fn.core.environment import Message, play_script
from grpo_fn.core.problem import Problem
from grpo_fn.shell.environments import sessions
from grpo_fn.shell.environments.sessions import seed_only, show_field
from grpo_fn.shell.reward_workers.worker_pool import EnvironmentPool

sync_server = pytest.importorskip(
    "websockets.sync.server", reason="NOT TESTED without the websockets library: OpenEnv servers"
)

PROGRAM = Path(__file__).resolve().with_name("openenv_server_program.py")
PROBLEM = Problem(0, "", "", {})


def number_action(message):
    return {"number": int(message.content) if message.content.isdigit() else message.content}


def counting(url, **knobs):
    return sessions.openenv_environment(
        **{"url": url, "read_action": number_action, "show": partial(show_field, field="text"), "deadline": 20.0}
        | {"reset_arguments": seed_only, "opening": "Please {observation}.", "max_turns": 6, "max_sessions": 2}
        | knobs
    )


def says(text):
    return Message("assistant", text)


# -- a server of openenv-core


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if find_spec("openenv") is None:
        pytest.skip("NOT TESTED without openenv-core: a real OpenEnv server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "log"
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, str(PROGRAM), str(port)], stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_episode_on_a_real_server(server):
    start, steps = play_script(counting(server), PROBLEM, [says(text) for text in ("2", "two", "3")], 5)
    assert start.messages == (Message("user", "Please count to 9."),)
    assert [step.messages[0].content for step in steps] == [
        "at 2",
        "error: got no action of this environment: number Input should be a valid integer, unable to parse string as "
        "an integer",
        "at 5",
    ]
    *_, end = play_script(counting(server), PROBLEM, [says("5"), says("4")], 5)[1]
    assert (end.reward, end.done, end.messages) == (1.0, True, ())


@pytest.mark.slow
def test_workers_go_on_from_the_state_and_the_server_ends_what_is_closed(server):
    script, environment = [says("1"), says("2"), says("1")], counting(server, max_sessions=1)
    start, steps = play_script(environment, PROBLEM, script, 5)
    environment.start(PROBLEM, 6)  # closes the session before it
    with EnvironmentPool(environment, workers=2, deadline=60.0, memory_mb=2048) as pool:
        for _ in range(3):  # more sessions, one after the other, than the server has places
            state = pool.start(PROBLEM, 5).result().state
            assert state == start.state
            for message, step in zip(script, steps, strict=True):
                answer = pool.step(state, message, 0).result()
                assert (answer.messages, answer.reward, answer.done) == (step.messages, step.reward, step.done)
                state = answer.state


@pytest.mark.slow
def test_an_error_of_a_real_server_is_a_failure(server):
    environment = counting(server)
    state = environment.start(PROBLEM, 5).state
    with pytest.raises(RuntimeError, match=r"it refused step: .*out of order.*EXECUTION_ERROR"):
        environment.step(state, says("13"), 0)


# -- servers that break the protocol


OBSERVATION = {"type": "observation", "data": {"observation": {"text": "look"}, "reward": None, "done": False}}


@contextmanager
def answering(*answers):
    """A server that gives these answers, one a message; None: it is silent; an exception: it hangs up."""
    over = threading.Event()

    def talk(connection):
        for answer in answers:
            connection.recv()
            if answer is None:
                over.wait(60.0)
            if answer in (None, ConnectionError):
                return
            connection.send(answer if isinstance(answer, str) else json.dumps(answer))

    with sync_server.serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


UNBOUNDED = {"type": "observation", "data": {"observation": {}, "reward": float("inf"), "done": False}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"got no answer to step in 0\.3 s"),
        (ConnectionError, "it hung up at step"),
        ("[]", r"got \[\] to step, expected an observation"),
        (UNBOUNDED, "expected an obs"),
        ({"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}, "it refused step: .*gone"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(answer, said):
    with answering(OBSERVATION, answer) as url:
        environment = counting(url, deadline=0.3)
        start = environment.start(PROBLEM, 0)
        assert start.messages == (Message("user", "Please look."),)
        with pytest.raises(RuntimeError, match=said):
            environment.step(start.state, says("1"), 0)


def test_no_server_is_a_failure():
    with pytest.raises(RuntimeError, match="got no connection within 5 s"):
        counting("http://127.0.0.1:9", deadline=5.0).start(PROBLEM, 0)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"url": "localhost:8000"}, "url: got 'localhost:8000', expected an address like http://host:8000"),
        ({"deadline": 0.0}, r"deadline: got 0\.0, expected more than 0"),
    ],
)
def test_bad_knobs_are_refused(knobs, said):
    with pytest.raises(ValueError, match=said):
        counting(**{"url": "http://host:8000", **knobs})
