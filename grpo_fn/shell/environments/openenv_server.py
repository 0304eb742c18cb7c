"""Episodes on an OpenEnv server: its sessions over WebSocket, as openenv-core 0.3 serves them.

One connection to `/ws` is one session. Sent are `{"type": "reset", "data": arguments}` and `{"type": "step", "data":
action}`; answered is `{"type": "observation", "data": {"observation", "reward", "done"}}` or `{"type": "error", "data":
{"code", "message"}}`. The routes `/reset` and `/step` over plain HTTP make an environment for each request: they hold
no episode.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from grpo_fn.core.environment import Environment, PlainData
from grpo_fn.shell.environments.sessions import (
    ActionRefused,
    Observed,
    ReadAction,
    ResetArguments,
    session_environment,
)

SHOWN = 500  # characters of a server's complaint
LONGEST_MESSAGE = 2**24  # bytes
SECURE = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def environment(
    *,
    url: str,
    read_action: ReadAction,
    show: Callable[[Mapping[str, Any]], str],
    reset_arguments: ResetArguments,
    opening: str,
    max_turns: int,
    max_sessions: int,
    deadline: float,
) -> Environment:
    """The environment of an OpenEnv server (extra `openenv`).

    Args:
        url: of the server, `http://host:8000`.
        read_action: the action in a message of the policy, fields by name; a ValueError of it is what the policy reads.
        show: an observation, fields by name, as text.
        reset_arguments: (problem, key) -> what the server resets with: `sessions.seed_only`.
        opening: what the policy reads first; `{prompt}` and `{observation}` in it are replaced.
        max_turns: turns after which an episode ends, those without an action included.
        max_sessions: sessions that a worker keeps open; the server has to allow as many for each worker.
        deadline: seconds for connecting and for each answer.

    Returns:
        The environment, which is not pure. A reward that the server leaves out is 0.

    Raises:
        ValueError: where the package websockets is missing, for an address that is none, and for numbers that are too
            small.
    """
    if find_spec("websockets") is None:
        raise ValueError("openenv_server.environment: got no package websockets, wanted pip install 'grpo-fn[openenv]'")
    parts = urlsplit(url)
    if parts.scheme not in SECURE or not parts.hostname:
        raise ValueError(f"openenv_server.environment.url: got {url!r}, wanted an address like http://host:8000")
    if not deadline > 0:
        raise ValueError(f"openenv_server.environment.deadline: got {deadline}, wanted more than 0")
    socket = f"{SECURE[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"
    return session_environment(
        partial(OpenEnvSession, socket, show, deadline),
        read_action=read_action,
        reset_arguments=reset_arguments,
        opening=opening,
        max_turns=max_turns,
        max_sessions=max_sessions,
    )


class OpenEnvSession:
    """A session on the server. What the server does not do, or not in time, raises RuntimeError."""

    def __init__(self, url: str, show: Callable[[Mapping[str, Any]], str], deadline: float) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._url, self._show, self._deadline, self._opened = url, show, deadline, ExitStack()
        try:
            # As in the other clients: proxies of the environment are for the world outside.
            self._socket = self._opened.enter_context(
                connect(url, open_timeout=deadline, close_timeout=1.0, max_size=LONGEST_MESSAGE, proxy=None)
            )
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            raise RuntimeError(f"OpenEnv server {url}: got no connection within {deadline:g} s: {error}") from error

    def reset(self, arguments: Mapping[str, PlainData]) -> Observed:
        """The first observation."""
        return self._ask("reset", arguments)

    def step(self, action: PlainData) -> Observed:
        """The next observation. Raises ActionRefused for what the server says is no action of its."""
        if not isinstance(action, Mapping):
            raise ValueError(f"action: got {type(action).__name__}, wanted its fields by name")
        return self._ask("step", action)

    def close(self) -> None:
        """End the session."""
        self._opened.close()

    def _ask(self, kind: str, data: Mapping[str, PlainData]) -> Observed:
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self._deadline))
        except TimeoutError as error:
            raise RuntimeError(
                f"OpenEnv server {self._url}: got no answer to {kind} in {self._deadline:g} s"
            ) from error
        except (OSError, WebSocketException) as error:
            raise RuntimeError(f"OpenEnv server {self._url}: it hung up at {kind}: {error}") from error
        match answer:
            case {"type": "observation", "data": {"observation": dict() as shown, "done": bool() as done, **more}}:
                reward = more.get("reward")
                reward = 0.0 if reward is None else float(reward)
                if math.isfinite(reward):
                    return Observed(self._show(shown), reward, done)
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", **more}} if kind == "step":
                raise ActionRefused(f"got no action of this environment: {_reasons(more)}"[:SHOWN])
            case {"type": "error", "data": data}:
                raise RuntimeError(f"OpenEnv server {self._url}: it refused {kind}: {str(data)[:SHOWN]}")
        raise RuntimeError(f"OpenEnv server {self._url}: got {str(answer)[:SHOWN]} to {kind}, wanted an observation")


def _reasons(refusal: Mapping[str, Any]) -> str:
    """What is wrong with the fields of an action."""
    errors = refusal.get("errors") or [{"msg": refusal.get("message", "")}]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))} {one.get('msg', '')}".strip() for one in errors)
