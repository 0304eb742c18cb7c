"""Questions to judges over HTTP: chat completions of OpenAI-compatible endpoints, sent again where that helps.

A thread makes all requests. An answer is on record before its row has an outcome.
"""

import asyncio
import json
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import httpx2

from grpo_fn.core.json_lines import json_object
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.judge import Judge, JudgeQuestion
from grpo_fn.shell.atomic_io import flush_file, is_full, no_space, to_json
from grpo_fn.shell.reward_workers.worker_pool import LOAD, Outcome

# -- What judges answered in a run, on the disk before it is used: resume and replay read it and ask no server.
#
# A file for each rank, `rank_N.jsonl`, an object a line: the digest of the question, the problem's uid, the answer or
# why there is none, and what it cost. A question that is asked again elsewhere in the stream gets the same answer at no
# cost, under its own uid. Of a long run the answers do not fit in memory, their places in the files do.


class JudgeAnswer(NamedTuple):
    """What a question came to, and what it cost."""

    text: str | None  # None: it was not answered
    failure: str = ""  # why not
    fatal: bool = False  # no other question would be answered either
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # from its first request to its end


class RecordedAnswer(NamedTuple):
    """An entry of the record."""

    digest: str
    uid: int
    answer: JudgeAnswer


class Place(NamedTuple):
    """Of a line in a file."""

    path: Path
    offset: int
    size: int


class JudgeRecord:
    """The answers of a run, or of this process if `folder` is None. Any thread may ask.

    Nothing is read before `open` or the first question, and nothing is written before the first answer. If it is
    `read_only`, as replay has it, nothing is asked or written.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank, self.read_only = folder, rank, False
        self._entries: dict[tuple[str, int], Place | JudgeAnswer] = {}
        self._answered: dict[str, tuple[str, int]] = {}  # by digest: an entry with an answer
        self._opened, self._lock = False, threading.Lock()

    def open(self) -> None:
        """Read the files. Raises ValueError, naming file and line, for a line that is no recorded answer."""
        with self._lock:
            self._open()

    def find(self, digest: str, uid: int) -> JudgeAnswer | None:
        """What was answered to this question about the problem of this uid.

        What was answered about another problem costs nothing again, and goes on record for this one as well.
        """
        with self._lock:
            self._open()
            if (digest, uid) in self._entries:
                return self._read((digest, uid))
            if digest not in self._answered:
                return None
            answer = self._read(self._answered[digest])
        answer = answer._replace(requests=0, prompt_tokens=0, completion_tokens=0, seconds=0.0)
        if not self.read_only:
            self.add([RecordedAnswer(digest, uid, answer)])
        return answer

    def add(self, entries: Sequence[RecordedAnswer]) -> None:
        """Write entries; they are on the disk when this returns. Raises NoSpace when the disk is full."""
        rows = [{"digest": entry.digest, "uid": entry.uid, **entry.answer._asdict()} for entry in entries]
        lines = [(to_json(row) + "\n").encode("ascii") for row in rows]
        with self._lock:
            self._open()
            if self.folder is None:
                for entry in entries:
                    self._note(entry, entry.answer)
                return
            path = self.folder / f"rank_{self.rank}.jsonl"
            offset = self._append(path, b"".join(lines))
            for entry, line in zip(entries, lines, strict=True):
                self._note(entry, Place(path, offset, len(line)))
                offset += len(line)

    def _append(self, path: Path, data: bytes) -> int:
        """Put the bytes at the end of a file; where they begin."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                start = os.fstat(file.fileno()).st_size
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if start == 0:
                flush_file(self.folder)
        except OSError as error:
            if is_full(error):
                raise no_space(path, len(data)) from error
            raise
        return start

    def _open(self) -> None:
        """Find the entries of all ranks; of two about one question, this rank's own counts."""
        if self._opened:
            return
        self._opened = True
        if self.folder is None or not self.folder.is_dir():
            return
        own = self.folder / f"rank_{self.rank}.jsonl"
        others = [path for path in sorted(self.folder.glob("rank_*.jsonl")) if path != own]
        for path in (*others, own):
            if path.is_file():
                self._open_file(path, own=path == own)

    def _open_file(self, path: Path, *, own: bool) -> None:
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # torn: the process was killed while it wrote
                self._note(_entry(f"{path}:{number}", line), Place(path, end, len(line)))
                end += len(line)
        if own and not self.read_only and path.stat().st_size > end:
            os.truncate(path, end)

    def _note(self, entry: RecordedAnswer, known: Place | JudgeAnswer) -> None:
        self._entries[entry.digest, entry.uid] = known
        if entry.answer.text is not None:
            self._answered.setdefault(entry.digest, (entry.digest, entry.uid))

    def _read(self, key: tuple[str, int]) -> JudgeAnswer:
        entry = self._entries[key]
        if isinstance(entry, JudgeAnswer):
            return entry
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            return _entry(f"{entry.path}, byte {entry.offset}", file.read(entry.size)).answer


def _entry(where: str, line: bytes) -> RecordedAnswer:
    row = json_object(where, line, expected="a recorded answer of a judge")
    try:
        digest, uid, answer = row.pop("digest"), row.pop("uid"), JudgeAnswer(**row)
        known = isinstance(digest, str) and isinstance(uid, int) and isinstance(answer.text, str | None)
    except (TypeError, KeyError):
        known = False
    if not known:
        raise ValueError(f"{where}: got {line[:80]!r}, expected a recorded answer of a judge")
    return RecordedAnswer(digest, uid, answer)


CLOSING = 5.0  # seconds for requests under way to be dropped
UNREADABLE = "the judge's answer has no verdict that can be read"
REPLAYED = (
    "got a completion that the run has no judge's answer about, and a replay asks no server; expected the completions "
    "of the run, for instance with --use_stored_rollout"
)
SHOWN = 300  # characters of a server's complaint
LONGEST_REPLY = 2**21  # bytes of a server's answer, unpacked
MOST_TOKENS = 2**40  # that a server may say it took
LONGEST_WAIT = 60.0  # seconds before a request is sent again, whatever the server asks for
AGAIN = {408, 409, 425, 429}  # and 5xx: not now
NEVER = {401: "a key that it takes", 403: "a key that it takes", 404: "a chat completions endpoint that has the model"}


class TryAgain(Exception):
    """The request may go well later: why it did not now, and how long the server wants to be left alone."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class JudgedRow(NamedTuple):
    """A row that a judge scores."""

    judge: Judge
    seconds: float  # for the answer
    problem: Problem
    completion: Completion


class JudgeUnreachable(Exception):
    """A judge that answers nothing any more, or refuses all that it is asked; says why."""


class JudgeRequests:
    """Questions to judges, from any thread. What `record` holds is not asked again."""

    def __init__(self, record: JudgeRecord) -> None:
        self._record = record
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by digest: equal ones wait
        self._unsettled = 0  # rows
        self._unanswered: Counter[str] = Counter()  # by judge: questions in a row
        self._failures: list[RecordedAnswer] = []  # put on record once the judge is known to be there
        self._clients: dict[tuple[Any, ...], tuple[httpx2.AsyncClient, asyncio.Semaphore]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[JudgedRow]) -> list[Future[list[Outcome]]]:
        """Begin to ask about rows; the outcome of each is the verdict, None where there is none.

        A future holds ValueError where a key is not set.
        """
        self._loop.call_soon_threadsafe(self._expect, len(rows))
        return [asyncio.run_coroutine_threadsafe(self._outcome(row), self._loop) for row in rows]

    def close(self) -> None:
        """Drop what is under way, close the connections, and end the thread."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING)

    async def _drop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client, _ in self._clients.values():
            await client.aclose()

    def _expect(self, rows: int) -> None:
        self._unsettled += rows

    async def _outcome(self, row: JudgedRow) -> list[Outcome]:
        judge, question = row.judge, row.judge.question(row.problem, row.completion)
        try:
            async with self._locks.setdefault(question.digest, asyncio.Lock()):
                answer = self._record.find(question.digest, row.problem.uid)
                if answer is None and self._record.read_only:
                    raise JudgeUnreachable(f"problem {row.problem.uid}: {REPLAYED}")
                answer = answer or await self._ask(row, question)
        except JudgeUnreachable as error:
            return [Outcome(None, str(error), 0.0, LOAD)]
        finally:
            self._unsettled -= 1
        try:
            value = None if answer.text is None else judge.read(answer.text, question.mark)
        except Exception as error:
            reason = f"{judge.name}.read: {type(error).__name__}: {error}"[:SHOWN]
            return [Outcome(None, reason, answer.seconds, "exceptions", traceback.format_exc())]
        reason = answer.failure or (UNREADABLE if value is None else "")
        cost = {
            **{name: getattr(answer, name) for name in ("requests", "prompt_tokens", "completion_tokens", "seconds")},
            "retries": max(0, answer.requests - 1),
            "failures": int(answer.text is None),
            "unreadable": int(answer.text is not None and value is None),
        }
        return [Outcome(value, reason, answer.seconds, "judge" if value is None else "", cost=cost)]

    async def _ask(self, row: JudgedRow, question: JudgeQuestion) -> JudgeAnswer:
        """Ask, and put the answer on record; a failure with the next answer, or when no other row is left.

        Raises JudgeUnreachable once `max_failures` questions in a row were not answered, and for what no question gets
        past.
        """
        judge = row.judge
        how = (judge.endpoint, judge.api_key_variable, judge.concurrency, judge.request_seconds)
        if how not in self._clients:  # a copy of a judge is the same one
            self._clients[how] = (open_client(judge), asyncio.Semaphore(judge.concurrency))
        client, slots = self._clients[how]
        answer = await ask_judge(client, judge, question, slots, row.seconds)
        self._unanswered[judge.name] = 0 if answer.text is not None else self._unanswered[judge.name] + 1
        if answer.fatal or self._unanswered[judge.name] >= judge.max_failures:
            self._failures.clear()
            if answer.fatal:
                raise JudgeUnreachable(answer.failure)
            raise JudgeUnreachable(
                f"got no answer to {self._unanswered[judge.name]} questions in a row (judge.Judge.max_failures), the "
                f"last: {answer.failure}; what was answered is on record, and the same command resumes from there"
            )
        self._failures.append(RecordedAnswer(question.digest, row.problem.uid, answer))
        if answer.text is not None or self._unsettled == 1:
            self._record.add(self._failures)
            self._failures.clear()
        return answer


def open_client(judge: Judge) -> httpx2.AsyncClient:
    """A client for the endpoint, for one event loop. Raises ValueError where the variable with the key is not set."""
    headers = {}
    if judge.api_key_variable is not None:
        key = os.environ.get(judge.api_key_variable, "")
        if not key.strip():
            raise ValueError(
                f"judge {judge.name}: got no environment variable {judge.api_key_variable}, expected the key of "
                f"{judge.endpoint} in it (judge.Judge.api_key_variable)"
            )
        headers = {"Authorization": f"Bearer {key.strip()}"}
    return httpx2.AsyncClient(
        base_url=judge.endpoint.rstrip("/") + "/",
        headers=headers,
        limits=httpx2.Limits(max_connections=judge.concurrency, keepalive_expiry=2.0),
        timeout=httpx2.Timeout(judge.request_seconds),
        trust_env=False,  # as the other clients: proxies of the environment are for the world outside
        verify=judge.endpoint.startswith("https"),
    )


async def ask_judge(
    client: httpx2.AsyncClient, judge: Judge, question: JudgeQuestion, slots: asyncio.Semaphore, seconds: float
) -> JudgeAnswer:
    """The answer to a question within so many seconds, its wait for one of the `slots` included."""
    asked, last, requests = time.monotonic(), "no request was sent: all were under way", 0
    began = asked

    def with_cost(answer: JudgeAnswer) -> JudgeAnswer:
        return answer._replace(requests=requests, seconds=time.monotonic() - began)

    try:
        async with asyncio.timeout(seconds), slots:
            began = time.monotonic()
            while True:
                requests, last = requests + 1, f"request {requests + 1} was under way"
                try:
                    return with_cost(await _send(client, judge, question))
                except TryAgain as error:
                    last, wait = str(error), error.seconds
                if requests > judge.retries:
                    failure = f"{judge.endpoint}: got no answer to {requests} requests, the last: {last}"
                    return with_cost(JudgeAnswer(None, failure))
                # A part of the wait that depends on the question keeps many from being sent at one moment.
                spread = 0.5 + int(question.digest[:4], 16) / 2**17
                await asyncio.sleep(min(LONGEST_WAIT, max(wait, spread * judge.backoff_seconds * 2 ** (requests - 1))))
    except TimeoutError:
        waited = f"the wait for one of {judge.concurrency} requests under way included"
        late = f"late: {judge.endpoint} gave no answer within {seconds:g} s, {waited}; {last}"
        return with_cost(JudgeAnswer(None, late))


async def check_endpoint(judge: Judge) -> None:
    """Raise ValueError unless the endpoint answers and has the model; a key that is not set is found here too."""
    knob = f"judge {judge.name}"
    async with open_client(judge) as client:
        try:
            async with asyncio.timeout(judge.request_seconds):
                answer = await client.get("models")
        except (TimeoutError, httpx2.HTTPError) as error:
            raise ValueError(
                f"{knob}: got no answer from {judge.endpoint} within {judge.request_seconds:g} s "
                f"({type(error).__name__} {error}), expected a server (judge.Judge.endpoint)"
            ) from error
        if answer.status_code in (401, 403):
            raise ValueError(
                f"{knob}: got status {answer.status_code} from {judge.endpoint}, expected a key that it takes in the "
                f"environment variable that judge.Judge.api_key_variable names, which is {judge.api_key_variable}"
            )
        if answer.status_code != 200:
            raise ValueError(
                f"{knob}: got status {answer.status_code} for {answer.request.url}, expected the list of models of an "
                f"OpenAI-compatible server: {answer.text[:SHOWN]}"
            )
        try:
            names = [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{knob}: got {answer.text[:SHOWN]!r} for {answer.request.url}, expected a list of models"
            ) from error
        if judge.model not in names:
            raise ValueError(
                f"{knob}: got judge.Judge.model {judge.model!r}, expected one that {judge.endpoint} has: "
                f"{', '.join(names)[:SHOWN] or 'none'}"
            )


async def _send(client: httpx2.AsyncClient, judge: Judge, question: JudgeQuestion) -> JudgeAnswer:
    """The answer to one request, or why there will be none. Raises TryAgain where the next request may have one."""
    try:
        async with asyncio.timeout(judge.request_seconds):
            body = bytearray()
            async with client.stream("POST", "chat/completions", json=dict(question.body)) as answer:
                async for data in answer.aiter_bytes():
                    body += data
                    if len(body) > LONGEST_REPLY:
                        return JudgeAnswer(None, f"{judge.endpoint}: got more than {LONGEST_REPLY} bytes for an answer")
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise TryAgain(f"no answer within {judge.request_seconds:g} s") from error
    except httpx2.HTTPError as error:
        raise TryAgain(f"{type(error).__name__} {error}") from error
    status, said = answer.status_code, body[: 4 * SHOWN].decode("utf-8", "replace")[:SHOWN]
    if status in AGAIN or status >= 500:
        after = answer.headers.get("retry-after", "")  # seconds, or a date, which counts for nothing
        raise TryAgain(f"status {status}: {said}", float(after) if after.isascii() and after.isdigit() else 0.0)
    if status != 200:
        expected = f", expected {NEVER[status]}" if status in NEVER else ""
        return JudgeAnswer(None, f"{judge.endpoint}: got status {status}{expected}: {said}", fatal=status in NEVER)
    try:
        return _read_answer(json.loads(body))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise TryAgain(f"got {said!r}, expected a chat completion") from error


def _read_answer(answer: Any) -> JudgeAnswer:
    """The text and the tokens of a chat completion."""
    text = answer["choices"][0]["message"]["content"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"content: got {type(text).__name__}, expected text")
    usage = answer.get("usage") or {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    # No content: the model has thought until it was cut off. That is an answer, which cannot be read.
    return JudgeAnswer(text or "", "", False, 0, *(n if type(n) is int and 0 < n < MOST_TOKENS else 0 for n in counts))
