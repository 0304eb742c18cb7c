"""Finds every function of a kind, so that a new one is tested the moment it exists.

Functions of a kind share the names of their positional parameters. Their knobs are drawn from their annotations; where
the range of a knob matters, EXAMPLES has the values to try, by the module and the name of the knob.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from types import ModuleType
from typing import Literal, get_args, get_origin

import pytest
import torch

from grpo_fn.algo import (
    advantage,
    corrections,
    credit,
    distillation,
    group_sampling,
    losses,
    masking,
    objective,
    supervised,
)
from grpo_fn.core.types import Batch

# Every kind of function: its module and its positional parameters.
KINDS = [
    (advantage, ("reward", "valid")),
    (advantage, ("value", "energy", "mask")),
    (advantage, ("logp", "group")),
    (credit, ("scored",)),
    (distillation, ("scored",)),
    (distillation, ("steps",)),
    (masking, ("rollout", "adv")),
    (masking, ("batch", "key")),
    (objective, ("logp", "row")),
    (losses, ("logp", "row")),
    (corrections, ("logp", "row")),
    (supervised, ("logp", "row")),
    (supervised, ("steps",)),
    (supervised, ("scored",)),
    (objective, ("batch", "totals")),
    (objective, ("gain", "measured")),
    (group_sampling, ("explore", "carried", "prompts")),
]
# Losses whose trust region is around the sampler, whatever logp_old is.
AROUND_THE_SAMPLER = {"dppo_tv", "masked_ratio", "vespo", "dppo_kl", "masked_reinforce"}
# Values of knobs whose range matters, by module and name.
EXAMPLES: dict[ModuleType, dict[str, tuple]] = {
    advantage: {"eps": (1e-4, 1e-9), "ddof": (0, 1), "k": (1, 3), "threshold": (1.0,), "tau": (0.5, 2.0)},
    corrections: {
        **{"cap": (3.0,), "low": (0.0,), "high": (2.0,), "delta": (0.2,)},
        "ratio": (corrections.token_ratio, corrections.row_ratio),
        "weight": (partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=3.0),),
        "mask": (partial(corrections.off_policy_sequence_mask, delta=0.2),),
        "divergence": (corrections.k1_divergence, corrections.k2_divergence, corrections.k3_divergence),
        "reduction": (corrections.row_sum, corrections.row_mean, corrections.row_max),
    },
    credit: {"beta": (0.3,), "eps": (1e-4, 1e-9), "gamma": (0.95, 1.0), "state_weight": (1.0,)},
    distillation: {
        **{"coef": (1.0, 0.25), "gamma": (0.5, 0.0), "lam": (0.5, 1.0), "clip": (0.2, 0.5)},
        **{"warmup": (0, 3), "decay": (0, 5)},
    },
    losses: {
        **{"clip_low": (0.2,), "clip_high": (0.28,), "cap": (3.0,), "tau_positive": (1.0,), "tau_negative": (1.05,)},
        **{"log_low": (0.4,), "log_high": (0.4,), "delta": (0.05,), "kappa": (0.0, 1e-3), "coef": (1.0,)},
        **{"k_positive": (2.0,), "lambda_positive": (3.0,), "k_negative": (3.0,), "lambda_negative": (2.0,)},
        **{"low": (0.2,), "high": (0.28,), "beta": (0.1,), "half_life": (2.0,)},
        **{"weight_low": (0.8, 1.0), "weight_high": (1.2,), "safety": (1.5,)},
    },
    masking: {"low": (0.1,), "high": (2.0,), "share": (0.0, 0.4), "limit": (0.04, 1.0)},
    objective: {
        **{"max_length": (1, 7), "target": (0.5,), "rate": (0.1,), "limit": (0.2,), "step": (0.05,), "highest": (2.0,)},
    },
    supervised: {"mu": (0.1,), "peak": (0.9,), "valley": (0.05,), "warmup": (0, 3), "decay": (0, 5)},
}
TRUNCATED = partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=3.0)
# Values of a knob that EXAMPLES says nothing about; a function is tested at every combination of its knobs' values.
BY_ANNOTATION: dict[object, tuple] = {
    float: (0.25, 1.0),
    int: (1, 3),
    bool: (False, True),
    credit.Advantage: (partial(advantage.group_normalized, eps=1e-4, ddof=1),),
    credit.Credit: (partial(credit.reward_to_go, beta=0.3),),
    credit.Credit | None: (None, partial(credit.reward_to_go, beta=0.3)),
    distillation.Share | None: (None,),
    Callable[[torch.Tensor, Batch], torch.Tensor] | None: (None, TRUNCATED),
    corrections.Correction: (TRUNCATED,),
    Mapping[str, float]: ({"correct": 1.0, "boxed": 0.5},),
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


def values_of(module: ModuleType, name: str, function: Callable, knob: str) -> tuple:
    """The values to try of a knob: those that its module gives for the name, or those of its annotation."""
    asked = inspect.signature(function).parameters[knob].annotation
    if (given := EXAMPLES.get(module, {}).get(knob)) is not None:
        return given
    if get_origin(asked) is Literal:
        return get_args(asked)
    if (drawn := BY_ANNOTATION.get(asked)) is None:
        raise LookupError(
            f"got the knob {knob}: {asked} of {name}, expected an annotation among {list(BY_ANNOTATION)}, "
            f"or values of {knob} in EXAMPLES of tests/helpers/catalogue.py"
        )
    return drawn


def settings_of(module: ModuleType, name: str, function: Callable) -> list[dict]:
    """Every combination of example values for the function's knobs."""
    knobs = signature(function)[1]
    return [
        dict(zip(knobs, values, strict=True))
        for values in product(*(values_of(module, name, function, knob) for knob in knobs))
    ]


def bound(module: ModuleType, *positional: str) -> dict[str, Callable]:
    """Every function of the kind at every combination of its knobs, ready to call, under a readable name."""
    return {
        f"{name}({','.join(f'{k}={shown(v)}' for k, v in knobs.items())})": partial(f, **knobs)
        for name, f in functions(module, *positional).items()
        for knobs in settings_of(module, name, f)
    }


def token_losses() -> dict[str, Callable]:
    """Every token loss at every combination of its knobs."""
    return bound(losses, "logp", "row")


def all_corrections() -> dict[str, Callable]:
    """Every importance correction at every combination of its knobs."""
    return bound(corrections, "logp", "row")


def shown(value: object) -> str:
    """A knob's value in a readable name: functions go by their own."""
    if isinstance(value, partial):
        return f"{value.func.__name__}({','.join(f'{k}={shown(v)}' for k, v in value.keywords.items())})"
    return value.__name__ if callable(value) else str(value)


def each(table: dict[str, Callable], only: set[str] | None = None) -> pytest.MarkDecorator:
    """Parametrise a test's argument `f` over a table of bound functions, or over those of the names in `only`."""
    if only is not None and (gone := only - {name.split("(")[0] for name in table}):
        raise LookupError(f"got the names {sorted(gone)}, expected functions of {sorted(table)}")
    chosen = {name: f for name, f in table.items() if only is None or name.split("(")[0] in only}
    return pytest.mark.parametrize("f", list(chosen.values()), ids=list(chosen))
