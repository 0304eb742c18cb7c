"""Guess the number: every guess is answered with higher or lower."""

import re
from collections.abc import Mapping
from functools import partial

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Problem

_NUMBER = re.compile(r"-?[0-9]+")


def environment(*, max_guesses: int, cost: float) -> Environment:
    """The environment of `secret_number.task`.

    Args:
        max_guesses: turns after which the episode ends.
        cost: what a guess that is not the number is worth, with a minus sign.

    Returns:
        The environment.

    Raises:
        ValueError: for fewer than one guess or a cost below 0.
    """
    if max_guesses < 1 or not cost >= 0:
        raise ValueError(f"got max_guesses {max_guesses} and cost {cost}, wanted at least 1 and at least 0")
    return Environment(start=start, step=partial(step, max_guesses=max_guesses, cost=cost), pure=True)


def start(problem: Problem, key: int) -> Start:
    """The question, and what is known of the number.

    Args:
        problem: its answer is the number, `meta` has the `low` and `high` that it lies between.
        key: not read.

    Returns:
        The state: the number, the range that it is known to lie in, and the guesses taken; the messages.
    """
    state = {"number": int(problem.answer), "low": problem.meta["low"], "high": problem.meta["high"], "guesses": 0}
    return Start(state, (Message("user", problem.prompt),))


def step(state: Mapping[str, PlainData], message: Message, key: int, *, max_guesses: int, cost: float) -> Step:
    """Higher, lower, or the end; the guess is the last whole number in the message.

    The range in the state shrinks with what the answers say, so that ways to the same knowledge in as many guesses are
    one state.

    Args:
        state: as `start` or the last step returned it.
        message: of the policy.
        key: not read.
        max_guesses: turns after which the episode ends.
        cost: what a guess that is not the number is worth, with a minus sign.

    Returns:
        The step; its reward is 1 for the number.
    """
    guesses = state["guesses"] + 1
    after = {**state, "guesses": guesses}
    found = _NUMBER.findall(message.content)
    # No number of a task is longer than this; int() of a megabyte of digits raises.
    guess = int(found[-1]) if found and len(found[-1]) < 19 else None
    if guess == state["number"]:
        return Step(after, (), 1.0, True)
    if guesses >= max_guesses:
        return Step(after, (), -cost, True)
    if guess is None:
        answer = f"got no number, wanted one from {state['low']} to {state['high']}"
    elif guess < state["number"]:
        answer, after["low"] = "higher", max(state["low"], guess + 1)
    else:
        answer, after["high"] = "lower", min(state["high"], guess - 1)
    return Step(after, (Message("user", answer),), -cost, False)
