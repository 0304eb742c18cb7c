"""Environments for tests, and callers that answer in this process, in any order that a test likes."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from grpo_fn.core.environment import Environment, Message, Start, Step
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.episodes.chat_format import text
from grpo_fn.shell.episodes.episode_rows import Environments, as_observation
from grpo_fn.shell.episodes.tape import Tape
from grpo_fn.shell.episodes.tool_calls import no_calls


def start(problem: Problem, key: int) -> Start:
    return Start({"left": 3, "seen": []}, (Message("user", problem.prompt),))


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
    """As `count_digits`, with a file as the tool that it cannot do without."""
    return count_digits(state, message, key + len(Path(tool).read_text()))


def broken(state: dict, message: Message, key: int) -> Step:
    raise RuntimeError("the tool is out of order")


def hangs(state: dict, message: Message, key: int) -> Step:
    threading.Event().wait()


def nonsense(state: dict, message: Message, key: int) -> Step:
    return Step({"set": {1, 2}}, (), 0.0, True)


TALK = Environment(start=start, step=step, pure=True)


class Here:
    """Calls an environment in this process. `delays` orders the answers: the call with the least comes first."""

    def __init__(self, environment: Environment = TALK, delays: Sequence[float] = ()) -> None:
        self.call, self.delays, self.calls = EnvironmentCall(environment), list(delays), []

    def start(self, problem: Problem, key: int) -> Future[Answer]:
        return self.ask("start", problem, key)

    def step(self, state: object, message: Message, key: int) -> Future[Answer]:
        return self.ask("step", state, message, key)

    def ask(self, *call: object) -> Future[Answer]:
        self.calls.append(call)
        future: Future[Answer] = Future()
        try:
            answer = decode_answer(self.call(*call))
        except Exception as error:
            answer = Answer(failure=f"{type(error).__name__}: {error}")
        if self.delays:
            threading.Timer(self.delays[len(self.calls) % len(self.delays)], future.set_result, [answer]).start()
        else:
            future.set_result(answer)
        return future

    def count(self, name: str, amount: float) -> None: ...

    def figures(self) -> dict[str, float]:
        return {}


def environments(tokenizer: object, caller: Here | None = None, **knobs: object) -> Environments:
    chosen = {
        "name": "talk",
        "pure": True,
        "caller": caller or Here(),
        "chat": text(tokenizer, before="\n", after="\n", read_calls=no_calls),
        "max_turns": 4,
        "max_turn_tokens": 6,
        "fails": as_observation,
        "answer_steps": 2,
        "tape": Tape(),
    }
    return Environments(**{**chosen, **knobs})
