"""Environments in worker processes that can be killed: a tool that hangs or dies costs the row a turn, not the run."""

import pickle
from collections import Counter
from concurrent.futures import Future
from threading import Lock
from typing import Any

from grpo_fn.core.environment import Environment, Message, PlainData
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.reward_workers.worker_pool import (
    MALFORMED,
    Outcome,
    WorkerPool,
    check_more_than_0,
    pickled_function,
)

METRICS = ("time/environments", "time/environment_wait", "episode/environment_failures")


class EnvironmentPool(WorkerPool):
    """Worker processes that call an environment. `figures` says what went wrong and the seconds that calls took.

    Args:
        environment: what is called; its functions are found by name in the workers.
        workers: processes.
        deadline: wall clock of a call, seconds.
        memory_mb: address space of each process, MB.

    Raises:
        ValueError: for a number that is not more than 0, and functions that workers cannot find by name.
    """

    VALUES = (str,)

    def __init__(self, environment: Environment, *, workers: int, deadline: float, memory_mb: int) -> None:
        check_more_than_0("environment pool", workers=workers, deadline=deadline, memory_mb=memory_mb)
        super().__init__(workers=workers, deadline=deadline, memory_mb=memory_mb)
        self.payload = pickled_function(EnvironmentCall(environment))
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def start(self, problem: Problem, key: int) -> Future[Answer]:
        """The beginning of an episode."""
        return self._ask("start", problem, key)

    def step(self, state: PlainData, message: Message, key: int) -> Future[Answer]:
        """The answer to a message."""
        return self._ask("step", state, message, key)

    def count(self, name: str, amount: float) -> None:
        """Add to what `figures` says."""
        with self._lock:
            self._counts[name] += amount

    def figures(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in METRICS}

    def result_of(self, outcomes: list[Outcome]) -> Answer:
        """The answer in what a worker sent; one that says why, where there is none."""
        (outcome,) = outcomes
        try:
            answer = Answer(failure=outcome.reason) if outcome.cause else decode_answer(outcome.value)
        except (ValueError, TypeError):
            answer = Answer(failure=MALFORMED)
        self.count("time/environments", outcome.seconds)
        self.count("episode/environment_failures", float(bool(answer.failure)))
        return answer

    def _ask(self, kind: str, *given: Any) -> Future[Answer]:
        (begun,) = self.submit_calls(self.payload, [pickle.dumps((kind, *given))], self.deadline)
        return begun.future
