"""A function as a command line names it: a short name or `module.function`, with knobs as `KNOB=VALUE`."""

import importlib
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_fn.config.nodes import comma_list, complain, search_working_folder, suggest_name
from grpo_fn.config.resolve import bad_names, signature, type_problem


def bind_function(name: str, knobs: Sequence[str], *, flag: str, short: Sequence[str]) -> Callable[..., Any]:
    """The function `module.function` with its knobs, each `KNOB=VALUE`; a later one beats an earlier.

    A value is a Python literal, or `@module.function`, whose own knobs are `KNOB.ITS_KNOB=VALUE`.
    """
    return _bound(name, dict(_knob(knob, flag) for knob in knobs), "", flag, short)


def knob_names(name: str, *, short: Sequence[str]) -> set[str]:
    """The parameters of a function that the command line names."""
    return set(signature(_function(name, short)))


class _At(str):
    """The name of a function."""


def _knob(text: str, flag: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    if value.startswith("@"):
        return name, _At(value[1:])
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        wanted = "KNOB=VALUE, the value as in Python, text in quotes, or @module.function"
        raise ValueError(f"{flag}: got {text!r}, wanted {wanted}") from error


def _bound(name: str, knobs: Mapping[str, Any], path: str, flag: str, short: Sequence[str]) -> Callable[..., Any]:
    """`name` with its knobs; those of its functions are still beside them, as `knob.its_knob`. `path` leads here."""
    fn = _function(name, short)
    label = f"{flag} {path.rstrip('.')}" if path else name
    of_functions = {knob: value for knob, value in knobs.items() if "." in knob}
    own = {knob: value for knob, value in knobs.items() if "." not in knob}
    complain(list(bad_names(label, fn, own)))
    for knob in of_functions:
        owner = knob.partition(".")[0]
        if not isinstance(own.get(owner), _At):
            raise ValueError(f"{flag} {path}{knob}: got a knob of no function, wanted {owner}=@... too")
    for knob, value in own.items():
        if isinstance(value, _At):
            inner = {k.removeprefix(f"{knob}."): v for k, v in of_functions.items() if k.startswith(f"{knob}.")}
            own[knob] = _bound(value, inner, f"{path}{knob}.", flag, short)
    parameters = signature(fn)
    complain([text for knob, value in own.items() for text in type_problem(label, parameters.get(knob), value)])
    unbound = [knob for knob, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [knob for knob in unbound if knob not in own]:
        wanted = f"{flag} {path}{missing[0]}=VALUE"
        raise ValueError(f"{name}: got no value for {comma_list(missing)}, wanted {wanted}")
    return partial(fn, **own) if own else fn


def _function(name: str, short: Sequence[str]) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {name!r}, wanted {comma_list(short)} or module.function{suggest_name(name, short)}")
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
