"""Tools in a chat: what the request holds of them, rendered by the chat template; the model's calls, read back.

How a model family writes a call is found by trial: a call is rendered by the template, and the reader of `tool_calls`
that reads it back is the family's. Calls are not constrained: what the model writes is what comes.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.conversation import Conversation
from grpo_fn.core.environment import PlainData, ToolCall
from grpo_fn.shell.episodes import tool_calls
from grpo_fn.shell.episodes.tool_calls import ReadCalls, ReadTurn
from grpo_fn.shell.serving.http_endpoint import HttpError, Json

READERS = (tool_calls.hermes, tool_calls.qwen_xml, tool_calls.llama_json)
TRIED = ToolCall("tool", {"x": "one"})


class ChatAnswer(NamedTuple):
    """What a completion says: its text apart from its calls, and the calls as OpenAI has them."""

    content: str
    calls: Sequence[Json]


ReadAnswer = Callable[[str], ChatAnswer]


def encode_with_tools(tokenizer: PreTrainedTokenizerBase, prompt: str, *, tools: Sequence[Json]) -> list[int]:
    """Token ids of a conversation and the tools, up to where the model writes. Raises HttpError."""
    given = Conversation(prompt).messages
    rendered = tokenizer.apply_chat_template(
        given, tools=[*tools] or None, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return rendered["input_ids"]


def calls_reader_of(tokenizer: PreTrainedTokenizerBase) -> ReadCalls:
    """The reader of calls as the tokenizer's chat template writes them.

    Raises HttpError for a tokenizer without a template, one that shows no tools, and one whose calls no reader reads.
    """
    if tokenizer.chat_template is None:
        raise HttpError("tools: got some for a model without a chat template, wanted none", param="tools")
    question = [{"role": "user", "content": "question"}]
    schema = {"name": TRIED.name, "description": "a tool", "parameters": {"type": "object", "properties": {}}}
    function = {"name": TRIED.name, "arguments": dict(TRIED.arguments)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    def rendered(messages: Sequence[Json], tools: Sequence[Json] | None, *, opens: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=opens, tokenize=False)
        except Exception as error:  # a chat template may raise anything, of its own kinds of errors, too
            said = f"tools: got a chat template that refuses a call of a tool ({error}), wanted one that renders it"
            raise HttpError(said, param="tools") from error

    tools = [{"type": "function", "function": schema}]
    opening = rendered(question, tools, opens=True)
    if opening == rendered(question, None, opens=True):
        raise HttpError("tools: got some for a chat template that does not show them, wanted none", param="tools")
    whole = rendered([*question, call], tools, opens=False)
    before = opening if whole.startswith(opening) else rendered(question, tools, opens=False)
    ids = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    written = tokenizer.decode(ids, skip_special_tokens=True)
    for reader in READERS:
        found = reader(written)
        if found.calls == (TRIED,) and not found.malformed:
            return reader
    names = ", ".join(reader.__name__ for reader in READERS)
    raise HttpError(
        f"tools: got a chat template that writes a call as {written.strip()[:80]!r}, wanted one that {names} reads",
        param="tools",
    )


def reader_for_tools(read_calls: ReadCalls, tools: Sequence[Json]) -> ReadCalls:
    """The reader of a family's calls, by the schemas of the tools where the family writes texts without quotes."""
    if read_calls is not tool_calls.qwen_xml:
        return read_calls
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    return partial(_read_xml_by_schema, schemas=schemas)


def read_answer(text: str, *, read_calls: ReadCalls, parallel: bool) -> ChatAnswer:
    """A completion's text and calls; of one with a malformed call the whole text, and no call.

    Args:
        text: of the completion.
        read_calls: the reader of the family's calls.
        parallel: whether all of its calls are wanted, or the first alone: the others are left out, as vLLM does.

    Returns:
        The text apart from all calls, and the calls that are wanted.
    """
    found = read_calls(text)
    if found.malformed or not found.calls:
        return ChatAnswer(text, ())
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in (found.calls if parallel else found.calls[:1])
    ]
    return ChatAnswer(found.content, calls)


def _read_xml_by_schema(text: str, *, schemas: Json) -> ReadTurn:
    """Calls in XML: an argument that a schema declares to be text is the text as written, `"3"` for `3`."""

    def read_value(tool: str, parameter: str, written: str) -> PlainData:
        declared = _declared(schemas.get(tool), parameter)
        return written if declared == "string" else tool_calls.json_or_text(written)

    return tool_calls.xml_calls(text, read_value)


def _declared(schema: object, parameter: str) -> object:
    """The type of a parameter in a JSON schema; None where it says none."""
    for name in ("properties", parameter, "type"):
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
