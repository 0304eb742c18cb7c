"""Questions with tools: calls are answered, the first message without one is graded and ends the episode."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from profiles import profile, quarter

from experiments.tiny import tasks
from grpo_fn import testing
from grpo_fn.core import prng
from grpo_fn.core.environment import Message, ToolCall, play_script
from grpo_fn.core.problem import Problem
from grpo_fn.environments import tool_use
from grpo_fn.environments.tools import calculator
from grpo_fn.rewards import math

KEY = prng.key(5, device="cpu")
TASK = tasks.products(max_value=99, test_size=16)
PROBLEMS = st.sampled_from([TASK.train(KEY, index) for index in range(100)])
QUESTIONS = tool_use.environment(tools=[calculator], grade=math.correct, instructions="", max_turns=3, pure=True)


def asks(expression):
    return Message("assistant", "", calls=(ToolCall("calculator", {"expression": expression}),))


def boxed(answer):
    return Message("assistant", rf"\boxed{{{answer}}}")


@given(PROBLEMS)
def test_the_tool_gives_the_answer_and_the_answer_is_right(problem):
    messages = (asks(problem.meta["expression"]), boxed(problem.answer))
    start, (call, end) = play_script(QUESTIONS, problem, messages, 0)
    assert start.messages == (Message("user", problem.prompt),)
    assert call.messages == (Message("tool", problem.answer, "calculator"),)
    assert (call.reward, call.done) == (0.0, False)
    assert (end.reward, end.done) == (1.0, True)
    assert play_script(QUESTIONS, problem, [boxed("wrong")], 0)[1][0].reward == 0.0


def test_a_malformed_call_is_answered_and_does_not_end_the_episode():
    message = Message("assistant", r"\boxed{42}", malformed="got '{', expected JSON")
    (step,) = play_script(QUESTIONS, Problem(0, "?", "42", {}), [message], 0)[1]
    assert step.messages == (Message("tool", "error: got '{', expected JSON"),)
    assert not step.done


def test_calls_that_never_stop_end_with_nothing():
    _, steps = play_script(QUESTIONS, Problem(0, "?", "42", {}), [asks("6*7")] * 5, 0)
    assert [step.done for step in steps] == [False, False, True]
    assert [step.reward for step in steps] == [0.0] * 3
    assert steps[-1].messages == ()


def test_a_gold_that_cannot_be_read_makes_the_turn_unscorable():
    (step,) = play_script(QUESTIONS, Problem(0, "?", "", {}), [boxed(1)], 0)[1]
    assert (step.reward, step.done) == (None, True)


def test_instructions_come_first_and_name_the_tools():
    environment = tool_use.environment(
        tools=[calculator],
        grade=math.correct,
        instructions="You may call:\n{tools}",
        max_turns=3,
        pure=True,
    )
    system, user = environment.start(Problem(0, "?", "1", {}), 0).messages
    assert system.role == "system"
    assert system.content.startswith('You may call:\n{"type": "function", "function": {"name": "calculator", ')
    assert user == Message("user", "?")


def test_the_environment_is_fit_for_a_run():
    expressions = st.one_of(st.sampled_from(["1+1", "2*3", "1/0", "9" * 90]), st.text(max_size=9))
    written = st.one_of(expressions.map(asks), st.integers(0, 99).map(boxed))
    with profile(max_examples=quarter() // 2):
        testing.check_environment(QUESTIONS, problems=PROBLEMS, messages=written, max_turns=3)


@pytest.mark.parametrize(("tools", "max_turns"), [([], 3), ([calculator], 0)])
def test_no_tools_and_no_turns_are_refused(tools, max_turns):
    said = f"got {len(tools)} tools and max_turns {max_turns}, expected at least 1 of each"
    with pytest.raises(ValueError, match=said):
        tool_use.environment(tools=tools, grade=math.correct, instructions="", max_turns=max_turns, pure=True)
