"""Tools from signatures: what a schema says, and what happens to calls that do not fit."""

import json
from functools import partial
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.environments.tool_use import answer_calls, describe_tools, tool_schema, tools_by_name


def convert(amount: float, unit: Literal["km", "mile"], digits: int = 2, *, factor: float) -> str:
    """Convert a length
    to the other unit.

    More of it.

    Args:
        amount: the length,
            in the unit
        unit: what it is in
        factor: km in a mile.
    """
    return f"{amount * factor:.{digits}f} {unit}"


def listed(words: list[str], loud: bool) -> dict:
    return {"words": words, "loud": loud}


def refuses(text: str) -> str:
    raise ValueError(f"got {text!r}, expected something else")


TOOLS = tools_by_name([partial(convert, factor=1.6), listed, refuses])


def answer(name: str, arguments) -> str:
    (message,) = answer_calls(TOOLS, Message("assistant", "", calls=(ToolCall(name, arguments),)))
    assert message.role == "tool"
    assert message.name == name
    return message.content


def test_a_schema_has_the_positional_parameters_and_their_lines():
    assert tool_schema("convert", TOOLS["convert"]) == {
        "type": "function",
        "function": {
            "name": "convert",
            "description": "Convert a length to the other unit.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "number", "description": "the length, in the unit"},
                    "unit": {"type": "string", "enum": ["km", "mile"], "description": "what it is in"},
                    "digits": {"type": "integer"},
                },
                "required": ["amount", "unit"],
            },
        },
    }
    properties = tool_schema("listed", listed)["function"]["parameters"]["properties"]
    assert properties == {"words": {"type": "array", "items": {"type": "string"}}, "loud": {"type": "boolean"}}
    described = [json.loads(line)["function"]["name"] for line in describe_tools(TOOLS).splitlines()]
    assert described == ["convert", "listed", "refuses"]


def test_a_call_is_answered_by_its_tool():
    assert answer("convert", {"amount": 2, "unit": "km"}) == "3.20 km"
    assert json.loads(answer("listed", {"words": ["é"], "loud": True})) == {"words": ["é"], "loud": True}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("translate", {}, "error: got the tool 'translate', expected one of convert, listed, refuses"),
        ("convert", {"amount": 2}, "error: arguments of convert: got amount, expected amount, unit, digits"),
        ("convert", {"amount": 2, "unit": "km", "factor": 9.0}, "error: arguments of convert: got amount, unit, f"),
        ("convert", {"amount": "2", "unit": "km"}, "error: amount of convert: got str '2', expected a value of"),
        ("convert", {"amount": True, "unit": "km"}, "error: amount of convert: got bool True, expected"),
        ("convert", {"amount": 2.0, "unit": "inch"}, "error: unit of convert: got str 'inch', expected one of ['km'"),
        ("listed", {"words": ["a", 1], "loud": False}, "error: words of listed: got list ['a', 1], expected"),
        ("refuses", {"text": "x"}, "error: got 'x', expected something else"),
    ],
)
def test_a_call_that_does_not_fit_is_answered_with_got_and_expected(name, arguments, said):
    assert answer(name, arguments).startswith(said)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
names = st.one_of(st.sampled_from([*TOOLS, "amount", "unit", "words", "text", "digits"]), st.text(max_size=5))


@given(names, st.dictionaries(names, plain, max_size=3))
def test_any_arguments_are_answered(name, arguments):
    if name == "convert" and isinstance(arguments.get("digits"), int):
        arguments["digits"] = 2  # the tool itself computes what it is asked for
    assert isinstance(answer(name, arguments), str)


def test_every_call_has_an_answer_and_so_has_what_could_not_be_read():
    good, bad = ToolCall("listed", {"words": [], "loud": True}), ToolCall("nothing", {})
    message = Message("assistant", "", calls=(good, bad), malformed="got '{', expected a JSON object")
    answers = answer_calls(TOOLS, message)
    assert [one.name for one in answers] == ["listed", "nothing", ""]
    assert answers[2].content == "error: got '{', expected a JSON object"
    assert answer_calls(TOOLS, Message("assistant", "all is well")) == ()


def any_number(*numbers: int) -> int:
    return 0


def untyped(text) -> str:
    return text


def nested(rows: list[list[int]]) -> int:
    return 0


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([untyped], r"the tool untyped, argument text: got the annotation .*, expected str"),
        ([nested], r"the tool nested, argument rows: got the annotation .*, expected str"),
        ([any_number], r"the tool any_number: got the parameter \*numbers: int, expected named"),
        ([convert, listed, partial(convert, factor=2.0)], "got two of the name 'convert', expected each name once"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(tools, said):
    with pytest.raises(ValueError, match=said):
        tools_by_name(tools)
