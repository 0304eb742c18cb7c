"""Completions and scores as the answers of /v1/completions and /v1/chat/completions."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo_fn.serve.request_body import GenerationBody
from grpo_fn.serve.tool_chat import ChatAnswer, ReadAnswer
from grpo_fn.shell.serving.http_endpoint import Json

UNSPELT = "\N{REPLACEMENT CHARACTER}"  # of a token that is a part of a character


class PlacedToken(NamedTuple):
    """A token as it is shown: its log-prob, None for a first token, and the likeliest ones in its place."""

    text: str
    logp: float | None
    top: Sequence[tuple[str, float]] | None  # falling


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One completion, ready to be shown."""

    text: str  # what was drawn, without a stop string
    echoed: str  # the prompt's text, where it is wanted
    prompt: Sequence[int]
    tokens: Sequence[int]
    stopped: bool | None  # None: nothing was to be drawn
    scored: Sequence[PlacedToken] | None

    @property
    def finish_reason(self) -> str:
        """As OpenAI names it."""
        return "stop" if self.stopped else "length"


def completion_body(choices: Sequence[Choice], asked: GenerationBody, model: str, seed: int) -> Json:
    """The answer of /v1/completions."""
    shown = []
    for choice in choices:
        extra = {"prompt_token_ids": [*choice.prompt], "token_ids": [*choice.tokens]} if asked.token_ids else {}
        scored = None if choice.scored is None else completion_logprobs(choice.scored)
        shown.append({"text": choice.echoed + choice.text, "logprobs": scored, **_end(choice), **extra})
    return _answer("cmpl", "text_completion", shown, choices, asked, model, seed)


def chat_body(
    choices: Sequence[Choice], asked: GenerationBody, model: str, seed: int, *, read: ReadAnswer | None
) -> Json:
    """The answer of /v1/chat/completions; `read` finds the calls of tools in a text, None where there are no tools."""
    shown = []
    for choice in choices:
        extra = {"token_ids": [*choice.tokens]} if asked.token_ids else {}
        scored = None if choice.scored is None else {"content": chat_logprobs(choice.scored), "refusal": None}
        said, reason = chat_answer(choice.text, choice.finish_reason, read)
        message = {"role": "assistant", **said, "refusal": None}
        shown.append({"message": message, "logprobs": scored, "finish_reason": reason, **extra})
    prompt = {"prompt_token_ids": [*choices[0].prompt]} if asked.token_ids else {}
    return {**_answer("chatcmpl", "chat.completion", shown, choices, asked, model, seed), **prompt}


def chat_answer(text: str, reason: str, read: ReadAnswer | None) -> tuple[Json, str]:
    """A completion's content and calls, and why it ended: with calls, unless a limit cut it."""
    answer = ChatAnswer(text, ()) if read is None else read(text)
    if not answer.calls:
        return {"content": text}, reason
    said = {"content": answer.content or None, "tool_calls": [*answer.calls]}
    return said, "tool_calls" if reason == "stop" else reason


def models_body(model: str, created: int, *, positions: int | None) -> Json:
    """The answer of /v1/models."""
    one = {"id": model, "object": "model", "created": created, "owned_by": "grpo_fn", "max_model_len": positions}
    return {"object": "list", "data": [one]}


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that comes first in it."""
    found = [at for one in stop if (at := text.find(one)) >= 0]
    return text[: min(found)] if found else text


def _end(choice: Choice) -> Json:
    return {"finish_reason": choice.finish_reason}


def usage_body(read: int, drawn: int) -> dict[str, int]:
    """Numbers of tokens."""
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _answer(
    prefix: str,
    kind: str,
    shown: Sequence[Json],
    choices: Sequence[Choice],
    asked: GenerationBody,
    model: str,
    seed: int,
) -> Json:
    # A prompt is counted once, however many completions it has.
    read = sum(len(choice.prompt) for choice in choices[:: asked.n])
    drawn = sum(len(choice.tokens) for choice in choices)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": i, **one} for i, one in enumerate(shown)],
        "usage": usage_body(read, drawn),
        "seed": seed,
    }


def completion_logprobs(scored: Sequence[PlacedToken], start: int = 0) -> dict[str, list[Any]]:
    """Log-probs as /v1/completions has them; the first token begins at character `start`."""
    offsets = [start]
    for token in scored:
        offsets.append(offsets[-1] + len(token.text))
    return {
        "tokens": [token.text for token in scored],
        "token_logprobs": [token.logp for token in scored],
        "top_logprobs": [_by_text(token) for token in scored],
        "text_offset": offsets[:-1],
    }


def _by_text(token: PlacedToken) -> dict[str, float] | None:
    """From text to log-prob, the token itself included; of several tokens with one text the likeliest."""
    if token.logp is None:
        return None
    found: dict[str, float] = {}
    for text, logp in sorted([*(token.top or ()), (token.text, token.logp)], key=lambda one: -one[1]):
        found.setdefault(text, logp)
    return found


def chat_logprobs(scored: Sequence[PlacedToken]) -> list[Json]:
    """Log-probs as /v1/chat/completions has them."""
    return [
        {**_one(token.text, token.logp), "top_logprobs": [_one(*each) for each in token.top or ()]} for token in scored
    ]


def _one(text: str, logp: float | None) -> Json:
    return {"token": text, "logprob": logp, "bytes": None if UNSPELT in text else [*text.encode()]}
