"""Bound functions with their knobs, and checks of numbers, without torch; only this file inspects partials.

A function declares what it reads of a step, `f.NEEDS = frozenset({...})`; a run provides it before weights are loaded.

    logp_ref        log-probs under a frozen copy of the start model
    logp_teacher    log-probs under a teacher
    energy          |d logp / d logits|^2 of every sampled token, one more forward pass
    logp_sampled    no provision: the function compares the policy with the sampler itself, so samples may be stale
    trainer_logp    logp_old from the trainer's own pass: the function compares it with the sampler's log-probs
    fresh_samples   samples of the current policy: no ratio corrects for those of an older one
    groups          two samples of a prompt or more: the function compares within a group
    demonstrations  given completions beside the sampled ones
    episodes        rows in which an environment answers

A function that reads logp_ref, logp_teacher or energy without declaring it ends with an error that says so.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any


def function_and_knobs(fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function below all partials, and the knobs bound to it: none where `fn` is no partial."""
    return (fn.func, fn.keywords) if isinstance(fn, partial) else (fn, {})


def needs(value: Any) -> frozenset[str]:
    """The declared needs of a function and of all functions among its knobs; also of a list or a mapping of functions.

    NEEDS may be a function of the knobs, which then speaks for them too: a KL with a coefficient of 0 is not there.
    """
    if isinstance(value, list | tuple):
        return frozenset().union(*map(needs, value))
    if isinstance(value, dict):
        return needs([*value.values()])
    if not callable(value):
        return frozenset()
    function, knobs = function_and_knobs(value)
    declared = getattr(function, "NEEDS", frozenset())
    return declared(knobs) if callable(declared) else declared | needs(dict(knobs))


def uses_of(function: Callable[..., Any], value: Any) -> Iterator[Callable[..., Any]]:
    """Every use of a function among what a value is bound to, at any depth, with its knobs."""
    bound_function, knobs = function_and_knobs(value)
    if bound_function is function:
        yield value
    for item in value if isinstance(value, list | tuple) else (value if isinstance(value, dict) else knobs).values():
        yield from uses_of(function, item)


def unwrap_reward(fn: Any) -> Any:
    """The function itself; of a wrapper, a partial whose only function among the knobs is `reward`, what it wraps."""
    function, knobs = function_and_knobs(fn)
    functions = [knob for knob, value in knobs.items() if callable(value)]
    return unwrap_reward(knobs["reward"]) if functions == ["reward"] else function


def describe_function(value: Any) -> str:
    """A bound value as text: functions by module and name with their knobs, at any depth."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key!r}: {describe_function(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(describe_function, value))})"
    if not callable(value):
        return repr(value)
    function, knobs = function_and_knobs(value)
    named = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    return named + describe_function(dict(knobs))


# Checks of numbers, with messages that say got and expected.


class FunctionMisfit(ValueError):
    """A function of the configuration does not fit its knob: bad input, and one line, although a step has begun."""


def check_positive(**numbers: int) -> None:
    """Raise ValueError naming the first number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")


def check_divides(prompts: int, minibatches: int) -> None:
    """Raise ValueError, with the nearest numbers that do, unless the prompts of a step split into whole minibatches."""
    if prompts % minibatches == 0:
        return
    below, above = prompts // minibatches * minibatches, -(-prompts // minibatches) * minibatches
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    divisors = [m for m in range(1, prompts + 1) if prompts % m == 0]
    closest = min(divisors, key=lambda m: (abs(m - minibatches), m))
    raise ValueError(
        f"prompts {prompts} do not split into {minibatches} minibatches of whole groups: expected prompts {nearest}, "
        f"or minibatches {closest}"
    )
