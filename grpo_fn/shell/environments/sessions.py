"""Episodes whose state is hidden in an object (gymnasium) or on a server (OpenEnv): ours is its reset and the actions.

`step` goes on with a session that stands where the state says, if this process has one, and otherwise opens another and
takes the actions again. Where that gives another observation than before, the session does not depend on its actions
alone, which is a failure of the environment.

    read_action       the action in a message of the policy; a ValueError of it is what the policy reads
    reset_arguments   (problem, key) -> what the session is reset with: `sessions.seed_only`
    opening           what the policy reads first; `{prompt}` and `{observation}` in it are replaced
    max_turns         turns after which an episode ends, those without an action included
    problem           of the episode
    key               of the environment
    message           of the policy
    observation       what a session gave
    returns           the environment, which is not pure; the action, the arguments or the text
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import check_plain, state_digest


class Observed(NamedTuple):
    """A session's answer to a reset or an action."""

    text: str
    reward: float | None  # None: it cannot be scored
    done: bool


class ActionRefused(Exception):
    """The session did not take the action, and is as it was; says why, to the policy."""


@runtime_checkable
class Session(Protocol):
    """An episode under way."""

    def reset(self, arguments: Mapping[str, PlainData]) -> Observed:
        """The beginning. Called once, first."""

    def step(self, action: PlainData) -> Observed:
        """The answer to an action. Raises ActionRefused for one that is none."""

    def close(self) -> None: ...


ReadAction = Callable[[Message], PlainData]  # raises ValueError, which the policy reads, where there is none
ResetArguments = Callable[[Problem, int], Mapping[str, PlainData]]  # (problem, key) -> arguments of reset by name


class Sessions:
    """Sessions of one kind, those at rest each with the state that it stands at. What is pickled are the knobs."""

    def __init__(self, make: Callable[[], Session], max_sessions: int) -> None:
        self._make, self._max_sessions = make, max_sessions
        self._resting: list[tuple[str, Session]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make, self._max_sessions)

    def begin(self, arguments: Mapping[str, PlainData]) -> tuple[Session, Observed]:
        """A session at its beginning, and what it shows."""
        while len(self._resting) >= self._max_sessions:
            self._resting.pop(0)[1].close()
        session = self._make()
        try:
            return session, session.reset(arguments)
        except BaseException:
            session.close()
            raise

    def at(self, state: Mapping[str, Any]) -> Session:
        """A session that stands at the state. Raises RuntimeError where its actions do not lead there."""
        expected = session_place(state)
        for place, (stands, session) in enumerate(self._resting):
            if stands == expected:
                del self._resting[place]
                return session
        session, seen = self.begin(state["reset"])
        try:
            for action in state["actions"]:
                seen = session.step(action)
        except BaseException:
            session.close()
            raise
        if state_digest([*seen]) != state["observed"]:
            session.close()
            raise RuntimeError(
                f"got another answer from the same {len(state['actions'])} actions: {seen.text!r:.200}; expected a "
                "session that depends on its reset and its actions alone, or one worker and as many sessions as rows"
            )
        return session

    def rest(self, session: Session, state: Mapping[str, Any]) -> None:
        self._resting.append((session_place(state), session))

    def close(self) -> None:
        while self._resting:
            self._resting.pop()[1].close()


def session_environment(
    make: Callable[[], Session],
    *,
    read_action: ReadAction,
    reset_arguments: ResetArguments,
    opening: str,
    max_turns: int,
    max_sessions: int,
) -> Environment:
    """The environment of such sessions; not pure."""
    for name, value in (("max_turns", max_turns), ("max_sessions", max_sessions)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    sessions = Sessions(make, max_sessions)
    return Environment(
        start=partial(start_session, sessions=sessions, reset_arguments=reset_arguments, opening=opening),
        step=partial(step_session, sessions=sessions, read_action=read_action, max_turns=max_turns),
        pure=False,
    )


def start_session(
    problem: Problem, key: int, *, sessions: Sessions, reset_arguments: ResetArguments, opening: str
) -> Start:
    """A session's observation after a reset."""
    arguments = check_plain(reset_arguments(problem, key), "reset_arguments")
    session, seen = sessions.begin(arguments)
    state = {"reset": arguments, "actions": [], "turns": 0, "observed": state_digest([*seen])}
    if seen.done:
        session.close()
        raise RuntimeError(
            f"got an episode that is over when it begins, with {seen.text!r:.200}, expected one to act in"
        )
    sessions.rest(session, state)
    said = opening.replace("{prompt}", str(problem.prompt)).replace("{observation}", seen.text)
    return Start(state, (Message("user", said),))


def step_session(
    state: Mapping[str, Any], message: Message, key: int, *, sessions: Sessions, read_action: ReadAction, max_turns: int
) -> Step:
    """A session's observation after the message's action; an error text and reward 0 if there is no action."""
    turns = state["turns"] + 1
    try:
        action = check_plain(read_action(message), "action")
    except ValueError as error:
        return _refused({**state, "turns": turns}, str(error), turns >= max_turns)
    session = sessions.at(state)
    try:
        seen = session.step(action)
    except ActionRefused as error:
        after = {**state, "turns": turns}
        if turns < max_turns:
            sessions.rest(session, after)
        else:
            session.close()
        return _refused(after, str(error), turns >= max_turns)
    except BaseException:
        session.close()
        raise
    done = seen.done or turns >= max_turns
    actions = [*state["actions"], action]
    after = {"reset": state["reset"], "actions": actions, "turns": turns, "observed": state_digest([*seen])}
    if done:
        session.close()
    else:
        sessions.rest(session, after)
    return Step(after, () if done else (Message("user", seen.text),), seen.reward, done)


def seed_only(problem: Problem, key: int) -> dict[str, PlainData]:
    """`reset(seed=...)`: a seed below 2^31 of the problem and the run's seed, the same for all samples of a problem."""
    return {"seed": key % 2**31}


def named_action(message: Message, *, actions: Mapping[str, PlainData]) -> PlainData:
    """The action whose name is the first that stands in the message, as a word, upper or lower case.

    Args:
        actions: the actions by name.

    Raises:
        ValueError: where no name stands there.
    """
    by_name = {name.lower(): action for name, action in actions.items()}
    for word in re.findall(r"[\w-]+", message.content.lower()):
        if word in by_name:
            return by_name[word]
    raise ValueError(f"got no action, expected one of {', '.join(actions)}")


def text_action(message: Message, *, field: str) -> PlainData:
    """An action with one field, the text of the message.

    Args:
        field: its name.
    """
    return {field: message.content}


def show_observation(observation: Any) -> str:
    """An observation as JSON where it is plain data, and otherwise as Python prints it."""
    if isinstance(observation, str):
        return observation
    try:
        return json.dumps(check_plain(observation, "observation"), ensure_ascii=False)
    except ValueError:
        return str(observation)


def show_field(observation: Mapping[str, Any], *, field: str) -> str:
    """One field of an observation.

    Args:
        field: its name.

    Raises:
        ValueError: where there is no such field.
    """
    if field not in observation:
        raise ValueError(f"observation: got the fields {', '.join(observation)}, expected {field}")
    return show_observation(observation[field])


def session_place(state: Mapping[str, Any]) -> str:
    """Hex digits of where a session stands; turns without an action do not move it."""
    return state_digest([state["reset"], state["actions"], state["observed"]])


def _refused(after: Mapping[str, Any], said: str, done: bool) -> Step:
    return Step(after, () if done else (Message("user", f"error: {said}"),), 0.0, done)


# -- Episodes of an object shaped like a gymnasium environment: `reset(seed=) -> (observation, info)`,
# `step(action) -> (observation, reward, terminated, truncated, info)` and `close()`.


def gymnasium_environment(
    *,
    make: Callable[[], Any],
    read_action: ReadAction,
    show: Callable[[Any], str],
    reset_arguments: ResetArguments,
    opening: str,
    max_turns: int,
    max_sessions: int,
) -> Environment:
    """The environment of a gymnasium class; of a deterministic one it is a function of its arguments.

    Args:
        make: makes an object: `make_registered` with a name, or a class.
        show: an observation as text.
        max_sessions: objects that a worker keeps; an episode whose object is gone takes its actions again on another.

    Raises:
        ValueError: for numbers below 1.
    """
    return session_environment(
        partial(GymnasiumSession, make, show),
        read_action=read_action,
        reset_arguments=reset_arguments,
        opening=opening,
        max_turns=max_turns,
        max_sessions=max_sessions,
    )


def make_registered(*, name: str) -> Any:
    """An environment of gymnasium's registry (extra `gymnasium`).

    Args:
        name: its id, "FrozenLake-v1".

    Raises:
        ValueError: where the package is missing, or does not know the name.
    """
    try:
        import gymnasium
    except ImportError as error:
        said = f"got no package gymnasium ({error}), expected pip install 'grpo-fn[gymnasium]'"
        raise ValueError(f"sessions.make_registered: {said}") from error
    try:
        return gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ValueError(f"sessions.make_registered.name: got {name!r}: {error}") from error


class GymnasiumSession:
    """An object as a session: whether it is terminated or truncated, the episode is over."""

    def __init__(self, make: Callable[[], Any], show: Callable[[Any], str]) -> None:
        self._object, self._show = make(), show

    def reset(self, arguments: Mapping[str, PlainData]) -> Observed:
        found = self._object.reset(**arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"reset: got {found!r:.200}, expected (observation, info)")
        return Observed(self._show(found[0]), 0.0, False)

    def step(self, action: PlainData) -> Observed:
        found = self._object.step(action)
        if not isinstance(found, tuple) or len(found) != 5:
            raise ValueError(f"step: got {found!r:.200}, expected (observation, reward, terminated, truncated, info)")
        reward = float(found[1])
        if not math.isfinite(reward):
            raise ValueError(f"step: got the reward {reward}, expected a finite number")
        return Observed(self._show(found[0]), reward, bool(found[2]) or bool(found[3]))

    def close(self) -> None:
        self._object.close()


# -- Episodes on an OpenEnv server: its sessions over WebSocket, as openenv-core 0.3 serves them.
#
# One connection to `/ws` is one session. Sent are `{"type": "reset", "data": arguments}` and `{"type": "step", "data":
# action}`; answered is `{"type": "observation", "data": {"observation", "reward", "done"}}` or `{"type": "error",
# "data": {"code", "message"}}`. The routes `/reset` and `/step` over plain HTTP make an environment for each request:
# they hold no episode.


SHOWN = 500  # characters of a server's complaint
LONGEST_MESSAGE = 2**24  # bytes
SECURE = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def openenv_environment(
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
    """The environment of an OpenEnv server (extra `openenv`). A reward that the server leaves out is 0.

    Args:
        url: of the server, `http://host:8000`.
        show: an observation, fields by name, as text.
        max_sessions: sessions that a worker keeps open; the server has to allow as many for each worker.
        deadline: seconds for connecting and for each answer.

    Raises:
        ValueError: where the package websockets is missing, for an address that is none, and for numbers that are too
            small.
    """
    if find_spec("websockets") is None:
        raise ValueError(
            "sessions.openenv_environment: got no package websockets, expected pip install 'grpo-fn[openenv]'"
        )
    parts = urlsplit(url)
    if parts.scheme not in SECURE or not parts.hostname:
        raise ValueError(f"sessions.openenv_environment.url: got {url!r}, expected an address like http://host:8000")
    if not deadline > 0:
        raise ValueError(f"sessions.openenv_environment.deadline: got {deadline}, expected more than 0")
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
        return self._ask("reset", arguments)

    def step(self, action: PlainData) -> Observed:
        """The next observation. Raises ActionRefused for what the server says is no action of its."""
        if not isinstance(action, Mapping):
            raise ValueError(f"action: got {type(action).__name__}, expected its fields by name")
        return self._ask("step", action)

    def close(self) -> None:
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
        raise RuntimeError(f"OpenEnv server {self._url}: got {str(answer)[:SHOWN]} to {kind}, expected an observation")


def _reasons(refusal: Mapping[str, Any]) -> str:
    """The error of an action's fields."""
    errors = refusal.get("errors") or [{"msg": refusal.get("message", "")}]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))} {one.get('msg', '')}".strip() for one in errors)
