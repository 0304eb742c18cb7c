"""Tool calls as model families write them, read back from the text of a turn.

Each reader has the signature `(text) -> (content, calls, malformed)`: the text without the calls, the calls, and what
is wrong with the first one that could not be read.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from grpo_fn.core.environment import PlainData, ToolCall


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
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them.

    Args:
        text: of a turn.

    Returns:
        The text around the calls, the calls in order, and what is malformed.
    """
    return _between_marks(text, partial(_json_call, field="arguments"))


def qwen_xml(text: str) -> ReadTurn:
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, as Qwen3-Coder writes them.

    A value that is JSON is what it says, any other is text.

    Args:
        text: of a turn.

    Returns:
        The text around the calls, the calls in order, and what is malformed.
    """
    return _between_marks(text, _xml_call)


def llama_json(text: str) -> ReadTurn:
    """`{"name": ..., "parameters": {...}}`, as Llama 3 writes a call: it is all that the turn says.

    Args:
        text: of a turn.

    Returns:
        No text and the call; the text where it does not begin as a call does; what is malformed.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return ReadTurn(text.strip(), (), "")
    call = _json_call(body, field="parameters")
    return ReadTurn("", (call,), "") if isinstance(call, ToolCall) else ReadTurn("", (), call)


def _between_marks(text: str, read: Callable[[str], ToolCall | str]) -> ReadTurn:
    """Calls between <tool_call> and </tool_call>."""
    calls, wrong = [], ""
    for found in _HERMES.finditer(text):
        call = read(found[1]) if found[2] else "got no </tool_call>, wanted one behind the call"
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            wrong = wrong or call
    return ReadTurn(_HERMES.sub("", text).strip(), tuple(calls), wrong)


def _xml_call(body: str) -> ToolCall | str:
    """The call, or what is wrong with it."""
    function = _XML.fullmatch(body)
    if function is None:
        return "got a tool call without a function, wanted <function=name>...</function> alone"
    if rest := _PARAMETER.sub("", function[2]).strip():
        return f"got {rest[:40]!r} in the call of {function[1]}, wanted <parameter=name>value</parameter> alone"
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
        return "got JSON nested too deeply, wanted a call"
    except ValueError as error:
        return f"got a tool call that is no JSON: {error}"
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return f'got a tool call without a name, wanted {{"name": ..., "{field}": {{...}}}}'
    arguments = found.get(field, {})
    if not isinstance(arguments, dict):
        return f"got {field} of type {type(arguments).__name__}, wanted an object"
    return ToolCall(found["name"], arguments)


def _no_constant(name: str) -> None:
    raise ValueError(f"got {name}, wanted a number")


def tags(text: str, *, argument: str) -> ReadTurn:
    """`<name>text</name>`: a call of the tool `name` with one argument, short enough for a tiny model to write.

    Args:
        text: of a turn.
        argument: name of the argument that the text between the tags is.

    Returns:
        The text around the calls, the calls in order, and what is malformed.
    """
    calls, wrong, content, place = [], "", [], 0
    while opened := _TAGS.search(text, place):
        content.append(text[place : opened.start()])
        closing = f"</{opened[2]}>"
        end = -1 if opened[1] else text.find(closing, opened.end())
        if end < 0:
            wanted = f"<{opened[2]}> before it" if opened[1] else f"{closing} behind it"
            wrong = wrong or f"got {opened[0]}, wanted {wanted}"
            place = opened.end()
        else:
            calls.append(ToolCall(opened[2], {argument: text[opened.end() : end]}))
            place = end + len(closing)
    return ReadTurn("".join([*content, text[place:]]), tuple(calls), wrong)


def no_calls(text: str) -> ReadTurn:
    """For environments without tools: the whole text is content.

    Args:
        text: of a turn.

    Returns:
        The text, and no calls.
    """
    return ReadTurn(text, (), "")
