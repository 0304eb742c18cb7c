"""Programs with another try: what fails of a program's tests is shown to the policy, which writes it anew."""

from collections.abc import Mapping
from functools import partial

from grpo_fn.core.environment import Environment, Message, PlainData, Start, Step
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.environments.tools import tail
from grpo_fn.rewards.code import Runner, run_against_tests

SHOWN = 500  # characters of what a program printed, the last ones


def environment(*, run: Runner, max_tries: int, shown_tests: int) -> Environment:
    """The environment of problems with tests, as `benchmarks.mbpp` makes them.

    Args:
        run: runs a program against its tests: `sandbox.run_program` with its knobs.
        max_tries: programs of an episode.
        shown_tests: tests whose text is shown where they fail, the first ones; of the others only their number. As many
            as the prompt shows, or else what was held back can be answered from a table.

    Returns:
        The environment.

    Raises:
        ValueError: for fewer than one try, and numbers below 0.
    """
    if max_tries < 1 or shown_tests < 0:
        raise ValueError(f"got max_tries {max_tries} and shown_tests {shown_tests}, expected at least 1 and 0")
    answer = partial(step, run=run, max_tries=max_tries, shown_tests=shown_tests)
    # Not pure: a program may look at the clock, and the limits on its time are those of a busy machine.
    return Environment(start=start, step=answer, pure=False)


def start(problem: Problem, key: int) -> Start:
    """The task: a problem with `tests` and perhaps `setup` in `meta`, and a reference program or "" as its answer."""
    tests, setup = list(problem.meta.get("tests", ())), problem.meta.get("setup", "")
    state = {"answer": problem.answer, "tests": tests, "setup": setup, "tries": 0}
    return Start(state, (Message("user", problem.prompt),))


def step(
    state: Mapping[str, PlainData], message: Message, key: int, *, run: Runner, max_tries: int, shown_tests: int
) -> Step:
    """The tests' verdict on the program in the message: a reward of 1 and the end, or what failed and another try.

    The reward is None, and the episode at its end, for tests that no program can pass.
    """
    tries = state["tries"] + 1
    after = {**state, "tries": tries}
    problem = Problem(0, "", state["answer"], {"tests": tuple(state["tests"]), "setup": state["setup"]})
    ran = run_against_tests(problem, Completion(message.content, 0, False), run)
    if ran is None or (None in ran.verdicts and False not in ran.verdicts):
        return Step(after, (), None, True)
    if ran.proven and all(ran.verdicts):
        return Step(after, (), 1.0, True)
    if tries >= max_tries:
        return Step(after, (), 0.0, True)
    tests = state["tests"]
    failed = [test for test, verdict in zip(tests, ran.verdicts, strict=True) if verdict is False]
    shown = [test for test in tests[:shown_tests] if test in failed]
    lines = [f"The program fails {len(failed)} of {len(tests)} tests: {ran.reason}", *shown]
    if failed and not shown:
        lines.append("The tests that fail are not among those shown.")
    if printed := tail(ran.printed, SHOWN):
        lines += ["It printed:", printed]
    feedback = "\n".join([*lines, "Write the whole program again."])
    return Step(after, (Message("user", feedback),), 0.0, False)
