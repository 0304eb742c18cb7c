"""Environments, sound and unsound, that the test kit is tried on: found by name in another process."""

import secrets
from functools import partial

from grpo_fn.core.environment import Environment, Message, Start, Step

AGAIN = (Message("user", "again"),)
seen = []


def start(problem, key):
    return Start({"turns": 0, "words": []}, (Message("user", problem.prompt),))


def step(state, message, key, *, limit):
    """Counts the letters of every message."""
    after = {"turns": state["turns"] + 1, "words": [*state["words"], len(message.content)]}
    done = after["turns"] >= limit
    return Step(after, () if done else AGAIN, 0.5, done)


def with_step(function):
    return Environment(start=start, step=partial(function, limit=3), pure=True)


def draws_without_the_key(state, message, key, *, limit):
    return step(state, message, key, limit=limit)._replace(reward=float(secrets.randbits(40)))


def appends_to_the_state(state, message, key, *, limit):
    state["words"].append(len(message.content))
    return step(state, message, key, limit=limit)


def reads_a_number(state, message, key, *, limit):
    return step(state, message, key, limit=limit)._replace(reward=float(message.content))


def trusts_the_calls(state, message, key, *, limit):
    return step(state, message, key, limit=limit)._replace(
        reward=float(sum(len(call.arguments["expression"]) for call in message.calls))
    )


def never_ends(state, message, key, *, limit):
    return step(state, message, key, limit=10**9)


def keeps_a_set(state, message, key, *, limit):
    answer = step(state, message, key, limit=limit)
    return answer._replace(state={**answer.state, "seen": {message.content}})


def goes_by_identity(state, message, key, *, limit):
    """What the state was stored as is another list."""
    answer = step(state, message, key, limit=limit)
    again = answer.state["words"] if state["turns"] == 0 else state["words"]
    known = any(one is again for one in seen)
    seen[:] = [*seen[-50:], again]
    return answer._replace(state={**answer.state, "words": again}, reward=float(known))


def salted(state, message, key, *, limit):
    return step(state, message, key, limit=limit)._replace(reward=float(hash(message.content) % 97))


def joins_a_set(state, message, key, *, limit):
    said = " ".join({"north", "east", "south", "west", *message.content.split()})
    answer = step(state, message, key, limit=limit)
    return answer if answer.done else answer._replace(messages=(Message("user", said),))


def rewards_with_text(state, message, key, *, limit):
    return step(state, message, key, limit=limit)._replace(reward="1")


def speaks_for_the_policy(state, message, key, *, limit):
    answer = step(state, message, key, limit=limit)
    return answer._replace(messages=tuple(one._replace(role="assistant") for one in answer.messages))
