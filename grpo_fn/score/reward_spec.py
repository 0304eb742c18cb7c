"""A reward as the command line names it: a short name or `module.function`, with its knobs."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

from grpo_fn.config.function_knobs import bind_function
from grpo_fn.core.problem import RewardFn
from grpo_fn.shell.reward_workers.reward_pool import RETURNED_NONE
from grpo_fn.trainer.checks.requirements import check_sandboxes


class RewardSpec(NamedTuple):
    """A reward function by its import path, with the fields, knobs and timeout that scoring rows needs."""

    function: str
    needs: tuple[str, ...]  # fields of a row that it cannot do without
    none: str  # what it means when it returns None
    deadline: float  # seconds for a row by default
    knobs: tuple[str, ...]  # as for --reward_param, which comes on top


GOLD = "the gold answer cannot be parsed"
TESTS = "no program can pass these tests"
SANDBOX = (
    "run=@grpo_fn.shell.sandbox.run_program",
    "run.wall_seconds=10.0",
    "run.cpu_seconds=10",
    "run.memory_mb=512",
    "run.processes=8",
    "run.file_mb=16",
    "run.output_kb=1024",
    "run.isolation=@grpo_fn.shell.sandbox.strongest_isolation",
)
NAMES = {
    "math": RewardSpec("grpo_fn.rewards.math.correct", ("answer",), GOLD, 5.0, ()),
    "math_evaluated": RewardSpec("grpo_fn.rewards.math.correct_evaluated", ("answer",), GOLD, 5.0, ()),
    "lenient": RewardSpec("grpo_fn.rewards.math.lenient", ("answer",), GOLD, 5.0, ()),
    "code": RewardSpec("grpo_fn.rewards.code.all_tests_pass", ("tests",), TESTS, 30.0, SANDBOX),
    "share_of_tests": RewardSpec("grpo_fn.rewards.code.share_of_tests", ("tests",), TESTS, 30.0, SANDBOX),
}


def known_reward(name: str) -> RewardSpec:
    """What is known of a reward by its short or its full name."""
    for short, named in NAMES.items():
        if name in (short, named.function):
            return named
    return RewardSpec(name, ("length",) if name.startswith("grpo_fn.rewards.length.") else (), RETURNED_NONE, 5.0, ())


def reward_of(named: RewardSpec, knobs: Sequence[str]) -> RewardFn:
    """The function with its knobs, each `KNOB=VALUE`; a later one beats an earlier.

    A value is a Python literal, or `@module.function`, whose own knobs are `KNOB.ITS_KNOB=VALUE`. Raises ValueError for
    what is not there, does not fit, or is missing, and for a sandbox that cannot be had here.
    """
    fn = bind_function(named.function, [*named.knobs, *knobs], flag="--reward_param", short=tuple(NAMES))
    try:
        inspect.signature(fn).bind("problem", "completion")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named.function}: got another signature, wanted f(problem, completion)") from error
    check_sandboxes([fn])
    return fn
