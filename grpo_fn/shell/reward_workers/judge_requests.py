"""Rows that a judge scores: requests under way in a thread of their own, every answer on record before a row has it."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from grpo_fn.rewards.judge import Judge, JudgeQuestion
from grpo_fn.shell.reward_workers.judge_record import JudgeAnswer, JudgeRecord, RecordedAnswer
from grpo_fn.shell.reward_workers.worker_handle import JudgeCost, Loss, Outcome, PoolRow

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
