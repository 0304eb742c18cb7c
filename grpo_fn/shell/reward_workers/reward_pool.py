"""Rewards in worker processes that can be killed: nothing a model writes hangs or crashes the run.

The parent alone keeps the time. A worker answers row by row; one that is late, dies or sends a malformed reply is
killed and replaced, and only the row it was working on becomes None.
"""

import asyncio
import json
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.partials import function_and_knobs, unwrap_reward
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.rewards.judge import Judge, JudgeQuestion
from grpo_fn.rewards.wrappers import by_task, with_timeout
from grpo_fn.shell.reward_workers.judge_record import JudgeAnswer, JudgeRecord, RecordedAnswer
from grpo_fn.shell.reward_workers.worker import HEADER

# -- a worker process as the pool sees it: the bytes on their way to and from it, and the rows without an answer yet


STARTUP_SECONDS = 60.0  # to start Python and import the reward function; not part of a row's deadline
LONGEST_REPLY = 2**20
RETURNED_NONE = "the reward returned None"
MALFORMED = "worker sent a malformed reply"


class Loss(NamedTuple):
    """What a row was lost to."""

    cause: str  # timeouts, worker_crashes, protocol_errors, exceptions or judge
    reason: str
    text: str  # for people


class JudgeCost(NamedTuple):
    """What the answer of a judge has cost when it was asked, and whether it was of use."""

    requests: int
    retries: int  # requests that were sent again
    prompt_tokens: int
    completion_tokens: int
    failures: int  # 1: no answer came
    unreadable: int  # 1: there is no verdict in the answer
    seconds: float  # from its first request to its end


class Outcome(NamedTuple):
    """What became of a row. `reason` says why the value is None, or what a `ReasonedScore` says; else empty."""

    value: float | None
    reason: str
    seconds: float  # wall clock
    loss: Loss | None = None
    cost: JudgeCost | None = None


@dataclass(eq=False, slots=True)
class PoolRow:
    """A row on its way; equal rows share one."""

    problem: Problem
    completion: Completion
    pickle: bytes
    outcome: Outcome | None = None


class WorkerLost(Exception):
    """A worker is of no use any more: the counter it goes to, and why."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(cause, reason)
        self.cause, self.reason = cause, reason


@runtime_checkable
class Descriptor(Protocol):
    """Anything with a file descriptor."""

    def fileno(self) -> int: ...


class WorkerHandle:
    """One process and the rows of the chunk that it is at."""

    def __init__(self, memory_mb: int) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_fn.shell.reward_workers.worker", str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run; and its children die with it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        self.outgoing, self.incoming = b"", b""
        self.rows: deque[PoolRow] = deque()
        self.place = 0  # of the next row within its chunk
        self.importing = ""  # the package that the row it is at is importing
        self.loading, self.proven = False, False  # a function now; any function ever
        self.began, self.due = 0.0, 0.0  # when the row it is at began, at the earliest, and when it is late

    def assign(self, payload: bytes, rows: Sequence[PoolRow]) -> None:
        """Send a pickled function and the rows to call it with."""
        body = pickle.dumps((payload, [row.pickle for row in rows]))
        self.outgoing, self.rows, self.place = HEADER.pack(len(body)) + body, deque(rows), 0
        self.loading = True
        self.begin(STARTUP_SECONDS)
        self.flush()

    def begin(self, seconds: float) -> None:
        """From now on it has so many seconds to say something."""
        self.began = time.monotonic()
        self.due = self.began + seconds

    def settle(self, outcome: Outcome) -> None:
        """The row it was at is done."""
        self.rows.popleft().outcome = outcome
        self.place, self.importing = self.place + 1, ""

    def flush(self) -> None:
        """Send what the pipe takes."""
        try:
            self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # the end of its standard output says the rest

    def replies(self) -> Iterator[list[Any]]:
        """The complete replies that have come in, one by one: those before a malformed one still count.

        Raises WorkerLost at the end of the stream or for a malformed reply.
        """
        data = os.read(self.stdout.fileno(), 65536)
        if not data:
            raise WorkerLost("worker_crashes", self._ending())
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            (size,) = HEADER.unpack_from(self.incoming)
            if size > LONGEST_REPLY:
                raise WorkerLost("protocol_errors", MALFORMED)
            if len(self.incoming) < HEADER.size + size:
                break
            body, self.incoming = self.incoming[HEADER.size : HEADER.size + size], self.incoming[HEADER.size + size :]
            try:
                reply = json.loads(body)
            except ValueError as error:
                raise WorkerLost("protocol_errors", MALFORMED) from error
            yield reply

    def _ending(self) -> str:
        """How the process ended, whose output has."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "worker died: it closed its output"
        return f"worker died: killed by {signal.Signals(-code).name}" if code < 0 else f"worker died: exit code {code}"

    def end(self, grace: float) -> None:
        """Close its input, wait up to `grace` seconds for it to end, then kill it and whatever it started."""
        self.stdin.close()
        ready_among(reading=[self.stdout], writing=[], seconds=grace)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        self.process.wait()
        self.stdout.close()


def ready_among(*, reading: Sequence[Descriptor], writing: Sequence[Descriptor], seconds: float) -> set[int]:
    """The descriptors that can be read or written without waiting, as soon as there is one or after `seconds`."""
    poll = select.poll()
    for stream in reading:
        poll.register(stream, select.POLLIN)
    for stream in writing:
        poll.register(stream, select.POLLOUT)
    return {fd for fd, _ in poll.poll(None if math.isinf(seconds) else max(0.0, 1000 * seconds))}


# -- rows that a model judges: a thread makes the requests, and each answer is recorded before its row is scored


if TYPE_CHECKING:
    import httpx2

CLOSING = 5.0  # seconds for requests under way to be dropped
UNREADABLE = "the judge's answer has no verdict that can be read"
REPLAYED = (
    "got a completion that the run has no judge's answer about, and a replay asks no server; wanted the completions "
    "of the run, for instance with --use_stored_rollout"
)


class JudgeUnreachable(RuntimeError):
    """A judge that answers nothing any more, or refuses all that it is asked."""


class JudgedRow(NamedTuple):
    """A row that waits for a judge."""

    row: PoolRow
    judge: Judge
    question: JudgeQuestion


class JudgeRequests:
    """Questions to judges, for one thread that asks and takes. The thread with the connections starts with the first.

    `record` says what has been answered before.
    """

    def __init__(self) -> None:
        self.record = JudgeRecord(None, 0)
        self._under_way: dict[str, list[JudgedRow]] = {}  # by digest: rows with one question wait together
        self._requests: list[Future[None]] = []
        self._answers: deque[tuple[str, JudgeAnswer]] = deque()
        self._unanswered: dict[str, int] = {}  # by judge: questions in a row
        self._held: list[RecordedAnswer] = []  # failures that are written once the judge is known to be there
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._reading, self._writing = -1, -1
        self._clients: dict[tuple[str, str | None, int, float], tuple[httpx2.AsyncClient, asyncio.Semaphore]] = {}

    def fileno(self) -> int:
        """Can be read when there is something to `settle`; -1 while nothing was asked yet."""
        return self._reading

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._under_way)

    def ask(self, row: PoolRow, judge: Judge, seconds: float) -> None:
        """Begin to ask about a row. One that is on record has its outcome at once.

        Raises JudgeUnreachable where the record is all there is and does not have it, ValueError for a key that is
        not set.
        """
        question = judge.question(row.problem, row.completion)
        waiting = JudgedRow(row, judge, question)
        if question.digest in self._under_way:
            self._under_way[question.digest].append(waiting)
        elif (known := self.record.find(question.digest, row.problem.uid)) is not None:
            settle_row(waiting, known)
        elif (same := self.record.find_elsewhere(question.digest)) is not None:
            self._share(waiting, same)
        elif self.record.read_only:
            raise JudgeUnreachable(f"judge {judge.name}, problem {row.problem.uid}: {REPLAYED}")
        else:
            self._under_way[question.digest] = [waiting]
            self._send(judge, question, seconds)

    def settle(self) -> list[PoolRow]:
        """Take in what was answered: put it on record and give the rows their outcomes; returns these rows.

        Raises JudgeUnreachable once `max_failures` questions in a row were not answered, or for what no question gets
        past.
        """
        with suppress(BlockingIOError):
            os.read(self._reading, 4096)
        settled: list[tuple[JudgedRow, JudgeAnswer]] = []
        while self._answers:
            digest, answer = self._answers.popleft()
            first, *others = self._under_way.pop(digest, (None,))
            if first is None:  # it was given up at that moment
                continue
            self._count_failures(first, answer)
            entry = RecordedAnswer(digest, first.row.problem.uid, answer)
            if answer.text is None:
                self._held.append(entry)
            else:
                self.record.add([*self._held, entry])
                self._held.clear()
            settled.append((first, answer))
            for other in others:
                shared = answer if other.row.problem.uid == first.row.problem.uid else _free(answer)
                if other.row.problem.uid != first.row.problem.uid:
                    entry = RecordedAnswer(digest, other.row.problem.uid, shared)
                    self._held.append(entry) if answer.text is None else self.record.add([entry])
                settled.append((other, shared))
        if not self._under_way and self._held:  # the step goes on with these rows as they are
            self.record.add(self._held)
            self._held.clear()
        for waiting, answer in settled:
            settle_row(waiting, answer)
        return [waiting.row for waiting, _ in settled]

    def cancel(self) -> None:
        """Drop what is under way: it is not wanted any more."""
        for request in self._requests:
            request.cancel()
        self._requests.clear()
        self._under_way.clear()
        self._answers.clear()
        self._held.clear()

    def close(self) -> None:
        """Drop what is under way, hang up, and end the thread."""
        self.cancel()
        loop, self._loop = self._loop, None
        if loop is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_hang_up([one for one, _ in self._clients.values()]), loop).result(CLOSING)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSING)
        self._clients.clear()
        for fd in (self._reading, self._writing):
            os.close(fd)
        self._reading, self._writing = -1, -1

    def _share(self, waiting: JudgedRow, answer: JudgeAnswer) -> None:
        """Give a row what was answered to its question elsewhere, on record under its own uid."""
        free = _free(answer)
        if not self.record.read_only:
            self.record.add([RecordedAnswer(waiting.question.digest, waiting.row.problem.uid, free)])
        settle_row(waiting, free)

    def _count_failures(self, waiting: JudgedRow, answer: JudgeAnswer) -> None:
        judge = waiting.judge
        if answer.text is not None:
            self._unanswered[judge.name] = 0
            return
        failures = self._unanswered[judge.name] = self._unanswered.get(judge.name, 0) + 1
        if answer.fatal:
            raise JudgeUnreachable(f"judge {judge.name}: {answer.failure}")
        if failures >= judge.max_failures:
            raise JudgeUnreachable(
                f"judge {judge.name}: got no answer to {failures} questions in a row (judge.Judge.max_failures), the "
                f"last: {answer.failure}; what was answered is on record, and the same command goes on from there"
            )

    def _send(self, judge: Judge, question: JudgeQuestion, seconds: float) -> None:
        from grpo_fn.shell.reward_workers.judge_client import (
            ask_judge,
            open_client,
        )  # the HTTP library is slow to import

        if self._loop is None:
            self._start()
        how = (judge.endpoint, judge.api_key_variable, judge.concurrency, judge.request_seconds)
        if how not in self._clients:  # a copy of a judge is the same one
            self._clients[how] = (open_client(judge), asyncio.Semaphore(judge.concurrency))
        client, slots = self._clients[how]

        async def ask() -> None:
            answer = await ask_judge(client, judge, question, slots, seconds)
            self._answers.append((question.digest, answer))
            with suppress(BlockingIOError):  # there is something to read already
                os.write(self._writing, b"\0")

        self._requests = [request for request in self._requests if not request.done()]
        self._requests.append(asyncio.run_coroutine_threadsafe(ask(), self._loop))

    def _start(self) -> None:
        self._reading, self._writing = os.pipe()
        for fd in (self._reading, self._writing):
            os.set_blocking(fd, False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()


def settle_row(waiting: JudgedRow, answer: JudgeAnswer) -> None:
    """Give a row the verdict in an answer; None where there is none."""
    row, judge, question = waiting
    value = None if answer.text is None else judge.read(answer.text, question.mark)
    reason = answer.failure or (UNREADABLE if value is None else "")
    lost = f"judge {judge.name} gave no score to problem {row.problem.uid}: {reason}"
    cost = JudgeCost(
        requests=answer.requests,
        retries=max(0, answer.requests - 1),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        failures=int(answer.text is None),
        unreadable=int(answer.text is not None and value is None),
        seconds=answer.seconds,
    )
    row.outcome = Outcome(value, reason, answer.seconds, Loss("judge", reason, lost) if value is None else None, cost)


def _free(answer: JudgeAnswer) -> JudgeAnswer:
    """The answer, without what it has cost already."""
    return answer._replace(requests=0, prompt_tokens=0, completion_tokens=0, seconds=0.0)


async def _hang_up(clients: Sequence["httpx2.AsyncClient"]) -> None:
    for client in clients:
        await client.aclose()


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


def seconds_of(fn: Any, default: float) -> float:
    """The seconds that a row of this reward may take: those of `with_timeout`, the least where it is put around twice.

    Looks through knobs and through every wrapper that calls what it wraps `reward`. The rewards of a `by_task` table
    share one deadline, the longest of theirs.
    """
    function, knobs = function_and_knobs(fn)
    if function is by_task:
        return max(seconds_of(reward, default) for reward in knobs["rewards"].values())
    if function is with_timeout:
        if not knobs["seconds"] > 0:
            raise ValueError(f"wrappers.with_timeout seconds: got {knobs['seconds']}, wanted more than 0")
        within = seconds_of(knobs["reward"], math.inf)
        return min(knobs["seconds"], within)
    return seconds_of(knobs["reward"], default) if "reward" in knobs else default


def judge_of(fn: Any, problem: Problem) -> tuple[Judge, float] | None:
    """The judge that a reward asks about a problem, and the seconds for its answer; None where it asks none.

    Looks through `with_timeout` and the tables of `by_task`.
    """
    if isinstance(fn, Judge):
        return fn, fn.batch_seconds
    function, knobs = function_and_knobs(fn)
    if function is with_timeout:
        found = judge_of(knobs["reward"], problem)
        return found and (found[0], min(found[1], knobs["seconds"]))
    if function is by_task and (name := problem.meta.get("task")) in knobs["rewards"]:
        return judge_of(knobs["rewards"][name], problem)
    return None
