"""Episodes of an object shaped like a gymnasium environment: `reset(seed=)`, `step(action)` and `close()`."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

from grpo_fn.core.environment import Environment, PlainData
from grpo_fn.shell.environments.sessions import Observed, ReadAction, ResetArguments, session_environment


@runtime_checkable
class GymnasiumLike(Protocol):
    """What is asked of the object; `gymnasium.Env` has it."""

    def reset(self, **arguments: Any) -> tuple[Any, Mapping[str, Any]]:
        """(observation, info)."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        """(observation, reward, terminated, truncated, info)."""

    def close(self) -> None:
        """The end."""


def environment(
    *,
    make: Callable[[], GymnasiumLike],
    read_action: ReadAction,
    show: Callable[[Any], str],
    reset_arguments: ResetArguments,
    opening: str,
    max_turns: int,
    max_sessions: int,
) -> Environment:
    """The environment of a gymnasium class.

    Args:
        make: makes an object: `make_registered` with a name, or a class.
        read_action: the action in a message of the policy, plain data; a ValueError of it is what the policy reads.
        show: an observation as text.
        reset_arguments: (problem, key) -> what `reset` is called with: `sessions.seed_only`.
        opening: what the policy reads first; `{prompt}` and `{observation}` in it are replaced.
        max_turns: turns after which an episode ends, those without an action included.
        max_sessions: objects that a worker keeps; an episode whose object is gone takes its actions again on another.

    Returns:
        The environment; not pure, though with a deterministic class it is a function of its arguments.

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


def make_registered(*, name: str) -> GymnasiumLike:
    """An environment of gymnasium's registry (extra `gymnasium`).

    Args:
        name: its id, "FrozenLake-v1".

    Returns:
        The object.

    Raises:
        ValueError: where the package is missing, or does not know the name.
    """
    try:
        import gymnasium
    except ImportError as error:
        said = f"got no package gymnasium ({error}), wanted pip install 'grpo-fn[gymnasium]'"
        raise ValueError(f"gymnasium_class.make_registered: {said}") from error
    try:
        return gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium_class.make_registered.name: got {name!r}: {error}") from error


class GymnasiumSession:
    """An object as a session: whether it is terminated or truncated, the episode is over."""

    def __init__(self, make: Callable[[], GymnasiumLike], show: Callable[[Any], str]) -> None:
        self._object, self._show = make(), show

    def reset(self, arguments: Mapping[str, PlainData]) -> Observed:
        """The first observation. Raises ValueError where `reset` returns something else."""
        found = self._object.reset(**arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"reset: got {found!r:.200}, wanted (observation, info)")
        return Observed(self._show(found[0]), 0.0, False)

    def step(self, action: PlainData) -> Observed:
        """The next observation. Raises ValueError where `step` returns something else."""
        found = self._object.step(action)
        if not isinstance(found, tuple) or len(found) != 5:
            raise ValueError(f"step: got {found!r:.200}, wanted (observation, reward, terminated, truncated, info)")
        reward = float(found[1])
        if not math.isfinite(reward):
            raise ValueError(f"step: got the reward {reward}, wanted a finite number")
        return Observed(self._show(found[0]), reward, bool(found[2]) or bool(found[3]))

    def close(self) -> None:
        """Close the object."""
        self._object.close()
