"""The bodies of /v1/completions and /v1/chat/completions as checked values.

What is not supported is refused, with what was got and what is wanted: a field that would be passed over without a word
would make a comparison of two servers a comparison of two questions. No torch in here.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_fn.core.conversation import chat_prompt, read_messages
from grpo_fn.serve.tool_request import read_tool_conversation, read_tools
from grpo_fn.shell.serving.http_endpoint import HttpError, Json

ALTERNATIVES = 20  # likeliest tokens that may be asked for in each place
CHOICES = 1024  # completions of one request, at most
SEEDS = 2**63

# Fields that change nothing here at these values, and are refused at others.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": (),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "prediction": (),
    "audio": (),
}
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # they change no answer of any server
COMMON = {
    *("model", "n", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "uid", "logprobs"),
    *("include_stop_str_in_output", "return_token_ids", "stream", "stream_options"),
}
OF_COMPLETIONS = {"prompt", "echo", "best_of"}
OF_CHAT = {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
}


@dataclass(frozen=True, kw_only=True)
class GenerationBody:
    """What is asked for, of either route. A prompt is text to be encoded as the route does, or token ids."""

    prompts: Sequence[str | list[int]]
    uids: Sequence[int]  # of each prompt: its number in an evaluation's stream, which its draws are keyed on
    n: int
    max_tokens: int | None  # None: what the server and the prompt leave
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...] | None  # None: the configuration's
    seed: int | None
    alternatives: int | None  # likeliest tokens in each place; None: no log-probs
    echo: bool
    keep_stop: bool  # the text ends with the stop string
    token_ids: bool
    stream: bool  # events, as tokens are drawn, instead of one answer
    usage: bool  # the last event says how many tokens there were
    tools: tuple[Json, ...] | None = None  # None: no tools, and no messages of tools
    calls: bool = False  # the model's calls are read
    parallel_calls: bool = True  # all of a completion's calls are shown, not the first alone

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary alone."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


def read_completion(body: Json, model: str) -> GenerationBody:
    """The body of /v1/completions. Raises HttpError."""
    check_fields(body, COMMON | OF_COMPLETIONS, model)
    prompts = read_prompts(body.get("prompt"))
    n = integer(body, "n", 1, low=1, high=CHOICES)
    if integer(body, "best_of", n, low=1, high=CHOICES) != n:
        raise field_error("best_of", body["best_of"], f"n, {n}: nothing is drawn to be thrown away")
    echo = boolean(body, "echo")
    read = GenerationBody(
        **read_common(body, len(prompts)),
        prompts=prompts,
        n=n,
        max_tokens=integer(body, "max_tokens", None, low=0 if echo else 1),
        alternatives=integer(body, "logprobs", None, low=0, high=ALTERNATIVES),
        echo=echo,
    )
    return check_together(read)


def read_chat(body: Json, model: str) -> GenerationBody:
    """The body of /v1/chat/completions: one prompt, text or a Conversation. Raises HttpError."""
    check_fields(body, COMMON | OF_CHAT, model)
    limits = [integer(body, name, None, low=1) for name in ("max_tokens", "max_completion_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise field_error("max_completion_tokens", limits[1], f"max_tokens, {limits[0]}, or one of the two")
    wanted = boolean(body, "logprobs")
    top = integer(body, "top_logprobs", None, low=0, high=ALTERNATIVES)
    if top and not wanted:
        raise field_error("top_logprobs", top, "logprobs true beside it")
    tools, asleep = read_tools(body), body.get("tool_choice") == "none"
    read_prompt = read_tool_conversation if tools else read_conversation
    read = GenerationBody(
        **read_common(body, 1),
        prompts=[read_prompt(body.get("messages"))],
        tools=(() if asleep else tools) if tools else None,
        calls=bool(tools) and not asleep,
        parallel_calls=boolean(body, "parallel_tool_calls", True),
        n=integer(body, "n", 1, low=1, high=CHOICES),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        alternatives=(top or 0) if wanted else None,
        echo=False,
    )
    return check_together(read)


def read_common(body: Json, prompts: int) -> dict[str, Any]:
    """The fields that both routes have."""
    return {
        "uids": read_uids(body.get("uid"), prompts),
        "temperature": number(body, "temperature", 1.0, low=0.0),
        "top_p": number(body, "top_p", 1.0, low=0.0, high=1.0, above=True),
        "top_k": max(0, integer(body, "top_k", 0, low=-1)),  # -1 is vLLM's word for all
        "stop": read_stop(body.get("stop")),
        "seed": integer(body, "seed", None, low=0, high=SEEDS - 1),
        "keep_stop": boolean(body, "include_stop_str_in_output"),
        "token_ids": boolean(body, "return_token_ids"),
        "stream": boolean(body, "stream"),
        "usage": read_stream_options(body),
    }


# -- fields


def field_error(name: str, got: object, wanted: str) -> HttpError:
    """The error of a field's value."""
    return HttpError(f"{name}: got {json.dumps(got)[:80]}, wanted {wanted}", param=name)


def check_fields(body: Json, known: set[str], model: str) -> None:
    """Raise HttpError for another model, a field that is not known, and one that is not neutral."""
    if body.get("model") not in (None, model):
        got = str(body["model"])[:80]
        raise HttpError(f"model: got {got!r}, wanted {model!r}", status=404, param="model", code="model_not_found")
    for name, value in body.items():
        if value is None or name in known or name in LABELS:
            continue
        if name not in NEUTRAL:
            raise field_error(name, value, f"no such field; known here: {', '.join(sorted(known))}")
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]
        ):
            like = " or ".join(map(json.dumps, NEUTRAL[name]))
            raise field_error(name, value, f"{like or 'no value'}: anything else is not supported")


def check_together(read: GenerationBody) -> GenerationBody:
    """The body itself. Raises HttpError for fields that do not fit together."""
    if (many := len(read.prompts) * read.n) > CHOICES:
        raise field_error(
            "n", read.n, f"at most {CHOICES} completions of a request; {len(read.prompts)} prompts make {many}"
        )
    if read.stream and (read.echo or read.alternatives):
        name, got = ("echo", True) if read.echo else ("logprobs", read.alternatives)
        raise field_error(
            name, got, "no echo and no likeliest tokens with stream: they are found when the text is whole"
        )
    if read.truncated and (read.alternatives or (read.echo and read.alternatives is not None)):
        raise field_error(
            "logprobs",
            read.alternatives,
            "top_p 1 and top_k 0 where tokens that were not drawn are scored: under a distribution that was cut they "
            "have no log-prob",
        )
    return read


def integer(body: Json, name: str, default: int | None, *, low: int, high: int | float = math.inf) -> int | None:
    """A whole number of a range."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise field_error(name, value, f"an integer from {low}" + (f" to {high}" if high < math.inf else " on"))
    return value


def number(body: Json, name: str, default: float, *, low: float, high: float = math.inf, above: bool = False) -> float:
    """A finite number of a range; `above`: greater than `low`."""
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6
    if not fits or not low <= value <= high or (above and value == low):
        end = f" to {high:g}" if high < math.inf else " on"
        raise field_error(name, value, f"a number {'above' if above else 'from'} {low:g}{end}")
    return float(value)


def boolean(body: Json, name: str, default: bool = False) -> bool:
    """True or false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise field_error(name, value, "true or false")
    return default if value is None else value


def read_stream_options(body: Json) -> bool:
    """Whether a stream ends with the numbers of tokens."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not body.get("stream") or not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise field_error("stream_options", options, '{"include_usage": true or false}, and "stream": true beside it')
    return boolean(options, "include_usage")


def read_stop(value: object) -> tuple[str, ...] | None:
    """Stop strings."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise field_error("stop", value, "a text or a list of texts that are not empty")
    for text in texts:
        check_unicode("stop", text)
    return tuple(texts)


def read_uids(value: object, prompts: int) -> list[int]:
    """A number for all prompts, or one for each."""
    uids = value if isinstance(value, list) else [0 if value is None else value] * prompts
    fits = all(isinstance(uid, int) and not isinstance(uid, bool) and 0 <= uid < SEEDS for uid in uids)
    if not fits or len(uids) != prompts:
        raise field_error("uid", value, f"an integer from 0 on, or a list of {prompts} of them, one for each prompt")
    return uids


def read_prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    is_id: Callable[[object], bool] = lambda one: isinstance(one, int) and not isinstance(one, bool)  # noqa: E731
    one_alone = isinstance(value, str) or (isinstance(value, list) and value and all(map(is_id, value)))
    prompts = [value] if one_alone else value
    if not isinstance(prompts, list) or not prompts:
        raise field_error("prompt", value, "text, token ids, or a list of one or the other that is not empty")
    for prompt in prompts:
        if isinstance(prompt, str):
            check_unicode("prompt", prompt)
        elif not (isinstance(prompt, list) and prompt and all(map(is_id, prompt))):
            raise field_error("prompt", prompt, "text or a list of token ids that is not empty")
    return prompts


def read_conversation(value: object) -> str:
    """The prompt of messages that end with one of the user."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise field_error("messages", value, "a list of messages, each with role and content")
    try:
        return chat_prompt(read_messages([{k: v for k, v in one.items() if v != []} for one in value]), str)
    except ValueError as error:
        raise HttpError(f"messages: {error}", param="messages") from error


def check_unicode(name: str, text: str) -> None:
    """Raise HttpError for a surrogate alone, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise field_error(name, text[error.start], "Unicode text") from error
