"""The door for configuration: gin files in, plain keyword arguments out, and a text that launches the same run again.

gin serves as a grammar (`parse`, which alone imports it): no live reference, no lock, no scope. References, scopes and
macros are resolved and every name is checked twice with the same code: against the source of the modules (`source`), so
that a typo is reported before torch is imported, and against the functions themselves. The result is frozen into plain
`functools.partial`s (`resolve`) and written down (`dump`).

A later binding beats an earlier one; `@scope/f` takes the knobs bound for `f`, then those for `scope/f`; a reference
without a scope inherits that of the function whose knob it is: all as in gin. Two things are simpler than in gin: a
macro is a substitution, resolved where it is used, and `@f()` is called once for each distinct set of knobs.
"""

import glob
import importlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_fn.config.parse import declared_bindings, imported_bindings, parse_gin, read_gin
from grpo_fn.config.resolve import (
    Bindings,
    Macro,
    Node,
    Reference,
    complain,
    fill_macros,
    freeze,
    full_name,
    functions,
    gin_name,
    knobs_of,
    resolve,
    used_macros,
    value_fingerprint,
)
from grpo_fn.config.source import Sources
from grpo_fn.core.display_text import suggest_name

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
    # shares one, so that a run resumes after its folder has moved, and from the config.gin in it.
    fingerprint: str
    hparams: Mapping[str, int | float | str]  # the knobs that are bound, each as a number or as text

    def kwargs(self) -> dict[str, Any]:
        """The root's keyword arguments, frozen. Calls every `@f()`, so it raises whatever those raise."""
        return freeze(self.root.knobs, {})


def load_config(
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    *,
    root: str = ROOT,
    taker: str | None = None,
    check_paths: bool = False,
) -> Config:
    """Read gin files, then `NAME=VALUE` parameters on top, and check everything that the root would receive.

    The root, and any class below it, may have an attribute `SUPPLIED = {knob: names}`: keyword-only parameters of that
    knob's function which the program passes itself. The root's module may declare `CHANGEABLE = (knob, ...)`, which the
    fingerprint does not count, and `MACROS = {name: knob}`: a macro that is bound nowhere has the value of that knob,
    so that a file laid over others need not know whether they use one. A `taker` is another function that takes some of
    the root's knobs, under their names: it needs no bindings for it, only what it takes is resolved and called, and
    the rest may be unbound. With `check_paths` data and models of the run that are paths have to be there.
    Raises ValueError, listing all that is missing or wrong at once, or FileNotFoundError; as far as the source of the
    modules shows it, before any of them is imported.
    """
    sources = Sources()
    text = read_gin(gin_files, gin_params, sources)
    check_declared(declared_bindings(text, sources), sources, root, taker or root, check_paths=check_paths)
    bindings = imported_bindings(text)
    module, target = import_function(root)
    fill_macros(bindings, getattr(module, "MACROS", {}))
    knobs_taken = knobs_of(target if taker is None else import_function(taker)[1])
    assert set(knobs_taken) <= set(knobs_of(target)), f"{taker} takes {knobs_taken}, some of which {root} does not have"
    node = resolve(bindings, target, knobs_taken)
    placed = with_absolute_paths(bindings)
    nodes = [node] if placed == bindings else [node, resolve(placed, target, knobs_taken)]
    changeable = getattr(module, "CHANGEABLE", ())  # knobs that may differ when a run resumes
    counted = [
        replace(each, knobs={k: value for k, value in each.knobs.items() if k not in changeable}) for each in nodes
    ]
    fingerprints = dict.fromkeys(map(value_fingerprint, counted))
    return Config(node, dump(placed), "/".join(fingerprints), collect_hparams(bindings))


def check_declared(bindings: Bindings, sources: Sources, root: str, taker: str, *, check_paths: bool) -> None:
    """Resolve the bindings of functions as their source declares them. Raises ValueError for what is wrong by then."""
    target, taking = (sources.function(*split_name(name)) for name in (root, taker))
    fill_macros(bindings, sources.constant(split_name(root)[0], "MACROS", {}))
    node = resolve(bindings, target, knobs_of(taking))
    if check_paths:
        complain([*missing_paths(node)])


def split_name(name: str) -> tuple[str, list[str]]:
    """The module of `package.module.function`, and the function."""
    module, _, function = name.rpartition(".")
    return module, [function]


def import_function(name: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function that `package.module.function` names."""
    module, _, function = name.rpartition(".")
    module = importlib.import_module(module)
    return module, getattr(module, function)


# -- bindings as gin text and as a table

Names = Mapping[Callable[..., Any], str]


def dump(bindings: Bindings) -> str:
    """The bindings as gin text, sorted. Macros without a use are left out: launching would refuse them."""
    imports, names = import_lines(functions(bindings))
    macros = [(name, bindings.macros[name]) for name in used_macros(bindings) & bindings.macros.keys()]
    blocks = [
        ["# The resolved configuration of a run: --gin_file with this file repeats it."],
        ["from __gin__ import dynamic_registration", *imports],
        [f"{name} = {gin_literal(value, names)}" for name, value in sorted(macros, key=lambda pair: pair[0])],
        [f"{name} = {gin_literal(value, names)}" for name, value in named_knobs(bindings, names)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def collect_hparams(bindings: Bindings) -> dict[str, int | float | str]:
    """Every bound knob under the name that `dump` gives it, macros being what they stand for.

    What is neither a finite number nor a string is the text that gin reads: `True`, `@losses.cispo`, `[1.0, 0.1]`.
    """
    _, names = import_lines(functions(bindings))

    def shown(value: Any) -> int | float | str:
        plain = type(value) in (int, str) or (type(value) is float and math.isfinite(value))
        return value if plain else gin_literal(value, names)

    return {name: shown(expand_macros(value, bindings.macros)) for name, value in named_knobs(bindings, names)}


def expand_macros(value: Any, macros: Mapping[str, Any]) -> Any:
    """The value with each macro in it replaced; one without a value, or inside itself, stays: no root reaches it."""
    match value:
        case Macro(name) if name in macros:
            return expand_macros(macros[name], {other: macros[other] for other in macros if other != name})
        case dict():
            return {expand_macros(key, macros): expand_macros(item, macros) for key, item in value.items()}
        case list() | tuple():
            return type(value)(expand_macros(item, macros) for item in value)
    return value


def named_knobs(bindings: Bindings, names: Names) -> list[tuple[str, Any]]:
    """Every bound knob as `scope/module.function.knob`, in the order of these names."""
    knobs = [
        ("/".join(filter(None, [scope, f"{names[target]}.{knob}"])), value)
        for (scope, target), bound in bindings.knobs.items()
        for knob, value in bound.items()
    ]
    return sorted(knobs, key=lambda pair: pair[0])


def import_lines(targets: Iterable[Callable[..., Any]]) -> tuple[list[str], Names]:
    """Import lines, and each function's selector under them. Modules that share a last name get their full one."""
    targets = list(targets)
    modules = sorted({target.__module__ for target in targets})
    leaves = Counter(module.rpartition(".")[2] for module in modules)
    lines, short = [], {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        short[module] = leaf if leaves[leaf] == 1 and leaf != "gin" else module.replace(".", "_")
        alias = f" as {short[module]}" if short[module] != leaf else ""
        lines.append((f"from {parent} " if parent else "") + f"import {leaf}{alias}")
    return lines, {target: f"{short[target.__module__]}.{target.__qualname__}" for target in targets}


def gin_literal(value: Any, names: Names) -> str:
    """A value in gin's grammar."""
    match value:
        case Macro():
            return f"%{value.name}"
        case Reference():
            return "@" + "/".join([*value.scope, names[value.target]]) + "()" * value.call
        case dict():
            return "{" + ", ".join(f"{gin_literal(k, names)}: {gin_literal(v, names)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(gin_literal(item, names) for item in value) + "]"
        case tuple():
            return "(" + "".join(f"{gin_literal(item, names)}, " for item in value) + ")"
        case float():
            return repr(value).replace("inf", "1e999")  # gin has no name for infinity, but reads the overflow
    return repr(value)


# -- relative paths in absolute form, so that a stored configuration means the same from any folder


PATH_KNOBS = ("data", "folder", "model", "path")  # knobs of these names hold paths, or names of something elsewhere


def with_absolute_paths(bindings: Bindings) -> Bindings:
    """The bindings with every relative path of a path knob absolute, where it names what is there; macros followed.

    What names nothing here stays: it is a hub's name, or a mistake that the knob's owner complains of.
    """
    macros = dict(bindings.macros)

    def absolute(value: Any, inside: frozenset[str]) -> Any:
        match value:
            case Macro(name) if name in macros and name not in inside:
                macros[name] = absolute(macros[name], inside | {name})
            case str() if is_relative_path(value):
                return os.path.abspath(value)
        return value

    knobs = {
        key: {knob: absolute(value, frozenset()) if knob in PATH_KNOBS else value for knob, value in bound.items()}
        for key, bound in bindings.knobs.items()
    }
    return replace(bindings, knobs=knobs, macros=macros)


def missing_paths(value: Any) -> Iterator[str]:
    """A line for each knob for data, a path or the run's model that names what is not there.

    A relative name of a model may be a hub's, an address is no path, and a pattern is its reader's business.
    """
    match value:
        case Node(target=target, knobs=knobs):
            for knob, item in knobs.items():
                is_model = knob == "model" and full_name(target) == ROOT
                if isinstance(item, str) and (knob in ("data", "path") or (is_model and item[:1] in ("/", ".", "~"))):
                    yield from path_problem(f"{gin_name(target)}.{knob}", item)
                yield from missing_paths(item)
        case dict():
            yield from missing_paths([*value.values()])
        case list() | tuple():
            for item in value:
                yield from missing_paths(item)


def path_problem(label: str, text: str) -> Iterator[str]:
    """That a path does not exist, with the near name in its folder."""
    path = os.path.expanduser(text)
    if "://" in text or glob.has_magic(text) or os.path.exists(path):
        return
    folder, name = os.path.split(path.rstrip("/"))
    near = suggest_name(name, os.listdir(folder or ".")) if os.path.isdir(folder or ".") else ""
    yield f"{label}: got {text!r}, which does not exist, expected a file or folder{near}"


def is_relative_path(text: str) -> bool:
    """Whether a text names a file or folder of the working folder, or with `*` or `?` some of them."""
    if not text or os.path.isabs(text) or text.startswith("~"):
        return False
    return bool(glob.glob(text)) if glob.has_magic(text) else os.path.exists(text)
