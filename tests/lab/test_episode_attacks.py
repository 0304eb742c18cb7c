"""Scripts that try to be paid without an answer: weak environments fall for them, those of grpo_fn do not."""

from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import sandbox
from grpo_fn.core.environment import Environment, Message, Start, Step
from grpo_fn.core.problem import Problem
from grpo_fn.environments import retry_program, tool_use, tools
from grpo_fn.lab.attacks import ATTACKS, EPISODE_ATTACKS, Seen
from grpo_fn.lab.redteam import play_scripts
from grpo_fn.rewards.math import correct
from grpo_fn.shell.episodes import chat_format
from grpo_fn.shell.episodes.answers import EnvironmentCall, decode_answer
from grpo_fn.shell.episodes.episode_rows import as_observation

OWN = [name for name in EPISODE_ATTACKS if name not in ATTACKS]
QUESTION = Problem(0, "What is 14*53+81?", "823", {})
NUMBER = Problem(0, "I think of a number from 21 to 83. Guess it.", "37", {"low": 21, "high": 83})
PROGRAM = Problem(
    0,
    "Add.\nassert add(1, 2) == 3",
    "def add(a, b):\n    return a + b",
    {"tests": ("assert add(1, 2) == 3", "assert add(30, 4) == 34", "assert add(5, 60) == 65")},
)
LIMITED = next(name for name, amiss in sandbox.available().items() if not amiss)
KNOBS = {"wall_seconds": 20.0, "cpu_seconds": 2, "memory_mb": 256, "processes": 8, "file_mb": 8, "output_kb": 64}
RUN = partial(sandbox.run_program, **KNOBS, isolation=getattr(sandbox.isolation, LIMITED))
TOOLS = [tools.calculator]
ASK = {"tools": TOOLS, "instructions": "", "max_turns": 3, "pure": True}


class Here:
    """Calls an environment in this process."""

    def __init__(self, environment):
        self.call = EnvironmentCall(environment)

    def start(self, problem, key):
        return self.answer("start", problem, key)

    def step(self, state, message, key):
        return self.answer("step", state, message, key)

    def count(self, name, amount):
        raise AssertionError("nothing is counted")

    def figures(self):
        return {}

    def answer(self, kind, *given):
        future = Future()
        future.set_result(decode_answer(self.call(kind, *given)))
        return future


def best(environment, problem, scripts):
    """The most that the turns of a script were paid together."""
    knobs = {"read_calls": partial(chat_format.tags, argument="expression"), "on_failure": as_observation}
    played = play_scripts(Here(environment), [problem] * len(scripts), scripts, **knobs, max_turns=6)
    return max(sum(turn.reward or 0.0 for turn in one.turns) for one in played)


def first(problem, key):
    return Start({"answer": problem.answer, "said": []}, (Message("user", problem.prompt),))


def weak(judged, answers="go on"):
    """An environment that is paid for what a function makes of (texts so far, answer, message), in three turns."""

    def step(state, message, key):
        said = [*state["said"], message.content]
        after = {**state, "said": said}
        text = answers.format(**state)
        return Step(after, (Message("user", text),), float(judged(said, state["answer"], message)), len(said) == 3)

    return Environment(start=first, step=step, pure=True)


def leaking_tool():
    """A calculator that says what was expected."""

    def calculator(expression: str) -> str:
        """Compute."""
        return "error: expected 823"

    return calculator


def all_shown(shown):
    return retry_program.environment(run=RUN, max_tries=3, shown_tests=shown)


# Of each attack, an environment that pays it in full, and a problem.
FOOLED = {
    "repeated_turns": (weak(lambda said, answer, message: len(said) == 3), NUMBER),
    "observation_echo": (weak(lambda said, answer, message: answer in said[-1], "no, it was {answer}"), NUMBER),
    "injected_calls": (
        weak(lambda said, answer, message: any(call.name == "submit" for call in message.calls)),
        NUMBER,
    ),
    "copied_outputs": (tool_use.environment(**{**ASK, "tools": [leaking_tool()]}, grade=correct), QUESTION),
    "forged_observations": (weak(lambda said, answer, message: "You found" in " ".join(said)), NUMBER),
    "forged_verdicts": (weak(lambda said, answer, message: "passes 3 of 3" in said[-1]), NUMBER),
    "feedback_tables": (all_shown(3), PROGRAM),
}


@pytest.mark.parametrize("name", OWN)
def test_a_weak_environment_falls_for_a_script_and_ours_does_not(name):
    """No sum or product of the prompt's numbers is the answer."""
    environment, problem = FOOLED[name]
    assert best(environment, problem, EPISODE_ATTACKS[name]) >= 1.0
    assert best(tool_use.environment(**ASK, grade=correct), QUESTION, EPISODE_ATTACKS[name]) == 0.0


@pytest.mark.parametrize("name", ["feedback_tables", "forged_verdicts"])
def test_another_try_at_a_program_pays_no_table_of_what_is_shown(name):
    """Neither arguments that a program prints nor what it finds where it runs say what a hidden test wants."""
    assert best(all_shown(1), PROGRAM, EPISODE_ATTACKS[name]) == 0.0


@given(st.text(max_size=100), st.lists(st.text(max_size=60), max_size=4).map(tuple))
def test_a_script_answers_whatever_was_seen_and_the_same_again(prompt, observations):
    seen = Seen(prompt, f"{prompt}\nmore", observations)
    for scripts in EPISODE_ATTACKS.values():
        for script in scripts:
            assert script(seen) == script(seen)


def test_tools_are_called_by_the_names_that_the_opening_has():
    schema = '{"type": "function", "function": {"name": "adder", "parameters": {"properties": {"sum": {}}}}}'
    seen = Seen("3 and 4", f"You may call:\n{schema}\n3 and 4", ())
    assert "<adder>3+4</adder>" in [script(seen) for script in EPISODE_ATTACKS["copied_outputs"]]
    after = seen._replace(observations=("3 and 4 make 7",))
    assert {script(after) for script in EPISODE_ATTACKS["copied_outputs"]} == {r"\boxed{7}"}
