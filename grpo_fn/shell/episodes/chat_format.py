"""Chat formats: messages as token ids behind what is there already, and sampled token ids as a message.

A row is never rendered again. What the policy sampled, the token that ended its turn included, stays as it is;
observations are put behind it as ids that were not sampled, up to where the policy writes again. A turn that a limit
cut has no end, and ends the episode.

The tokenizer's own chat template is taken where turns can be appended to it exactly, and refused before sampling where
they cannot. Behind a turn stands what the template puts there: rendered are a short conversation and an answer in the
place of the policy's turn, and what stands behind that answer's end token is what is appended.

    tokenizer    of the policy
    read_calls   (text) -> content, calls and what is malformed: `chat_format.hermes`, `chat_format.tags` and their kin
    observed     roles of the observations that environments answer with: "tool", "user"
    text         of a turn
    returns      the format; of a reader of calls the text around them, the calls in order, and what is malformed
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message, PlainData, ToolCall

# -- Tool calls as model families write them, read back from the text of a turn.
#
# Each reader has the signature `(text) -> (content, calls, malformed)`: the text without the calls, the calls, and what
# is wrong with the first one that could not be read.


class ReadTurn(NamedTuple):
    """A turn's text apart from its calls."""

    content: str
    calls: tuple[ToolCall, ...]
    malformed: str


ReadCalls = Callable[[str], ReadTurn]

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_XML = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_TAGS = re.compile(r"<(/?)([A-Za-z_][A-Za-z0-9_]*)>")


def hermes(text: str) -> ReadTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them."""
    return _between_marks(text, partial(_json_call, field="arguments"))


def qwen_xml(text: str) -> ReadTurn:
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, as Qwen3-Coder writes them.

    A value that is JSON is what it says, any other is text.
    """
    return _between_marks(text, _xml_call)


def llama_json(text: str) -> ReadTurn:
    """`{"name": ..., "parameters": {...}}`, as Llama 3 writes a call: it is all that the turn says."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return ReadTurn(text.strip(), (), "")
    call = _json_call(body, field="parameters")
    return ReadTurn("", (call,), "") if isinstance(call, ToolCall) else ReadTurn("", (), call)


def _between_marks(text: str, read: Callable[[str], ToolCall | str]) -> ReadTurn:
    """Calls between <tool_call> and </tool_call>."""
    calls, wrong = [], ""
    for found in _HERMES.finditer(text):
        call = read(found[1]) if found[2] else "got no </tool_call>, expected one behind the call"
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            wrong = wrong or call
    return ReadTurn(_HERMES.sub("", text).strip(), tuple(calls), wrong)


def _xml_call(body: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    function = _XML.fullmatch(body)
    if function is None:
        return "got a tool call without a function, expected <function=name>...</function> alone"
    if rest := _PARAMETER.sub("", function[2]).strip():
        return f"got {rest[:40]!r} in the call of {function[1]}, expected <parameter=name>value</parameter> alone"
    arguments = {name.strip(): _json_or_text(text) for name, text in _PARAMETER.findall(function[2])}
    return ToolCall(function[1].strip(), arguments)


def _json_or_text(text: str) -> PlainData:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _json_call(body: str, *, field: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except RecursionError:
        return "got JSON nested too deeply, expected a call"
    except ValueError as error:
        return f"got a tool call that is no JSON: {error}"
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return f'got a tool call without a name, expected {{"name": ..., "{field}": {{...}}}}'
    arguments = found.get(field, {})
    if not isinstance(arguments, dict):
        return f"got {field} of type {type(arguments).__name__}, expected an object"
    return ToolCall(found["name"], arguments)


def _no_constant(name: str) -> None:
    raise ValueError(f"got {name}, expected a number")


def tags(text: str, *, argument: str) -> ReadTurn:
    """`<name>text</name>`: a call of the tool `name` with one argument, short enough for a tiny model to write.

    Args:
        argument: name of the argument that the text between the tags is.
    """
    calls, wrong, content, place = [], "", [], 0
    while opened := _TAGS.search(text, place):
        content.append(text[place : opened.start()])
        closing = f"</{opened[2]}>"
        end = -1 if opened[1] else text.find(closing, opened.end())
        if end < 0:
            expected = f"<{opened[2]}> before it" if opened[1] else f"{closing} behind it"
            wrong = wrong or f"got {opened[0]}, expected {expected}"
            place = opened.end()
        else:
            calls.append(ToolCall(opened[2], {argument: text[opened.end() : end]}))
            place = end + len(closing)
    return ReadTurn("".join([*content, text[place:]]), tuple(calls), wrong)


def no_calls(text: str) -> ReadTurn:
    """For environments without tools: the whole text is content."""
    return ReadTurn(text, (), "")


# -- chat formats


OPENING = (Message("user", "question"),)
# Turns as a policy may write them: a template that changes one of them cannot be appended to.
TRIED = (
    "answer",
    "",
    " spaces around \n",
    "<think>\nthoughts\n</think>\n\nanswer",
    '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>',
)


@runtime_checkable
class ChatFormat(Protocol):
    """The conversation format of a model family. Implementations: `TextFormat`, `TemplateFormat`."""

    end: int  # the token that ends a turn

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The ids of an episode's first messages, up to where the policy writes."""

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """The ids behind a turn's end token: observations, up to where the policy writes again."""

    def parse(self, turn: Sequence[int]) -> Message:
        """The message of a sampled turn, including its end token."""

    def read(self, turn: Sequence[int]) -> str:
        """The text of a turn as the policy wrote it, its calls and its thinking included, without special tokens."""


MakeChatFormat = Callable[[PreTrainedTokenizerBase], ChatFormat]


class TokenizerFormat:
    """The common part of formats over a tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    read_calls: ReadCalls

    @property
    def end(self) -> int:
        return self.tokenizer.eos_token_id

    def parse(self, turn: Sequence[int]) -> Message:
        content, calls, malformed = self.read_calls(self.read(turn))
        return Message("assistant", content, "", calls, malformed)

    def read(self, turn: Sequence[int]) -> str:
        return self.tokenizer.decode(list(turn), skip_special_tokens=True)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as chat templates and the `renderers` package take them."""
    return [{"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})} for m in messages]


def first_difference(
    tokenizer: PreTrainedTokenizerBase, got: Sequence[int], expected: Sequence[int]
) -> tuple[int, str, str]:
    """The first difference of two rows, with both tokens, in words."""
    pairs = enumerate(zip(got, expected, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    first, second = (
        repr(tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "the end" for ids in (got, expected)
    )
    return place, first, second


@dataclass(frozen=True)
class TextFormat(TokenizerFormat):
    """Messages as plain text, for models that know no chat: each turn of the policy ends with the end of a text."""

    tokenizer: PreTrainedTokenizerBase
    read_calls: ReadCalls

    def open(self, messages: Sequence[Message]) -> list[int]:
        return self._ids("\n".join(message.content for message in messages))

    def extend(self, messages: Sequence[Message]) -> list[int]:
        return self._ids("".join(f"\n{message.content}\n" for message in messages))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def text(tokenizer: PreTrainedTokenizerBase, *, read_calls: ReadCalls) -> TextFormat:
    """A format for models that know no chat: contents as plain text.

    Raises:
        ValueError: for a tokenizer without an end-of-sequence token, as nothing would end a turn.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("chat_format.text: got a tokenizer without an EOS token, expected one: it ends a turn")
    return TextFormat(tokenizer, read_calls)


@dataclass(frozen=True)
class TemplateFormat(TokenizerFormat):
    """A chat template that was found to append turns exactly."""

    tokenizer: PreTrainedTokenizerBase
    observed: tuple[str, ...]  # roles of observations that it was found so for
    read_calls: ReadCalls

    def open(self, messages: Sequence[Message]) -> list[int]:
        return self.render(messages)

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after a turn's end token. Raises ValueError for roles that were not tried with the template."""
        if odd := [message.role for message in messages if message.role not in self.observed]:
            raise ValueError(
                f"chat template: got an observation of role {odd[0]!r}, expected {', '.join(self.observed)}"
            )
        whole, opening = self.render([*OPENING, Message("assistant", TRIED[0]), *messages]), self.render(OPENING)
        return whole[whole.index(self.end, len(opening)) + 1 :]

    def render(self, messages: Sequence[Message]) -> list[int]:
        turns = as_dicts(messages)
        chat = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
        return chat["input_ids"]


def tokenizer_template(
    tokenizer: PreTrainedTokenizerBase, *, observed: Sequence[str], read_calls: ReadCalls
) -> TemplateFormat:
    """The tokenizer's chat template.

    Raises:
        ValueError: for a tokenizer without a template or an EOS token, and for a template to which a turn cannot be
            appended exactly, with the first token that differs.
    """
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ValueError("chat format: got a tokenizer without chat template or EOS token, expected both")
    made = TemplateFormat(tokenizer, tuple(observed), read_calls)
    for role in made.observed:
        for turn in TRIED:
            check_appending(made, turn, [Message(role, "observation")])
    return made


def check_appending(made: TemplateFormat, turn: str, messages: Sequence[Message]) -> None:
    """Raise ValueError, with the first token that differs, unless the turn can be appended exactly."""
    expected = made.render([*OPENING, Message("assistant", turn), *messages])
    try:  # as sampling makes the row
        written = made.tokenizer(turn, add_special_tokens=False)["input_ids"]
        got = [*made.render(OPENING), *written, made.end, *made.extend(messages)]
    except ValueError as error:
        raise ValueError(
            f"chat template: got no {made.tokenizer.eos_token!r} behind a turn ({error}), expected the end-of-turn "
            "token"
        ) from error
    if got != expected:
        place, ours, theirs = first_difference(made.tokenizer, got, expected)
        raise ValueError(
            f"chat template: got {theirs} as token {place} of a conversation with the turn {turn!r} before a "
            f"{messages[0].role} message, expected {ours}: the template changes what was written before, so a turn "
            "cannot be appended to it exactly"
        )


# -- The `renderers` package's formats of model families, for templates that change what was written before.
#
# Its own contract is ours: a bridge to the next turn keeps what was sampled. What it puts behind a turn is asked for
# with a short conversation, as it does not depend on the one that is there.


RENDERED_OPENING = ({"role": "user", "content": "question"},)
# What is put behind must not depend on the turn. Families that open a thought themselves want it closed.
RENDERED_TURNS = (("answer", "another"), ("thought</think>answer", "more thoughts</think>another"))


@dataclass(frozen=True)
class RendererFormat:
    """A renderer of the package, as a chat format."""

    tokenizer: PreTrainedTokenizerBase
    renderer: Any  # renderers.Renderer, whose package is optional
    end: int

    def open(self, messages: Sequence[Message]) -> list[int]:
        return list(self.renderer.render_ids(as_dicts(messages), add_generation_prompt=True))

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after a turn's end token. Raises ValueError if the renderer cannot append exactly."""
        for pair in RENDERED_TURNS:
            first, second = (self._behind(turn, messages) for turn in pair)
            if first is None or second is None:
                continue
            if first != second:
                raise ValueError("renderer: got observations that depend on the turn before, expected the same tokens")
            return first
        raise ValueError(
            f"renderer: got no bridge from a turn to messages of {', '.join(m.role for m in messages)}, expected one "
            "that keeps what was sampled"
        )

    def parse(self, turn: Sequence[int]) -> Message:
        """The text and the calls, as the family's parser reads them; thinking is not part of the text."""
        before = self.renderer.render_ids(
            list(RENDERED_OPENING), add_generation_prompt=True
        )  # which may open a thought
        found = self.renderer.parse_response(list(turn), prompt_ids=before)
        calls, wrong = [], ""
        for call in found.tool_calls:
            if call.status == "ok" and call.name is not None and isinstance(call.arguments, dict):
                calls.append(ToolCall(call.name, call.arguments))
            else:
                wrong = wrong or f"got a tool call that is {call.status}: {call.raw[:80]!r}"
        return Message("assistant", found.content, "", tuple(calls), wrong)

    def read(self, turn: Sequence[int]) -> str:
        return self.tokenizer.decode(list(turn), skip_special_tokens=True)

    def _behind(self, turn: str, messages: Sequence[Message]) -> list[int] | None:
        """The tokens that the package's bridge puts after a turn; None if no bridge keeps the turn."""
        before = self.renderer.render_ids(list(RENDERED_OPENING), add_generation_prompt=True)
        written = [*self.tokenizer(turn, add_special_tokens=False)["input_ids"], self.end]
        found = self.renderer.bridge_to_next_turn(before, written, as_dicts(messages))
        row = [*before, *written]
        return None if found is None or list(found.token_ids[: len(row)]) != row else list(found.token_ids[len(row) :])


def check_conversation(made: RendererFormat, role: str) -> None:
    """Compare a row with the conversation as the package renders it whole.

    Raises ValueError, with the first token that differs, where turns cannot be appended exactly, and for a family that
    ends turns with the beginning of the next message.
    """
    name = "tool"
    call = {"type": "function", "id": "functions.tool:0", "function": {"name": name, "arguments": {"x": 1}}}
    called = {"content": "", "tool_calls": [call]} if role == "tool" else {"content": "answer"}
    observed = {"role": role, "content": "observation"}
    if role == "tool":
        observed |= {"name": name, "tool_call_id": call["id"]}
    opened = made.renderer.render_ids(list(RENDERED_OPENING), add_generation_prompt=True)
    for thought in ({}, {"reasoning_content": "thoughts"}):  # families whose prompts open a thought render one
        said = [*RENDERED_OPENING, {"role": "assistant", **called, **thought}, observed]
        whole = list(made.renderer.render_ids(said, add_generation_prompt=True))
        if whole[: len(opened)] == opened:
            break
    rest = whole[len(opened) :]
    turn = rest[: rest.index(made.end) + 1] if made.end in rest else rest
    row = [*opened, *turn, *made.extend([Message(role, "observation", observed.get("name", ""))])]
    if row != whole:
        place, got, expected = first_difference(made.tokenizer, row, whole)
        raise ValueError(
            f"renderer: got {got} as token {place} of a conversation with a {role} message, expected {expected}, as "
            "the package renders it whole: turns of this family cannot be appended exactly"
        )


def family_renderer(tokenizer: PreTrainedTokenizerBase, *, family: str, observed: Sequence[str]) -> RendererFormat:
    """The format of a model family, by the `renderers` package (extra `agents`).

    Args:
        family: the package's name of the family: "qwen3", "glm-5", ...

    Raises:
        ValueError: where the package is missing, does not know the family, or cannot append observations of such roles
            exactly, with the first token that differs.
    """
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise ValueError(
            f"chat_format.family_renderer: got no package renderers ({error}), expected pip install grpo_fn[agents]"
        ) from error
    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
    except (ValueError, KeyError, AssertionError) as error:
        raise ValueError(
            f"chat_format.family_renderer.family: got {family!r} ({error}), expected one that the package knows and "
            "whose special tokens the tokenizer has"
        ) from error
    ends = renderer.get_stop_token_ids()
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    made = RendererFormat(tokenizer, renderer, end)
    for role in observed:
        check_conversation(made, role)
    return made
