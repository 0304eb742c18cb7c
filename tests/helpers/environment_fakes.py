"""Environments for tests. No torch in here: worker processes import this module."""

import os
import random
import signal
import threading
from pathlib import Path

from grpo_fn.core.environment import Environment, Message, Start, Step
from grpo_fn.core.problem import Problem


def start(problem: Problem, key: int) -> Start:
    return Start({"left": 3, "seen": []}, (Message("user", problem.prompt),))


def long_where_asked(problem: Problem, key: int) -> Start:
    """A start with 200 more digits to read for problems whose answer says so; nothing in their prompts shows it."""
    return start(problem._replace(prompt=problem.prompt + "7" * 200 * (problem.answer == "long")), key)


def step(state: dict, message: Message, key: int) -> Step:
    """Says how long the message was and a number of its key; over when it has been asked often enough, or by chance."""
    number = random.Random(key).randrange(100)
    after = {"left": state["left"] - 1, "seen": [*state["seen"], len(message.content)]}
    done = after["left"] == 0 or number < 15
    said = "a7 " * (number % 4) + str(len(message.content))
    return Step(after, () if done else (Message("user", said),), number / 100, done)


def count_digits(state: dict, message: Message, key: int) -> Step:
    """Rewards digits, and shows how many there were: something to learn from for a tiny model."""
    digits = sum(c.isdigit() for c in message.content)
    done = state["left"] == 1
    after = {"left": state["left"] - 1, "seen": [*state["seen"], digits]}
    return Step(after, () if done else (Message("user", str(digits)),), float(digits), done)


def with_tool(state: dict, message: Message, key: int, *, tool: str) -> Step:
    """As `count_digits`, with a file as the tool: what it says is observed as well."""
    found, says = count_digits(state, message, key), Path(tool).read_text()
    return found._replace(messages=tuple(m._replace(content=m.content + says) for m in found.messages))


def kills_the_run_once(state: dict, message: Message, key: int, *, folder: str, after: int) -> Step:
    """As `count_digits`; the process that asks gets SIGKILL in the midst of the first call after so many."""
    with open(Path(folder) / "calls", "ab", buffering=0) as calls:
        calls.write(b".")
        if os.fstat(calls.fileno()).st_size > after and not (Path(folder) / "killed").exists():
            (Path(folder) / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            threading.Event().wait()
    return count_digits(state, message, key)


def broken(state: dict, message: Message, key: int) -> Step:
    raise RuntimeError("the tool is out of order")


def hangs(state: dict, message: Message, key: int) -> Step:
    threading.Event().wait()


def dies(state: dict, message: Message, key: int) -> Step:
    os._exit(3)


def dies_once(state: dict, message: Message, key: int, *, mark: str) -> Step:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(state, message, key)


def state_of_a_set(state: dict, message: Message, key: int) -> Step:
    return Step({"set": {1, 2}}, (), 0.0, True)


def start_named(problem: Problem, key: int) -> Start:
    return Start({"left": 3, "uid": problem.uid}, (Message("user", problem.prompt),))


def step_named(state: dict, message: Message, key: int) -> Step:
    """Three turns, whatever is said; the state says of which problem."""
    left = state["left"] - 1
    return Step({**state, "left": left}, () if not left else (Message("user", "7"),), 0.0, not left)


THREE_TURNS = Environment(start=start_named, step=step_named, pure=True)
TALK = Environment(start=start, step=step, pure=True)
