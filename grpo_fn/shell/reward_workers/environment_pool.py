"""Environments in worker processes that can be killed: a tool that hangs or dies costs the row a turn, not the run.

Every thread of the pool has one process. It sends one call, waits for the answer as long as the deadline allows, and
starts another process where this one was lost.
"""

import pickle
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_fn.core.environment import Environment, Message, PlainData
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.shell.episodes.answers import Answer, EnvironmentCall, decode_answer
from grpo_fn.shell.reward_workers.reward_pool import MALFORMED, PoolRow, WorkerHandle, WorkerLost, by_name, ready_among

NO_ROW = (Problem(-1, "", "", {}), Completion("", 0, False))


class EnvironmentPool:
    """Worker processes that call an environment, each call within a deadline, each process within a memory limit.

    A context manager; any thread may ask. `counts` has what went wrong by cause, and the seconds that calls took.

    Args:
        environment: what is called; its functions are found by name in the workers.
        workers: processes.
        deadline: wall clock of a call, seconds.
        memory_mb: address space of each process, MB.

    Raises:
        ValueError: for a number that is not more than 0, and functions that workers cannot find by name.
    """

    def __init__(self, environment: Environment, *, workers: int, deadline: float, memory_mb: int) -> None:
        for name, value in (("workers", workers), ("deadline", deadline), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"environment pool {name}: got {value}, wanted more than 0")
        self.payload = by_name(EnvironmentCall(environment))
        self.workers, self.deadline, self.memory_mb = workers, deadline, memory_mb
        self.counts: Counter[str] = Counter()
        self._lock, self._own = threading.Lock(), threading.local()
        self._handles: list[WorkerHandle] = []
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "EnvironmentPool":
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="environment")
        return self

    def __exit__(self, *_: object) -> None:
        threads, self._threads = self._threads, None
        threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.end(0.0)
        threads.shutdown(wait=True)

    def start(self, problem: Problem, key: int) -> Future[Answer]:
        """The beginning of an episode."""
        return self._submit("start", problem, key)

    def step(self, state: PlainData, message: Message, key: int) -> Future[Answer]:
        """The answer to a message."""
        return self._submit("step", state, message, key)

    def count(self, name: str, amount: float) -> None:
        """Add to what `figures` says."""
        with self._lock:
            self.counts[name] += amount

    def figures(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
        names = ("time/environments", "time/environment_wait", "episode/environment_failures")
        return {name: float(counts[name]) for name in names}

    def _submit(self, kind: str, *given: Any) -> Future[Answer]:
        if self._threads is None:
            raise RuntimeError("environment pool: got a call outside of `with pool:`, wanted it inside")
        return self._threads.submit(self._call, pickle.dumps((kind, *given)))

    def _call(self, row: bytes) -> Answer:
        """In a thread of the pool."""
        begun = time.monotonic()
        try:
            answer = self._ask(row)
        except WorkerLost as lost:
            self._drop()
            answer = Answer(failure=lost.reason)
        with self._lock:
            self.counts["time/environments"] += time.monotonic() - begun
            self.counts["episode/environment_failures"] += bool(answer.failure)
        return answer

    def _ask(self, row: bytes) -> Answer:
        """The answer. Raises WorkerLost where the process is of no use any more."""
        worker = self._handle()
        worker.assign(self.payload, [PoolRow(*NO_ROW, row)])
        while True:
            writing = [worker.stdin] if worker.outgoing else []
            ready = ready_among(reading=[worker.stdout], writing=writing, seconds=worker.due - time.monotonic())
            if worker.stdin.fileno() in ready:
                worker.flush()
            if worker.stdout.fileno() not in ready:
                if time.monotonic() >= worker.due:
                    raise WorkerLost("timeouts", f"late: no answer within {self.deadline:g} s")
                continue
            for reply in worker.replies():
                match reply:
                    case ["ready"]:
                        worker.begin(self.deadline)
                    case ["importing", str()]:
                        pass
                    case ["value", 0, str() as text, str(), float()]:
                        try:
                            return decode_answer(text)
                        except (ValueError, TypeError) as error:
                            raise WorkerLost("protocol_errors", MALFORMED) from error
                    case ["raised", 0, str() as reason, str(), float()]:
                        return Answer(failure=reason)
                    case ["failed", str() as trace]:
                        raise WorkerLost("worker_crashes", f"the environment could not be loaded: {trace[-300:]}")
                    case ["memory"]:
                        raise WorkerLost("worker_crashes", f"over the memory limit of {self.memory_mb} MB")
                    case _:
                        raise WorkerLost("protocol_errors", MALFORMED)

    def _handle(self) -> WorkerHandle:
        """This thread's process: the process dies with the thread that started it."""
        if getattr(self._own, "handle", None) is None:
            self._own.handle = WorkerHandle(self.memory_mb)
            with self._lock:
                self._handles.append(self._own.handle)
        return self._own.handle

    def _drop(self) -> None:
        handle, self._own.handle = self._own.handle, None
        with self._lock:
            known = handle in self._handles
            self._handles = [other for other in self._handles if other is not handle]
        if known:
            handle.end(0.0)
