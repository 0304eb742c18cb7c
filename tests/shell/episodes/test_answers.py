"""What environments answer: plain data comes back as it was, anything else is refused and named."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from environment_fakes import TALK
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.environment import Environment, Message, Step, ToolCall
from grpo_fn.core.problem import Problem, Turn
from grpo_fn.shell.episodes import episode_rows as tapes
from grpo_fn.shell.episodes.answers import EnvironmentCall, decode_answer, read_entry, state_digest
from grpo_fn.shell.episodes.chat_format import ReadTurn, hermes, llama_json, qwen_xml, tags

PROBLEM = Problem(1, "question", "", {})
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def answering(step: Callable[..., object]) -> EnvironmentCall:
    return EnvironmentCall(Environment(start=TALK.start, step=step, pure=True))


@given(plain, st.text(max_size=5), st.none() | st.floats(-9, 9), st.booleans())
def test_an_answer_comes_back_as_it_was(state, content, reward, done) -> None:
    said = (Message("tool", content, "name"),)
    got = decode_answer(answering(lambda *_: Step(state, said, reward, done))("step", None, said[0], 0))
    assert got[:4] == (state, said, reward, done)
    assert read_entry(got.entry()) == got._replace(state=None)
    assert json.loads(got.entry())["state"] == state_digest(state)
    if isinstance(state, dict):
        assert state_digest(dict(reversed(state.items()))) == state_digest(state)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "got NoneType from the environment, expected a Step"),
        (Step({"a": [1, {2}]}, (), 0.0, True), r"state\['a'\]\[1\]: got set \{2\}, expected plain data"),
        (Step({1: 2}, (), 0.0, True), "state: got the key 1, expected text"),
        (Step(None, ("text",), 0.0, True), "messages: got str, expected Message"),
        (Step(None, (Message("assistant", "x"),), 0.0, True), "got role 'assistant'"),
        (Step(None, (), float("inf"), True), "reward: got float inf"),
        (Step(None, (), 0.0, 1), "done: got int, expected True or False"),
    ],
)
def test_values_that_are_no_answers_are_refused(answer, said) -> None:
    with pytest.raises(ValueError, match=said):
        answering(lambda *_: answer)("step", None, Message("assistant", ""), 0)


def stored(turns: list[Turn]) -> dict:
    row = {"uid": 3, "g": 1, "tokens": [5, 6, 7, 8], "mask": [0, 0, 1, 1], "turns": [turn._asdict() for turn in turns]}
    return {**row, "tape": tapes.tape_digest(turns)}


@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from(["answer", "state"]))
def test_a_changed_tape_is_found_out(count: int, at: int, name: str) -> None:
    turns = [Turn(str(n), 1, "", 0.0, f"s{n}", 0, "", "", f"answer {n}") for n in range(count)]
    tape = tapes.Tape()
    tape.add([stored(turns)])
    assert tape.of(3, 1) == tapes.Taped((5, 6), tuple(turns))
    row = stored(turns)
    row["turns"][at % count][name] += "!"
    with pytest.raises(ValueError, match="tape of problem 3, sample 1: got turns with the digest"):
        tape.add([row])


# -- calls in a turn's text


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
