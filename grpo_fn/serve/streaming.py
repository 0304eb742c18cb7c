"""Completions as events, each with what was drawn since the last one: OpenAI's chunks of chat and text completions.

All texts of a choice together are the text that the same request gets in one piece: what later tokens may still change
is held back.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_fn.serve.request_body import GenerationBody
from grpo_fn.serve.response_body import (
    UNSPELT,
    PlacedToken,
    chat_answer,
    chat_logprobs,
    completion_logprobs,
    cut_at_stop,
    usage_body,
)
from grpo_fn.serve.tool_chat import ReadAnswer
from grpo_fn.shell.serving.decode_session import DrawnRow
from grpo_fn.shell.serving.http_endpoint import HttpError, Json


class ChoiceProgress(NamedTuple):
    """What the decoding thread says of a choice."""

    place: int
    tokens: list[int]  # since the last time
    logp: list[float]
    end: "Future[DrawnRow] | None" = None  # the last one: all of it


class Piece(NamedTuple):
    """What is new of a choice, ready to be shown."""

    place: int
    text: str
    tokens: Sequence[int]
    scored: Sequence[PlacedToken] | None
    start: int  # characters of the tokens before it, one by one
    finish_reason: str | None


class Spelling(NamedTuple):
    """How tokens become text."""

    decode: Callable[[Sequence[int]], str]  # without special tokens
    decode_token: Callable[[int], str]  # one alone, special ones too
    settle: Callable[[str], str]  # the beginning of a text that no further token changes


@dataclass(frozen=True, kw_only=True)
class StreamHead:
    """What every event of a stream says."""

    model: str
    seed: int
    prompts: Sequence[Sequence[int]]  # token ids
    asked: GenerationBody


def completion_events(pieces: Iterator[Piece], head: StreamHead) -> Iterator[Json]:
    """The events of /v1/completions."""
    begun: set[int] = set()

    def shown(piece: Piece) -> Json:
        ids = {"token_ids": [*piece.tokens]} if head.asked.token_ids else {}
        if head.asked.token_ids and piece.place not in begun:
            ids["prompt_token_ids"] = [*head.prompts[piece.place // head.asked.n]]
        begun.add(piece.place)
        scored = None if piece.scored is None else completion_logprobs(piece.scored, piece.start)
        return {
            "index": piece.place,
            "text": piece.text,
            "logprobs": scored,
            "finish_reason": piece.finish_reason,
            **ids,
        }

    yield from _events("cmpl", "text_completion", map(shown, _counted(pieces, counts := [0])), counts, head)


def chat_events(pieces: Iterator[Piece], head: StreamHead, *, read: ReadAnswer | None) -> Iterator[Json]:
    """The events of /v1/chat/completions: first one for each choice that names the role.

    Where there are tools, `read` finds the calls in a text, and a choice's text comes when it has ended.
    """
    texts = [""] * head.asked.n

    def shown(piece: Piece) -> Json:
        ids = {"token_ids": [*piece.tokens]} if head.asked.token_ids else {}
        scored = None if piece.scored is None else {"content": chat_logprobs(piece.scored), "refusal": None}
        texts[piece.place] += piece.text
        delta, reason = {"content": piece.text} if piece.text and read is None else {}, piece.finish_reason
        if read is not None and reason is not None:
            said, reason = chat_answer(texts[piece.place], reason, read)
            calls = [{"index": n, **call} for n, call in enumerate(said.get("tool_calls", ()))]
            delta = ({"content": said["content"]} if said["content"] else {}) | ({"tool_calls": calls} if calls else {})
        return {"index": piece.place, "delta": delta, "logprobs": scored, "finish_reason": reason, **ids}

    def all_shown(counted: Iterator[Piece]) -> Iterator[Json]:
        for place in range(head.asked.n):
            delta = {"role": "assistant", "content": ""}
            yield {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}
        for event in map(shown, counted):
            if event["delta"] or event["finish_reason"] or event["logprobs"] or event.get("token_ids"):
                yield event

    more = {"prompt_token_ids": [*head.prompts[0]]} if head.asked.token_ids else {}
    events = _events("chatcmpl", "chat.completion.chunk", all_shown(_counted(pieces, counts := [0])), counts, head)
    yield {**next(events), **more}
    yield from events


def pieces_of(
    inbox: "SimpleQueue[ChoiceProgress]",
    choices: int,
    *,
    asked: GenerationBody,
    stop: Sequence[str],
    spelling: Spelling,
    result: Callable[[Future], DrawnRow],
    until: float,
) -> Iterator[Piece]:
    """What is new of every choice, as it comes, until all have ended.

    Args:
        inbox: what the decoding thread says.
        choices: how many there are.
        asked: the request.
        stop: texts that end a completion.
        spelling: how tokens become text.
        result: the completion of a future that is done; raises HttpError.
        until: of the monotonic clock, seconds.

    Yields:
        The pieces; the last one of a choice has a reason to end.

    Raises:
        HttpError: where a choice has not ended in time.
    """
    tokens, unsent = ([[] for _ in range(choices)] for _ in range(2))
    sent, started, left = [""] * choices, [0] * choices, choices
    while left:
        try:
            place, new, logp, end = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise HttpError(
                f"got {choices - left} of {choices} completions in time, wanted all (this server's --timeout)",
                status=504,
            ) from None
        reason = None
        if end is not None:
            drawn, before, left = result(end), len(tokens[place]), left - 1
            new, logp, reason = drawn.tokens[before:], drawn.logp[before:], "stop" if drawn.stopped else "length"
        tokens[place] += new
        unsent[place] += new  # what brings no text goes with what does: usage counts every token
        text = spelling.decode(tokens[place])
        whole = text if asked.keep_stop else cut_at_stop(text, stop)
        whole = whole if end is not None else spelling.settle(whole)
        if whole.startswith(sent[place]):
            text, sent[place] = whole[len(sent[place]) :], whole
        elif end is not None:
            raise HttpError("got tokens whose text changes what was sent, wanted stream false for them", status=500)
        else:
            text = ""
        scored, start = None, started[place]
        if asked.alternatives is not None:
            pairs = zip(new, logp, strict=True)
            scored = [PlacedToken(spelling.decode_token(token), value, None) for token, value in pairs]
            started[place] += sum(len(token.text) for token in scored)
        if text or reason or ((asked.token_ids or scored) and new):
            yield Piece(place, text, unsent[place], scored, start, reason)
            unsent[place] = []


def settled_text(text: str, *, stop: Sequence[str], tidied: bool) -> str:
    """The beginning of a text that no further token changes.

    Args:
        text: of the tokens so far.
        stop: texts that end a completion, and are cut off.
        tidied: whether the tokenizer takes out spaces before punctuation.

    Returns:
        The text without half a character, half a stop string and, where it is tidied, its last space and what follows.
    """
    text = text.rstrip(UNSPELT)
    if tidied and " " in text:
        text = text[: text.rindex(" ")]
    starts = [n for one in stop for n in range(1, len(one)) if text.endswith(one[:n])]
    return text[: len(text) - max(starts, default=0)]


def tidies(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer takes out spaces before punctuation."""
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _counted(pieces: Iterator[Piece], counts: list[int]) -> Iterator[Piece]:
    """The same pieces; `counts[0]` are their tokens so far."""
    for piece in pieces:
        counts[0] += len(piece.tokens)
        yield piece


def _events(prefix: str, kind: str, shown: Iterator[Json], counts: list[int], head: StreamHead) -> Iterator[Json]:
    """An event for each choice's piece, and one with the numbers of tokens where they are wanted."""
    same = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
    same |= {"model": head.model, "seed": head.seed}
    usage = {"usage": None} if head.asked.usage else {}
    for choice in shown:
        yield {**same, "choices": [choice], **usage}
    if head.asked.usage:
        read = sum(map(len, head.prompts))
        yield {**same, "choices": [], "usage": usage_body(read, counts[0])}
