"""Questions that are answered with the help of tools: a turn calls some, or gives the answer and ends the episode."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Completion, Problem, RewardFn
from grpo_fn.environments.tools import Tool, answer_calls, describe_tools, tools_by_name


def environment(
    *, tools: Sequence[Tool], grade: RewardFn, instructions: str, max_turns: int, pure: bool
) -> Environment:
    """The environment of questions with tools.

    Args:
        tools: functions that the policy may call, each by its name, their knobs bound (`environments.tools`).
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
        raise ValueError(f"got {len(tools)} tools and max_turns {max_turns}, wanted at least 1 of each")
    named = tools_by_name(tools)
    return Environment(
        start=partial(start, instructions=instructions.replace("{tools}", describe_tools(named))),
        step=partial(step, answer=partial(answer_calls, named), grade=grade, max_turns=max_turns),
        pure=pure,
    )


def start(problem: Problem, key: int, *, instructions: str) -> Start:
    """The question, after the instructions.

    Args:
        problem: the question and its answer.
        key: not read.
        instructions: text of the system message; "" for none.

    Returns:
        The state, which holds the question, its answer and the turns taken; the messages.
    """
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
    """The tools' answers; the grade, and the end, where the message calls none.

    Args:
        state: as `start` or the last step returned it.
        message: of the policy.
        key: not read.
        answer: the observations that answer the calls of a message.
        grade: what an answer is worth.
        max_turns: turns after which the episode ends; the calls of the last one are not made, and it is worth 0.

    Returns:
        The step; its reward is 0 for a turn that calls tools.
    """
    turns = state["turns"] + 1
    after = {**state, "turns": turns}
    if not message.calls and not message.malformed:
        asked = Problem(0, state["prompt"], state["answer"], {})
        return Step(after, (), grade(asked, Completion(message.content, 0, False)), True)
    if turns >= max_turns:
        return Step(after, (), 0.0, True)
    return Step(after, answer(message), 0.0, False)
