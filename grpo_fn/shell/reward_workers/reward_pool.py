"""Rewards in worker processes that can be killed: nothing a model writes hangs or crashes the run.

The parent alone keeps the time. A worker answers row by row; one that is late, dies or sends a malformed reply is
killed and replaced, and only the row it was working on becomes None.
"""

import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.partials import unwrap_reward
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.rewards.judge import judge_of
from grpo_fn.rewards.wrappers import seconds_of
from grpo_fn.shell.reward_workers.judge_requests import JudgeRequests, JudgeUnreachable
from grpo_fn.shell.reward_workers.worker_handle import (
    MALFORMED,
    RETURNED_NONE,
    STARTUP_SECONDS,
    Descriptor,
    JudgeCost,
    Loss,
    Outcome,
    PoolRow,
    WorkerHandle,
    WorkerLost,
    ready_among,
)

STILLBORN = 3  # fresh workers lost one after the other before their first row: starting more would not help
CHUNK = 16  # rows sent at once, so that a worker does not wait for the parent after each
COMPLAINTS = 8  # kept until they are logged
POLL = 0.2  # seconds between two looks at whether rows are still wanted


class RewardError(RuntimeError):
    """A reward function raised, no worker could load it, or a judge does not answer any more."""


class ScoringInterrupted(RuntimeError):
    """Rows were given up, as they are not wanted any more."""


def ignore_loss(loss: Loss) -> None:
    """Does nothing: losses are reported later, if at all."""


def never() -> bool:
    """The default of `should_stop`."""
    return False


class RewardJob:
    """Rows that go through a pool. Their outcomes come out in the order in which the rows went in.

    Equal rows are scored once, as long as the first of them is still in here. `report` is called with every loss, and
    `charge` with what the answers of judges cost.
    """

    def __init__(
        self,
        fn: RewardFn,
        deadline: float,
        report: Callable[[Loss], None] = ignore_loss,
        charge: Callable[[JudgeCost], None] | None = None,
    ) -> None:
        self.fn, self.payload, self.report, self.charge = fn, by_name(fn), report, charge
        self.deadline = seconds_of(fn, deadline)
        self.waiting: deque[PoolRow] = deque()  # not yet with a worker
        self.to_judge: deque[PoolRow] = deque()  # not yet asked about
        self.left = time.monotonic()  # when the pool last looked after its workers
        self._line: deque[PoolRow] = deque()  # outcome not yet taken
        self._same: dict[bytes, PoolRow] = {}

    def __len__(self) -> int:
        """How many rows are in here: added, and their outcomes not yet taken."""
        return len(self._line)

    def add(self, problem: Problem, completion: Completion) -> None:
        """One more row."""
        pickled = pickle.dumps((problem, completion))
        if pickled not in self._same:
            row = self._same[pickled] = PoolRow(problem, completion, pickled)
            (self.waiting if judge_of(self.fn, problem) is None else self.to_judge).append(row)
        self._line.append(self._same[pickled])

    def take(self) -> Iterator[Outcome]:
        """The outcomes that are there, up to the first row that has none yet."""
        while self._line and (outcome := self._line[0].outcome) is not None:
            self._same.pop(self._line.popleft().pickle, None)
            yield outcome


class RewardPool:
    """Worker processes that score rows, each row within a time limit and each process within a memory limit.

    A context manager; `score` is a `grpo_fn.core.problem.Scorer`, and any thread may ask: one after the other, in the
    order in which they came. A reward must be a pure function of problem and completion, plain or async: equal rows are
    scored once.

    `counts` says how many rows were lost so far, and to what: `timeouts`, `worker_crashes` (the memory limit included),
    `protocol_errors` (a malformed reply) and `exceptions` of the reward. `complaints` holds a text on the first row
    lost to each of these, at most COMPLAINTS different ones; clear it once logged. Rows of a `judge.Judge` go to no
    worker: `judges` asks about them, and `costs` says what for.

    Args:
        workers: processes.
        timeout_per_completion: wall clock of a row, seconds; `wrappers.with_timeout` gives a reward one of its own.
        memory_mb: address space of each process, MB.
        stop_on_error: True: an exception in a reward stops everything; False: it makes its row None.

    Raises:
        ValueError: for a number that is not more than 0.
    """

    def __init__(self, *, workers: int, timeout_per_completion: float, memory_mb: int, stop_on_error: bool) -> None:
        for name, value in (
            ("workers", workers),
            ("timeout_per_completion", timeout_per_completion),
            ("memory_mb", memory_mb),
        ):
            if not value > 0:
                raise ValueError(f"reward pool {name}: got {value}, wanted more than 0")
        self.deadline, self.memory_mb, self.size, self.stop_on_error = (
            timeout_per_completion,
            memory_mb,
            workers,
            stop_on_error,
        )
        self.counts = {"timeouts": 0, "worker_crashes": 0, "protocol_errors": 0, "exceptions": 0}
        self.costs: Counter[str] = Counter()  # of judges, by field of JudgeCost
        self.judges = JudgeRequests()
        self.complaints: list[str] = []
        self._workers: list[WorkerHandle] = []
        self._stillborn = 0
        self._free, self._next = Lock(), Lock()  # the workers are; whose turn it is

    def __enter__(self) -> "RewardPool":
        self._workers = [WorkerHandle(self.memory_mb) for _ in range(self.size)]
        return self

    def __exit__(self, *_: object) -> None:
        self.judges.close()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stdin.close()
        for worker in workers:
            worker.end(1.0)

    def score(
        self,
        fn: RewardFn,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        *,
        should_stop: Callable[[], bool] = never,
    ) -> list[float | None]:
        """`fn` of every row, in order; None where it says so and where its worker was lost. Raises as `judge` does."""
        return [outcome.value for outcome in self.judge(fn, problems, completions, should_stop=should_stop)]

    def judge(
        self,
        fn: RewardFn,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        *,
        report: Callable[[Loss], None] | None = None,
        should_stop: Callable[[], bool] = never,
    ) -> list[Outcome]:
        """`fn` of every row, in order, with the reason where there is no value and the seconds it took.

        `report` is called with every loss; None for the pool's own, which counts it, complains of it and raises it.

        Raises RewardError when a fresh worker cannot load `fn`, as under too small a memory limit, and under
        `stop_on_error`, naming the row, when `fn` itself raises; ValueError when `fn` cannot be found by its name in
        another process; ScoringInterrupted once `should_stop` says so.
        """
        with self._mine(), self.job(fn, report) as job:
            for problem, completion in zip(problems, completions, strict=True):
                job.add(problem, completion)
            outcomes: list[Outcome] = []
            while job:
                if should_stop():
                    raise ScoringInterrupted(f"{_name(fn)}: {len(job)} rows were given up")
                self.turn(job, watching=())
                outcomes += job.take()
            return outcomes

    def report(self, loss: Loss) -> None:
        """Count a row that was lost, and complain of it. Raises RewardError for one that is to stop everything."""
        if loss.cause == "exceptions" and self.stop_on_error:
            raise RewardError(loss.text)
        if loss.cause in self.counts:  # what a judge did not score is among its costs
            self.counts[loss.cause] += 1
        if len(self.complaints) < COMPLAINTS and not any(loss.reason in text for text in self.complaints):
            self.complaints.append(loss.text)

    def charge(self, cost: JudgeCost) -> None:
        """Count what the answer of a judge cost."""
        self.costs.update(cost._asdict())

    @contextmanager
    def _mine(self) -> Iterator[None]:
        """The workers, for one caller at a time, which keeps them no longer than the deadlines of its rows."""
        with self._next:  # only the next caller waits for the workers, so no other can have them twice meanwhile
            self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    @contextmanager
    def job(self, fn: RewardFn, report: Callable[[Loss], None] | None = None) -> Iterator[RewardJob]:
        """Rows that are added and whose outcomes are taken as they come: `turn` moves it on. One at a time."""
        if not self._workers:
            raise RuntimeError("reward pool: got a call to score outside of `with pool:`, wanted it inside")
        if any(worker.rows for worker in self._workers):
            raise RuntimeError("reward pool: got a call to score while another one is at work, wanted one at a time")
        try:
            own = report is None
            yield RewardJob(fn, self.deadline, self.report if own else report, self.charge if own else None)
        finally:
            self.judges.cancel()
            for place, worker in enumerate(self._workers):
                if worker.rows:
                    self._replace(place)

    def turn(self, job: RewardJob, *, watching: Sequence[Descriptor]) -> bool:
        """Hand out work, wait for the first thing to happen, up to POLL seconds, and take in all that has happened.

        That one of `watching` can be read ends the wait too; returns whether one can. Time that the caller spends
        between two turns is no worker's: it moves their deadlines.
        """
        for worker in self._workers:
            worker.began, worker.due = (t + time.monotonic() - job.left for t in (worker.began, worker.due))
        chunk = max(1, min(CHUNK, len(job) // (4 * self.size)))
        for worker in self._workers:
            if job.waiting and not worker.rows:
                worker.assign(job.payload, [job.waiting.popleft() for _ in range(min(chunk, len(job.waiting)))])
        busy = [(place, worker) for place, worker in enumerate(self._workers) if worker.rows]
        known = self._ask_judges(job)
        ready = ready_among(
            reading=[*(worker.stdout for _, worker in busy), *([self.judges] if self.judges.busy else []), *watching],
            writing=[worker.stdin for _, worker in busy if worker.outgoing],
            seconds=0.0 if known else min([POLL, *(worker.due - time.monotonic() for _, worker in busy)]),
        )
        if self.judges.busy and self.judges.fileno() in ready:
            with judge_errors():
                self._take_verdicts(self.judges.settle(), job)
        for place, worker in busy:
            try:
                if worker.stdin.fileno() in ready:
                    worker.flush()
                if worker.stdout.fileno() in ready:
                    self._take_replies(worker, job)
                elif time.monotonic() >= worker.due:
                    raise WorkerLost("timeouts", _lateness(worker, job.deadline))
            except WorkerLost as lost:
                self._give_up(place, lost, job)
        job.left = time.monotonic()
        return any(stream.fileno() in ready for stream in watching)

    def _ask_judges(self, job: RewardJob) -> bool:
        """Ask about the rows that wait for a judge; whether the record had an answer about one."""
        known: list[PoolRow] = []
        while job.to_judge:
            row = job.to_judge.popleft()
            judge, seconds = judge_of(job.fn, row.problem)
            with judge_errors():
                self.judges.ask(row, judge, seconds)
            if row.outcome is not None:
                known.append(row)
        self._take_verdicts(known, job)
        return bool(known)

    def _take_verdicts(self, rows: Sequence[PoolRow], job: RewardJob) -> None:
        for row in rows:
            if row.outcome.loss is not None:
                job.report(row.outcome.loss)
            if job.charge is not None:
                job.charge(row.outcome.cost)

    def _take_replies(self, worker: WorkerHandle, job: RewardJob) -> None:
        for reply in worker.replies():
            match reply:
                case ["ready"] if worker.loading:
                    worker.loading, worker.proven, self._stillborn = False, True, 0
                case ["value", place, None | float() as value, str() as said, float() as seconds] if _is_next(
                    worker, place
                ):
                    worker.settle(Outcome(value, said or (RETURNED_NONE if value is None else ""), seconds))
                case ["raised", place, str() as reason, str() as trace, float() as seconds] if _is_next(worker, place):
                    self._lose(worker, job, "exceptions", reason, seconds, trace)
                case ["failed", str() as trace] if worker.loading:
                    where = f"a reward worker of {self.memory_mb} MB"  # too little memory raises more than MemoryError
                    raise RewardError(f"{_name(job.fn)} could not be loaded in {where}:\n{trace}")
                case ["importing", str() as package] if not worker.loading:
                    worker.importing = package
                    continue  # on the row's time
                case ["memory"]:
                    raise WorkerLost("worker_crashes", f"worker died: over the memory limit of {self.memory_mb} MB")
                case _:
                    raise WorkerLost("protocol_errors", MALFORMED)
            worker.begin(job.deadline)

    def _give_up(self, place: int, lost: WorkerLost, job: RewardJob) -> None:
        """Give up the row the worker was at, put the rest of its rows back and start another worker."""
        worker = self._workers[place]
        if not worker.loading and worker.rows:  # none: it went on after its last answer
            self._lose(worker, job, lost.cause, lost.reason, time.monotonic() - worker.began, "")
        elif worker.loading and not worker.proven:
            self._stillborn += 1
        if self._stillborn >= STILLBORN:
            raise RewardError(
                f"reward worker: got {lost.cause} ({lost.reason}) while {STILLBORN} fresh ones loaded {_name(job.fn)}, "
                f"wanted one ready within {STARTUP_SECONDS:g} s and {self.memory_mb} MB"
            )
        job.waiting.extendleft(reversed(worker.rows))
        self._replace(place)

    def _lose(self, worker: WorkerHandle, job: RewardJob, cause: str, reason: str, seconds: float, trace: str) -> None:
        """The row that the worker is at becomes None."""
        reward, row, trace = _name(job.fn), _shown(worker.rows[0]), escape_control(trace)
        stops = cause == "exceptions" and self.stop_on_error
        text = f"{reward} raised on {row}:\n{trace}" if stops else f"{reward} lost {row}: {reason}\n{trace}".rstrip()
        loss = Loss(cause, reason, text)
        job.report(loss)
        worker.settle(Outcome(None, reason, seconds, loss))

    def _replace(self, place: int) -> None:
        self._workers[place].end(0.0)
        self._workers[place] = WorkerHandle(self.memory_mb)


@contextmanager
def judge_errors() -> Iterator[None]:
    """What a judge cannot get past, as an error of a reward."""
    try:
        yield
    except JudgeUnreachable as error:
        raise RewardError(str(error)) from error


def _lateness(worker: WorkerHandle, deadline: float) -> str:
    """The reason of a row that was late."""
    late = f"late: no answer within {deadline:g} s"
    if not worker.importing:
        return late
    return f"{late}, while it imported {worker.importing}: import it at the top of the reward's module, on loading time"


def _is_next(worker: WorkerHandle, place: Any) -> bool:
    return bool(worker.rows) and not worker.loading and place == worker.place


def _shown(row: PoolRow) -> str:
    return f"problem {row.problem.uid}, completion {row.completion.text[:200]!r}"


def by_name(fn: RewardFn) -> bytes:
    """A function as workers find it. Raises ValueError for one that they cannot find by its name."""
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"reward: got {_name(fn)}, wanted a function that a module defines: {error}") from error


def _name(fn: Any) -> str:
    fn = unwrap_reward(fn)
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
