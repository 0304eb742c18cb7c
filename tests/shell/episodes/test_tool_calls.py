"""Readers of tool calls are total: any text gives content, calls and what is malformed."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.environment import ToolCall
from grpo_fn.shell.episodes.chat_format import ReadTurn, hermes, llama_json, qwen_xml, tags

names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
pieces = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', "<f>", "</f>", "[" * 9999, "text", "{"]
pieces += ["<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>"]
texts = st.text("ab é\n", min_size=1).map("t{}t".format)
values = st.integers() | st.booleans() | st.lists(st.integers(), max_size=2) | texts


@given(st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=7).map("".join))
def test_readers_are_total(text: str) -> None:
    for found in (hermes(text), qwen_xml(text), llama_json(text), tags(text, argument="x")):
        assert isinstance(found, ReadTurn)
        assert all(isinstance(call, ToolCall) for call in found.calls)


@given(names, st.dictionaries(names, st.integers() | st.text("ab é", max_size=5), max_size=3), st.integers(0, 3))
def test_hermes_calls_are_read_as_written(name: str, arguments: dict, count: int) -> None:
    written = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    assert hermes("before " + written * count) == ReadTurn("before", (ToolCall(name, arguments),) * count, "")


@given(names, st.dictionaries(names, values, max_size=3), st.integers(0, 3))
def test_xml_calls_are_read_as_written(name: str, arguments: dict, count: int) -> None:
    said = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said.items())
    written = f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"
    assert qwen_xml("before " + written * count) == ReadTurn("before", (ToolCall(name, arguments),) * count, "")


@given(names, st.dictionaries(names, values, max_size=3), st.sampled_from(["", "<|python_tag|>"]))
def test_llama_calls_are_read_as_written(name: str, arguments: dict, before: str) -> None:
    written = before + json.dumps({"name": name, "parameters": arguments})
    assert llama_json(written) == ReadTurn("", (ToolCall(name, arguments),), "")
    assert llama_json(f"It is {written}") == ReadTurn(f"It is {written}", (), "")


@given(names, st.text("0123+* ", max_size=6))
def test_tags_are_read_as_written(name: str, argument: str) -> None:
    assert tags(f"a<{name}>{argument}</{name}>b", argument="x") == ReadTurn(
        "ab", (ToolCall(name, {"x": argument}),), ""
    )


one_tag = partial(tags, argument="x")


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (hermes, "<tool_call>{}", "got no </tool_call>"),
        (hermes, "<tool_call>{</tool_call>", "no JSON"),
        (hermes, '<tool_call>{"name": 1}</tool_call>', "without a name"),
        (hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments of type list"),
        (hermes, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "got NaN"),
        (qwen_xml, "<tool_call>f</tool_call>", "without a function"),
        (qwen_xml, "<tool_call><function=f>x=1</function></tool_call>", "got 'x=1' in the call of f"),
        (llama_json, '{"name": "f", "parameters": 3}', "parameters of type int"),
        (one_tag, "<f>1", "got <f>, expected </f>"),
        (one_tag, "1</f>", "got </f>, expected <f>"),
    ],
)
def test_a_malformed_call_is_reported(read, text: str, said: str) -> None:
    assert said in read(text).malformed
