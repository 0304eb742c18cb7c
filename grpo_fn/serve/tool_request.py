"""The tools of a chat request and its messages of tools as checked values, in the form that chat templates take.

No torch in here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_fn.core.conversation import Conversation, read_messages
from grpo_fn.shell.serving.http_endpoint import HttpError, Json

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def field_refused(name: str, got: object, wanted: str) -> HttpError:
    """The error of a field of tools or messages."""
    return HttpError(f"{name}: got {json.dumps(got)[:80]}, wanted {wanted}", param=name.partition("[")[0])


def read_tools(body: Json) -> tuple[Json, ...]:
    """The tools of a request as chat templates take them; none where there are none. Raises HttpError."""
    value, choice = body.get("tools"), body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise field_refused(
            "tool_choice", choice, '"none" or "auto": a call cannot be forced, as drawing is not constrained'
        )
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise field_refused("tools", value, "a list of tools")
    tools = tuple(_tool(one, f"tools[{place}]") for place, one in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    if len({*names}) < len(names):
        raise field_refused("tools", names, "each name once")
    return tools


def read_tool_conversation(value: object) -> Conversation:
    """Messages that may hold calls and what tools answered, the last one the user's or a tool's. Raises HttpError."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise field_refused("messages", value, "a list of messages, each with role and content")
    names: dict[str, str] = {}
    found = [_message(one, f"messages[{place}]", names) for place, one in enumerate(value)]
    if found[-1]["role"] not in ("user", "tool"):
        raise field_refused("messages", found[-1]["role"], "a last message of the user or of a tool, which is answered")
    return Conversation(json.dumps(found, ensure_ascii=False))


def _tool(value: object, where: str) -> Json:
    """A tool, checked, with what templates read alone."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise field_refused(where, value, '{"type": "function", "function": {"name": ..., "parameters": {...}}}')
    name, schema, said = (function.get(key) for key in ("name", "parameters", "description"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise field_refused(f"{where}.function.name", name, "1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(schema, dict | None) or not isinstance(said, str | None):
        raise field_refused(
            f"{where}.function", function, "a description that is text and parameters that are a JSON schema"
        )
    if function.get("strict"):
        raise field_refused(f"{where}.function.strict", True, "false: drawing is not constrained to the schema")
    parameters = {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": {"name": name, "description": said or "", "parameters": parameters}}


def _message(value: Mapping[str, Any], where: str, names: dict[str, str]) -> Json:
    """A message as chat templates take it; `names` is what the calls before it are of, by their id."""
    held = {key: one for key, one in value.items() if one not in (None, [])}
    role, calls = held.get("role"), held.pop("tool_calls", [])
    held.pop("refusal", None)
    if role == "tool":
        answered = held.pop("tool_call_id", None)
        if answered not in names:
            raise field_refused(f"{where}.tool_call_id", answered, "the id of a call in a message before it")
        held.pop("name", None)
        (plain,) = _plain([{**held, "role": "user"}], where)
        return {"role": "tool", "content": plain["content"], "name": names[answered], "tool_call_id": answered}
    if not calls:
        (plain,) = _plain([held], where)
        return plain
    if role != "assistant" or not isinstance(calls, list):
        raise field_refused(f"{where}.tool_calls", calls, "a list, in a message of the assistant")
    (plain,) = _plain([{**held, "content": held.get("content", "")}], where)
    return {**plain, "tool_calls": [_call(one, f"{where}.tool_calls[{n}]", names) for n, one in enumerate(calls)]}


def _plain(messages: Sequence[Json], where: str) -> list[dict[str, str]]:
    try:
        return read_messages(messages)
    except ValueError as error:
        raise HttpError(f"{where}: {str(error).removeprefix('message 0: ')}", param="messages") from error


def _call(value: Any, where: str, names: dict[str, str]) -> Json:
    """A call as chat templates take it: its arguments are an object."""
    function = value.get("function") if isinstance(value, dict) else None
    ids = isinstance(function, dict) and isinstance(value.get("id"), str)
    if not ids or not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
        raise field_refused(
            where, value, '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        )
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise field_refused(f"{where}.function.arguments", function["arguments"], "the text of a JSON object")
    names[value["id"]] = function["name"]
    return {"id": value["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
