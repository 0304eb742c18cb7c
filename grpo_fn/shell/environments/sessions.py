"""Episodes whose state is hidden in an object or a server: ours is how it was reset and the actions so far.

`step` goes on with a session that stands where the state says, if this process has one, and otherwise opens another and
takes the actions again. Where that gives another observation than before, the session does not depend on its actions
alone, which is a failure of the environment.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import check_plain, state_digest


class Observed(NamedTuple):
    """What a session answered a reset or an action with."""

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

    def close(self) -> None:
        """The end."""


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
        wanted = session_place(state)
        for place, (stands, session) in enumerate(self._resting):
            if stands == wanted:
                del self._resting[place]
                return session
        session, seen = self.begin(state["reset"])
        try:
            for action in state["actions"]:
                seen = session.step(action)
        except BaseException:
            session.close()
            raise
        if digest_of(seen) != state["observed"]:
            session.close()
            raise RuntimeError(
                f"got another answer from the same {len(state['actions'])} actions: {seen.text!r:.200}; wanted a "
                "session that depends on its reset and its actions alone, or one worker and as many sessions as rows"
            )
        return session

    def rest(self, session: Session, state: Mapping[str, Any]) -> None:
        """Keep a session for the next action."""
        self._resting.append((session_place(state), session))

    def close(self) -> None:
        """Close all that are kept."""
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
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    sessions = Sessions(make, max_sessions)
    return Environment(
        start=partial(start_session, sessions=sessions, reset_arguments=reset_arguments, opening=opening),
        step=partial(step_session, sessions=sessions, read_action=read_action, max_turns=max_turns),
        pure=False,
    )


def start_session(
    problem: Problem, key: int, *, sessions: Sessions, reset_arguments: ResetArguments, opening: str
) -> Start:
    """What a session shows once it is reset."""
    arguments = check_plain(reset_arguments(problem, key), "reset_arguments")
    session, seen = sessions.begin(arguments)
    state = {"reset": arguments, "actions": [], "turns": 0, "observed": digest_of(seen)}
    if seen.done:
        session.close()
        raise RuntimeError(f"got an episode that is over when it begins, with {seen.text!r:.200}, wanted one to act in")
    sessions.rest(session, state)
    said = opening.replace("{prompt}", str(problem.prompt)).replace("{observation}", seen.text)
    return Start(state, (Message("user", said),))


def step_session(
    state: Mapping[str, Any], message: Message, key: int, *, sessions: Sessions, read_action: ReadAction, max_turns: int
) -> Step:
    """What a session shows after the action in the message; an error to read, and reward 0, where there is none."""
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
    after = {"reset": state["reset"], "actions": actions, "turns": turns, "observed": digest_of(seen)}
    if done:
        session.close()
    else:
        sessions.rest(session, after)
    return Step(after, () if done else (Message("user", seen.text),), seen.reward, done)


def seed_only(problem: Problem, key: int) -> dict[str, PlainData]:
    """`reset(seed=...)`: a seed below 2^31 of the problem and the run's seed, the same for all samples of a problem.

    Args:
        problem: not read.
        key: of the environment.

    Returns:
        The arguments.
    """
    return {"seed": key % 2**31}


def named_action(message: Message, *, actions: Mapping[str, PlainData]) -> PlainData:
    """The action whose name is the first that stands in the message, as a word, upper or lower case.

    Args:
        message: of the policy.
        actions: the actions by name.

    Returns:
        The action.

    Raises:
        ValueError: where no name stands there.
    """
    by_name = {name.lower(): action for name, action in actions.items()}
    for word in re.findall(r"[\w-]+", message.content.lower()):
        if word in by_name:
            return by_name[word]
    raise ValueError(f"got no action, wanted one of {', '.join(actions)}")


def text_action(message: Message, *, field: str) -> PlainData:
    """An action with one field, the text of the message.

    Args:
        message: of the policy.
        field: its name.

    Returns:
        `{field: text}`.
    """
    return {field: message.content}


def show_observation(observation: Any) -> str:
    """An observation as JSON where it is plain data, and otherwise as Python prints it.

    Args:
        observation: what a session gave.

    Returns:
        The text.
    """
    if isinstance(observation, str):
        return observation
    try:
        return json.dumps(check_plain(observation, "observation"), ensure_ascii=False)
    except ValueError:
        return str(observation)


def show_field(observation: Mapping[str, Any], *, field: str) -> str:
    """One field of an observation.

    Args:
        observation: what a session gave.
        field: its name.

    Returns:
        The text.

    Raises:
        ValueError: where there is no such field.
    """
    if field not in observation:
        raise ValueError(f"observation: got the fields {', '.join(observation)}, wanted {field}")
    return show_observation(observation[field])


def digest_of(seen: Observed) -> str:
    """Hex digits of what was observed."""
    return state_digest([seen.text, seen.reward, seen.done])


def session_place(state: Mapping[str, Any]) -> str:
    """Hex digits of where a session stands; turns without an action do not move it."""
    return state_digest([state["reset"], state["actions"], state["observed"]])


def _refused(after: Mapping[str, Any], said: str, done: bool) -> Step:
    return Step(after, () if done else (Message("user", f"error: {said}"),), 0.0, done)
