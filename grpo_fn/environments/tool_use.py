"""Questions that are answered with the help of tools: a turn calls some, or gives the answer and ends the episode."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step, ToolCall
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Completion, Problem, RewardFn

# -- Tools as plain functions: their JSON schema from the signature, and calls of them by name.
#
# A tool's positional parameters are the arguments that the policy writes; its keyword-only parameters are knobs, which
# gin binds and no schema shows. It returns text or other plain data, and raises ValueError for arguments that it cannot
# use, in words that the policy can read.


Tool = Callable[..., PlainData]

# Types of arguments, as JSON schema has them.
_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The tools by the names that the policy calls them by: those of their functions."""
    named: dict[str, Tool] = {}
    for tool in tools:
        name = function_and_knobs(tool)[0].__name__
        if name in named:
            raise ValueError(f"tools: got two of the name {name!r}, expected each name once")
        for parameter in inspect.signature(tool).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ValueError(f"the tool {name}: got the parameter {parameter}, expected named arguments")
        for parameter in _arguments(tool).values():
            _argument_schema(name, parameter)
        named[name] = tool
    return named


def tool_schema(name: str, tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it, called `name`: a JSON schema of its positional parameters' annotations.

    The description is the first paragraph of its docstring; an argument's is its line under `Args:`.
    """
    doc = inspect.getdoc(function_and_knobs(tool)[0]) or ""
    described = _described_arguments(doc)
    arguments = _arguments(tool)
    properties = {
        argument: _argument_schema(name, parameter)
        | ({"description": described[argument]} if argument in described else {})
        for argument, parameter in arguments.items()
    }
    required = [argument for argument, parameter in arguments.items() if parameter.default is parameter.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(doc.partition("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def describe_tools(tools: Mapping[str, Tool]) -> str:
    """The tools' schemas, a line of JSON each, for a system message."""
    return "\n".join(json.dumps(tool_schema(name, tool), ensure_ascii=False) for name, tool in tools.items())


def answer_calls(tools: Mapping[str, Tool], message: Message) -> tuple[Message, ...]:
    """The observations of a message's tool calls, one for each call; one for what could not be read as a call.

    An unknown tool, arguments that do not fit and a ValueError of the tool are observations that begin with `error:`.
    """
    return answer_each(message, answer=partial(_answer, tools))


def answer_each(message: Message, *, answer: Callable[[ToolCall], str]) -> tuple[Message, ...]:
    """The observations of a message's tool calls, wherever the tools are."""
    answers = tuple(Message("tool", answer(call), call.name) for call in message.calls)
    return (*answers, Message("tool", f"error: {message.malformed}")) if message.malformed else answers


def _answer(tools: Mapping[str, Tool], call: ToolCall) -> str:
    try:
        tool = tools.get(call.name)
        if tool is None:
            raise ValueError(f"got the tool {call.name!r}, expected one of {', '.join(tools)}")
        _check_arguments(call.name, tool, call.arguments)
        answer = tool(**call.arguments)
    except ValueError as error:
        return f"error: {error}"
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _check_arguments(name: str, tool: Tool, given: Mapping[str, PlainData]) -> None:
    arguments = _arguments(tool)
    needed = {argument for argument, parameter in arguments.items() if parameter.default is parameter.empty}
    if not needed <= given.keys() <= arguments.keys():
        got = ", ".join(map(str, given)) or "none"
        raise ValueError(f"arguments of {name}: got {got}, expected {', '.join(arguments) or 'none'}")
    for argument, value in given.items():
        expected = arguments[argument].annotation
        if not _fits(value, expected):
            shown = _argument_schema(name, arguments[argument])
            said = f"one of {shown['enum']}" if "enum" in shown else f"a value of type {shown['type']}"
            raise ValueError(f"{argument} of {name}: got {type(value).__name__} {value!r:.80}, expected {said}")


def _arguments(tool: Tool) -> dict[str, inspect.Parameter]:
    """The parameters that the policy fills: the positional ones."""
    parameters = inspect.signature(tool).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD}


def _argument_schema(name: str, parameter: inspect.Parameter) -> dict[str, Any]:
    expected = parameter.annotation
    if expected in _TYPES:
        return {"type": _TYPES[expected]}
    inner = get_args(expected)
    if get_origin(expected) is Literal and all(isinstance(one, str) for one in inner):
        return {"type": "string", "enum": list(inner)}
    if get_origin(expected) is list and inner[0] in _TYPES:
        return {"type": "array", "items": {"type": _TYPES[inner[0]]}}
    raise ValueError(
        f"the tool {name}, argument {parameter.name}: got the annotation {expected!r}, expected str, int, float, "
        "bool, a list of one of these, or a Literal of texts"
    )


def _fits(value: PlainData, expected: Any) -> bool:
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    if get_origin(expected) is list:
        return isinstance(value, list) and all(_fits(one, get_args(expected)[0]) for one in value)
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected


def _described_arguments(doc: str) -> dict[str, str]:
    """Each argument's line under `Args:`, with the lines that go on from it."""
    found: dict[str, str] = {}
    section = doc.partition("\nArgs:\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        name, colon, text = line.strip().partition(": ")
        if line.startswith("    ") and not line.startswith("     ") and colon:
            found[name] = text
        elif found:
            found[list(found)[-1]] += f" {line.strip()}"
    return found


def environment(
    *, tools: Sequence[Tool], grade: RewardFn, instructions: str, max_turns: int, pure: bool
) -> Environment:
    """The environment of questions with tools.

    Args:
        tools: functions that the policy may call, each by its name, their knobs bound (`environments.tool_use`).
        grade: what the text of the last turn is worth to the problem; reads its prompt and answer alone.
        instructions: system message; `{tools}` in it is the tools' JSON schemas, a line each; "" for none.
        max_turns: turns after which the episode ends without an answer.
        pure: whether every tool is a pure function of its arguments.

    Returns:
        The environment.

    Raises:
        ValueError: for no tools, two of one name, or fewer than one turn.
    """
    if not tools or max_turns < 1:
        raise ValueError(f"got {len(tools)} tools and max_turns {max_turns}, expected at least 1 of each")
    named = tools_by_name(tools)
    return Environment(
        start=partial(start, instructions=instructions.replace("{tools}", describe_tools(named))),
        step=partial(step, answer=partial(answer_calls, named), grade=grade, max_turns=max_turns),
        pure=pure,
    )


def start(problem: Problem, key: int, *, instructions: str) -> Start:
    """The question, after the instructions if there are any."""
    system = (Message("system", instructions),) if instructions else ()
    state = {"prompt": str(problem.prompt), "answer": problem.answer, "turns": 0}
    return Start(state, (*system, Message("user", problem.prompt)))


def step(
    state: Mapping[str, PlainData],
    message: Message,
    key: int,
    *,
    answer: Callable[[Message], tuple[Message, ...]],
    grade: RewardFn,
    max_turns: int,
) -> Step:
    """The tools' answers, worth 0; the grade, and the end, where the message calls none.

    The calls of turn `max_turns` are not made: it is the end, and worth 0.
    """
    turns = state["turns"] + 1
    after = {**state, "turns": turns}
    if not message.calls and not message.malformed:
        asked = Problem(0, state["prompt"], state["answer"], {})
        return Step(after, (), grade(asked, Completion(message.content, 0, False)), True)
    if turns >= max_turns:
        return Step(after, (), 0.0, True)
    return Step(after, answer(message), 0.0, False)
