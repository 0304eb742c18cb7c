"""Programs in episodes: Python as a tool, and another try after failing tests, in the real sandbox."""

from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given
from profiles import profile

from grpo_fn import sandbox, testing
from grpo_fn.core.environment import Message, ToolCall, play_script
from grpo_fn.core.problem import Problem, Ran
from grpo_fn.environments import retry_program, tool_use, tools
from grpo_fn.rewards import math

KNOBS = {"wall_seconds": 20.0, "cpu_seconds": 1, "memory_mb": 256, "processes": 8, "file_mb": 8, "output_kb": 64}
LIMITED = next(name for name, amiss in sandbox.available().items() if not amiss)
RUN = partial(sandbox.run_program, **KNOBS, isolation=getattr(sandbox.isolation, LIMITED))
TESTS = ("assert add(1, 2) == 3", "assert add(2, 2) == 4")
ADD = Problem(0, "Write add(a, b).", "def add(a, b):\n    return a + b", {"tests": TESTS})
RETRY = retry_program.environment(run=RUN, max_tries=3, shown_tests=1)
RIGHT, WRONG = "def add(a, b):\n    return a + b", "print('hm', 1)\ndef add(a, b):\n    return 3"


def says(*contents):
    return [Message("assistant", f"```python\n{content}\n```") for content in contents]


def python(code):
    return tools.python(code, run=RUN)


# -- Python as a tool


def test_the_tool_answers_with_what_the_program_printed():
    assert python("import math\nprint(math.comb(10, 3))") == "120"
    assert python("x = 1") == "(the program printed nothing)"
    assert python("print('a' * 500 + 'b' * 999)") == "a" + "b" * 999


def test_a_program_that_fails_is_answered_with_why():
    assert "ZeroDivisionError" in python("print('before')\n1 / 0")
    assert python("while True: pass").startswith("error: ")
    assert "SyntaxError" in python("print(")
    assert python("import os\nos._exit(0)").startswith("error: ")
    with pytest.raises(ValueError, match="got an empty program"):
        python(" \n")


def test_a_word_problem_is_solved_with_python():
    python = partial(tools.python, run=RUN)
    play = tool_use.environment(tools=[python], grade=math.correct, instructions="", max_turns=3, pure=False)
    call = Message("assistant", "", calls=(ToolCall("python", {"code": "print(sum(range(101)))"}),))
    answer = Message("assistant", r"So it is \boxed{5050}.")
    _, (ran, end) = play_script(play, Problem(0, "1 + ... + 100?", "5050", {}), [call, answer], 0)
    assert ran.messages[0].content == "5050"
    assert (end.reward, end.done) == (1.0, True)


# -- another try


def test_a_failing_program_is_shown_what_failed_and_the_next_one_passes():
    _, (first, second) = play_script(RETRY, ADD, says(WRONG.replace("3", "5"), RIGHT), 0)
    assert (first.reward, first.done) == (0.0, False)
    lines = first.messages[0].content.splitlines()
    assert lines[0].startswith("The program fails 2 of 2 tests: ")
    assert lines[1] == "assert add(1, 2) == 3"
    assert "add(2, 2)" not in first.messages[0].content
    assert lines[2:] == ["It printed:", "hm 1", "Write the whole program again."]
    assert (second.reward, second.done, second.messages) == (1.0, True, ())


def test_a_test_that_was_held_back_is_not_shown():
    (step,) = play_script(RETRY, ADD, says(WRONG), 0)[1]
    assert step.messages[0].content.splitlines()[1] == "The tests that fail are not among those shown."
    assert "add(2, 2)" not in step.messages[0].content


def test_after_the_last_try_it_is_over():
    _, steps = play_script(RETRY, ADD, says(*["x = 1"] * 5), 0)
    assert [step.done for step in steps] == [False, False, True]
    assert [step.reward for step in steps] == [0.0] * 3


@given(st.lists(st.sampled_from([True, False, None]), min_size=2, max_size=2), st.booleans())
def test_the_verdicts_decide(verdicts, proven):
    """A test that no program can pass makes the turn unscorable, unless another one failed."""
    ran = Ran(tuple(verdicts), proven, "reason", "", 0.0)  # of a problem without tests there is none
    play = retry_program.environment(run=lambda program: ran, max_tries=2, shown_tests=2)
    (step,) = play_script(play, ADD, says("def add(a, b): return 3"), 0)[1]
    if False in verdicts:
        assert (step.reward, step.done) == (0.0, False)
    elif None in verdicts:
        assert (step.reward, step.done) == (None, True)
    else:
        assert (step.reward, step.done) == ((1.0, True) if proven else (0.0, False))


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="got max_tries 0 and shown_tests 1, expected at least 1 and 0"):
        retry_program.environment(run=RUN, max_tries=0, shown_tests=1)


def gives_three(program):
    return Ran((True, False), True, "a wrong answer", "3", 0.0)


def test_the_environment_is_fit_for_a_run():
    play = retry_program.environment(run=gives_three, max_tries=3, shown_tests=1)
    with profile(max_examples=10):
        testing.check_environment(play, problems=st.just(ADD), max_turns=3)
