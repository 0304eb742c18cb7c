"""The door for configuration: gin files in, plain keyword arguments out, and a text that launches the same run again.

gin serves as a grammar and a table of bindings (`parse.parse_gin`; `parse` alone imports it); nothing of it outlives
`load_config`: no live reference, no lock, no scope. Then references, scopes and macros are resolved and every name is
checked, the result is frozen into plain `functools.partial`s (`resolve`) and written down (`dump`).

A later binding beats an earlier one; `@scope/f` takes the knobs bound for `f`, then those for `scope/f`; a reference
without a scope inherits that of the function whose knob it is: all as in gin. Two things are simpler than in gin: a
macro is a substitution, resolved where it is used, and `@f()` is called once for each distinct set of knobs.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_fn.config.dump import collect_hparams, dump, with_absolute_paths
from grpo_fn.config.nodes import Node
from grpo_fn.config.parse import parse_gin
from grpo_fn.config.resolve import fill_macros, freeze, knobs_of, resolve, value_fingerprint

__all__ = ["Config", "freeze", "load_config", "parse_gin", "value_fingerprint"]

ROOT = "grpo_fn.train.train"


@dataclass(frozen=True)
class Config:
    """A checked configuration: what the root function will be called with."""

    root: Node
    # One gin file that needs no include, with absolute paths; macros are kept, so STEPS can still be set from the
    # command line.
    text: str
    # Of what the root receives: blind to macro names, import styles, bindings nothing uses, and to what may change
    # while a run is interrupted. With relative paths there are two, "AS_WRITTEN/ABSOLUTE": of the same run is what
    # shares one, so that a run goes on after its folder has moved, and from its own config.gin.
    fingerprint: str
    hparams: Mapping[str, int | float | str]  # the knobs that are bound, each as a number or as text

    def kwargs(self) -> dict[str, Any]:
        """The root's keyword arguments, frozen. Calls every `@f()`, so it raises whatever those raise."""
        return freeze(self.root.knobs, {})


def load_config(
    gin_files: Sequence[str], gin_params: Sequence[str], *, root: str = ROOT, taker: str | None = None
) -> Config:
    """Read gin files, then `NAME=VALUE` parameters on top, and check everything that the root would receive.

    The root's module, and any class below it, may declare `SUPPLIED = {knob: names}`: keyword-only parameters of that
    knob's function which the program passes itself. The root's module may declare `CHANGEABLE = (knob, ...)`, which the
    fingerprint does not count, and `MACROS = {name: knob}`: a macro that is bound nowhere has the value of that knob,
    so that a file laid over others need not know whether they use one. A `taker` is another function that takes some of
    the root's knobs, under their names: it needs no bindings of its own, only what it takes is resolved and called, and
    the rest may be unbound.
    Raises ValueError, listing all that is missing or wrong at once, or FileNotFoundError.
    """
    bindings = parse_gin(gin_files, gin_params)
    module, target = import_function(root)  # after reading: a typing error must not wait for torch
    fill_macros(bindings, getattr(module, "MACROS", {}))
    wanted = knobs_of(target if taker is None else import_function(taker)[1])
    assert set(wanted) <= set(knobs_of(target)), f"{taker} takes {wanted}, some of which {root} does not have"
    node = resolve(bindings, target, getattr(module, "SUPPLIED", {}), wanted)
    placed = with_absolute_paths(bindings)
    nodes = [node, resolve(placed, target, getattr(module, "SUPPLIED", {}), wanted)] if placed != bindings else [node]
    changeable = getattr(module, "CHANGEABLE", ())  # knobs that may be others when a run goes on
    counted = [replace(one, knobs={k: value for k, value in one.knobs.items() if k not in changeable}) for one in nodes]
    fingerprints = dict.fromkeys(map(value_fingerprint, counted))
    return Config(node, dump(placed), "/".join(fingerprints), collect_hparams(bindings))


def import_function(name: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function that `package.module.function` names."""
    module, _, function = name.rpartition(".")
    module = importlib.import_module(module)
    return module, getattr(module, function)
