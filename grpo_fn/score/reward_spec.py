"""A reward as the command line names it: a short name or `module.function`, with its knobs."""

import importlib
import inspect
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from grpo_fn.config.nodes import comma_list, complain, search_working_folder, suggest_name
from grpo_fn.config.resolve import bad_names, signature, type_problem
from grpo_fn.core.problem import RewardFn
from grpo_fn.shell.reward_workers.worker_handle import RETURNED_NONE
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
    "run.output_kb=64",
    "run.isolation=@grpo_fn.shell.sandbox.strongest_isolation",
)
NAMES = {
    "math": RewardSpec("grpo_fn.rewards.math.correct", ("answer",), GOLD, 5.0, ()),
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
    fn = _bound(named.function, dict(map(_knob, [*named.knobs, *knobs])), "")
    try:
        inspect.signature(fn).bind("problem", "completion")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named.function}: got another signature, wanted f(problem, completion)") from error
    check_sandboxes([fn])
    return fn


class _At(str):
    """The name of a function."""


def _knob(text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    if value.startswith("@"):
        return name, _At(value[1:])
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        wanted = "KNOB=VALUE, the value as in Python, text in quotes, or @module.function"
        raise ValueError(f"--reward_param: got {text!r}, wanted {wanted}") from error


def _bound(name: str, knobs: Mapping[str, Any], path: str) -> Callable[..., Any]:
    """`name` with its knobs; those of its functions are still beside them, as `knob.its_knob`. `path` leads here."""
    fn = _function(name)
    label = f"--reward_param {path.rstrip('.')}" if path else name
    of_functions = {knob: value for knob, value in knobs.items() if "." in knob}
    own = {knob: value for knob, value in knobs.items() if "." not in knob}
    complain(list(bad_names(label, fn, own)))
    for knob in of_functions:
        owner = knob.partition(".")[0]
        if not isinstance(own.get(owner), _At):
            raise ValueError(f"--reward_param {path}{knob}: got a knob of no function, wanted {owner}=@... too")
    for knob, value in own.items():
        if isinstance(value, _At):
            inner = {k.removeprefix(f"{knob}."): v for k, v in of_functions.items() if k.startswith(f"{knob}.")}
            own[knob] = _bound(value, inner, f"{path}{knob}.")
    parameters = signature(fn)
    complain([text for knob, value in own.items() for text in type_problem(label, parameters.get(knob), value)])
    unbound = [knob for knob, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [knob for knob in unbound if knob not in own]:
        wanted = f"--reward_param {path}{missing[0]}=VALUE"
        raise ValueError(f"{name}: got no value for {comma_list(missing)}, wanted {wanted}")
    return partial(fn, **own) if own else fn


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {name!r}, wanted {comma_list(NAMES)} or module.function{suggest_name(name, NAMES)}")
    search_working_folder()
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ValueError(f"got {name!r}, wanted a module that can be imported: {error}") from error
    fn = getattr(imported, function, None)
    if not callable(fn):
        there = [other for other, value in vars(imported).items() if callable(value) and not other.startswith("_")]
        raise ValueError(f"got {name!r}, wanted a function of {module}{suggest_name(function, there)}")
    return fn
