"""What samplers need of an environment, answering in this process, in any order that a test likes."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from environment_fakes import TALK, THREE_TURNS
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Environment, Message
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.episodes.chat_format import TextFormat, no_calls, text
from grpo_fn.shell.episodes.episode_rows import Environments, Tape, as_observation


class Digits(TextFormat):
    """Turns end with a digit 1, which a model that has seen numbers writes soon."""

    @property
    def end(self) -> int:
        return self.tokenizer("1", add_special_tokens=False)["input_ids"][-1]


def ends_with_one(tokenizer: PreTrainedTokenizerBase) -> Digits:
    return Digits(tokenizer, no_calls)


class Late:
    """Episodes of three turns, called in this process; first turns of problems `slow` wait for `release`."""

    def __init__(self, slow: Sequence[int]) -> None:
        self.here, self.slow, self.held = Here(THREE_TURNS), set(slow), []
        self.start, self.figures, self.waits = self.here.start, self.here.figures, {}

    def step(self, state: dict, message: Message, key: int) -> Future[Answer]:
        answered = self.here.step(state, message, key)
        if state["uid"] not in self.slow or state["left"] < 3:
            return answered
        self.held.append((Future(), answered.result()))
        return self.held[-1][0]

    def release(self) -> None:
        """Answer what was asked so far."""
        while self.held:
            future, answer = self.held.pop()
            future.set_result(answer)

    def count(self, name: str, amount: float) -> None:
        self.waits[name] = self.waits.get(name, 0.0) + amount


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
        "chat": text(tokenizer, read_calls=no_calls),
        "max_turns": 4,
        "max_turn_tokens": 6,
        "fails": as_observation,
        "answer_steps": 2,
        "tape": Tape(),
    }
    return Environments(**{**chosen, **knobs})
