"""One question to a judge over HTTP: chat completions of an OpenAI-compatible endpoint, sent again where that helps."""

import asyncio
import os
import time
from typing import Any

import httpx2

from grpo_fn.rewards.judge import Judge, JudgeQuestion
from grpo_fn.shell.reward_workers.judge_record import JudgeAnswer

SHOWN = 300  # characters of a server's complaint
LONGEST_WAIT = 60.0  # seconds before a request is sent again, whatever the server asks for
AGAIN = {408, 409, 425, 429}  # and 5xx: not now
NEVER = {401: "a key that it takes", 403: "a key that it takes", 404: "a chat completions endpoint that has the model"}


class TryAgain(Exception):
    """The request may go well later: why it did not now, and how long the server wants to be left alone."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Refused(Exception):
    """The request will not go well. `fatal`: nor will any other."""

    def __init__(self, reason: str, *, fatal: bool) -> None:
        super().__init__(reason)
        self.fatal = fatal


def open_client(judge: Judge) -> httpx2.AsyncClient:
    """A client for the endpoint, for one event loop. Raises ValueError where the variable with the key is not set."""
    headers = {}
    if judge.api_key_variable is not None:
        key = os.environ.get(judge.api_key_variable, "")
        if not key.strip():
            raise ValueError(
                f"judge {judge.name}: got no environment variable {judge.api_key_variable}, wanted the key of "
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

    def unanswered(failure: str, *, fatal: bool = False) -> JudgeAnswer:
        return JudgeAnswer(None, failure, fatal, requests, seconds=time.monotonic() - began)

    try:
        async with asyncio.timeout(seconds), slots:
            began = time.monotonic()
            while True:
                requests, last = requests + 1, f"request {requests + 1} was under way"
                try:
                    answer = await _send(client, judge, question)
                    return answer._replace(requests=requests, seconds=time.monotonic() - began)
                except TryAgain as error:
                    last, wait = str(error), error.seconds
                except Refused as error:
                    return unanswered(str(error), fatal=error.fatal)
                if requests > judge.retries:
                    return unanswered(f"{judge.endpoint}: got no answer to {requests} requests, the last: {last}")
                # A part of the wait that depends on the question keeps many from being sent at one moment.
                spread = 0.5 + int(question.digest[:4], 16) / 2**17
                await asyncio.sleep(min(LONGEST_WAIT, max(wait, spread * judge.backoff_seconds * 2 ** (requests - 1))))
    except TimeoutError:
        waited = f"the wait for one of {judge.concurrency} requests under way included"
        return unanswered(f"late: {judge.endpoint} gave no answer within {seconds:g} s, {waited}; {last}")


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
                f"({type(error).__name__} {error}), wanted a server (judge.Judge.endpoint)"
            ) from error
        if answer.status_code in (401, 403):
            raise ValueError(
                f"{knob}: got status {answer.status_code} from {judge.endpoint}, wanted a key that it takes in the "
                f"environment variable that judge.Judge.api_key_variable names, which is {judge.api_key_variable}"
            )
        if answer.status_code != 200:
            raise ValueError(
                f"{knob}: got status {answer.status_code} for {answer.request.url}, wanted the list of models of an "
                f"OpenAI-compatible server: {answer.text[:SHOWN]}"
            )
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{knob}: got {answer.text[:SHOWN]!r} for {answer.request.url}, wanted a list of models"
            ) from error
        if judge.model not in names:
            raise ValueError(
                f"{knob}: got judge.Judge.model {judge.model!r}, wanted one that {judge.endpoint} has: "
                f"{', '.join(names)[:SHOWN] or 'none'}"
            )


async def _send(client: httpx2.AsyncClient, judge: Judge, question: JudgeQuestion) -> JudgeAnswer:
    try:
        async with asyncio.timeout(judge.request_seconds):
            answer = await client.post("chat/completions", json=dict(question.body))
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise TryAgain(f"no answer within {judge.request_seconds:g} s") from error
    except httpx2.HTTPError as error:
        raise TryAgain(f"{type(error).__name__} {error}") from error
    status, said = answer.status_code, answer.text[:SHOWN]
    if status in AGAIN or status >= 500:
        raise TryAgain(f"status {status}: {said}", _retry_after(answer.headers.get("retry-after", "")))
    if status != 200:
        wanted = f", wanted {NEVER[status]}" if status in NEVER else ""
        raise Refused(f"{judge.endpoint}: got status {status}{wanted}: {said}", fatal=status in NEVER)
    try:
        return _read_answer(answer.json())
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise TryAgain(f"got {said!r}, wanted a chat completion") from error


def _read_answer(answer: Any) -> JudgeAnswer:
    """The text and the tokens of a chat completion."""
    text = answer["choices"][0]["message"]["content"]
    if text is not None and not isinstance(text, str):
        raise TypeError(f"content: got {type(text).__name__}, wanted text")
    usage = answer.get("usage") or {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    # No content: the model has thought until it was cut off. That is an answer, which cannot be read.
    return JudgeAnswer(text or "", "", False, 0, *(n if isinstance(n, int) and n > 0 else 0 for n in counts))


def _retry_after(header: str) -> float:
    """Seconds that a server wants to be left alone; 0 where it says none, or a date."""
    return float(header) if header.isascii() and header.isdigit() else 0.0
