"""Finds every function of a room, so that a new one is tested the moment it exists.

A room's functions share one signature: the positional names say which room. Their knobs are filled from KNOBS by name.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from types import ModuleType

import pytest

from grpo_fn.algo import advantage, credit, importance

# Example values of every knob; each function is tested at every combination of its knobs' values.
KNOBS: dict[str, tuple] = {
    "eps": (1e-4, 1e-9),
    "ddof": (0, 1),
    "clip_low": (0.2,),
    "clip_high": (0.28,),
    "max_length": (1, 7),
    "cap": (3.0,),
    "tau_positive": (1.0,),
    "tau_negative": (1.05,),
    "log_low": (0.4,),
    "log_high": (0.4,),
    "delta": (0.2,),
    "kappa": (0.0, 1e-3),
    "coef": (1.0,),
    "k": (1, 3),
    "threshold": (1.0,),
    "low": (0.1,),
    "high": (2.0,),
    "share": (0.0, 0.4),
    "advantage": (partial(advantage.group_normalized, eps=1e-4, ddof=1),),
    "credit": (partial(credit.reward_to_go, beta=0.3),),
    "beta": (0.3,),
    "weights": ({"correct": 1.0, "boxed": 0.5},),
    "target": (0.5,),
    "rate": (0.1,),
    "limit": (0.2,),
    "step": (0.05,),
    "highest": (2.0,),
    "weight": (partial(importance.truncated_weight, cap=3.0),),
    "mask": (partial(importance.off_policy_sequence_mask, delta=0.2),),
}


def public(module: ModuleType) -> dict[str, Callable]:
    """The public functions defined in a module, imports left out."""
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in found if not name.startswith("_") and f.__module__ == module.__name__}


def signature(function: Callable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional parameters, names of the knobs."""
    parameters = inspect.signature(function).parameters.values()
    knobs = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY), knobs


def functions(module: ModuleType, *positional: str) -> dict[str, Callable]:
    """The module's public functions with these positional parameters; what has others is not of this kind."""
    return {name: f for name, f in public(module).items() if signature(f)[0] == positional}


def settings_of(name: str, function: Callable) -> list[dict]:
    """Every combination of example values for the function's knobs."""
    knobs = signature(function)[1]
    unknown = [knob for knob in knobs if knob not in KNOBS]
    if unknown:
        raise LookupError(
            f"got knobs {unknown} of {name}, wanted an example value of each: add it to tests/helpers/catalogue.py"
        )
    return [dict(zip(knobs, values, strict=True)) for values in product(*(KNOBS[knob] for knob in knobs))]


def bound(module: ModuleType, *positional: str) -> dict[str, Callable]:
    """Every function of the kind at every combination of its knobs, ready to call, under a readable name."""
    return {
        f"{name}({','.join(f'{k}={shown(v)}' for k, v in knobs.items())})": partial(f, **knobs)
        for name, f in functions(module, *positional).items()
        for knobs in settings_of(name, f)
    }


def shown(value: object) -> str:
    """A knob's value in a readable name: functions go by their own."""
    if isinstance(value, partial):
        return f"{value.func.__name__}({','.join(f'{k}={shown(v)}' for k, v in value.keywords.items())})"
    return value.__name__ if callable(value) else str(value)


def each(table: dict[str, Callable], only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise a test's argument `f` over a table of bound functions, or over those of the names in `only`."""
    if only is not None and (gone := only - {name.split("(")[0] for name in table}):
        raise LookupError(f"got the names {sorted(gone)}, wanted functions of {sorted(table)}")
    chosen = {name: f for name, f in table.items() if only is None or name.split("(")[0] in only}
    return pytest.mark.parametrize("f", list(chosen.values()), ids=list(chosen))
