"""The meaning of a gin file, without gin: references and macros, resolved to functions with knobs, and to partials.

Every name is checked against the signature that it claims to fit. `bind_function` is the same for a command line.
"""

import hashlib
import importlib
import inspect
import sys
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from inspect import Parameter
from pathlib import Path
from typing import Any

from grpo_fn.core.display_text import suggest_name


@dataclass(frozen=True)
class Reference:
    """`@scope/f`, or `@scope/f()` when `call`."""

    target: Callable[..., Any]  # the undecorated function or class
    scope: tuple[str, ...]
    call: bool


@dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str


@dataclass(frozen=True)
class Node:
    """A function with all its knobs: what a reference means once scopes and macros are resolved."""

    target: Callable[..., Any]
    knobs: Mapping[str, Any]
    call: bool


@dataclass
class Bindings:
    """Everything that files and parameters bind, before anything is resolved."""

    knobs: dict[tuple[str, Callable[..., Any]], dict[str, Any]] = field(default_factory=dict)  # by (scope, function)
    macros: dict[str, Any] = field(default_factory=dict)
    bound_at: dict[str, str] = field(default_factory=dict)  # macro -> the last place that binds it
    used_at: dict[str, str] = field(default_factory=dict)  # macro -> the first place that mentions it
    from_params: set[str] = field(default_factory=set)  # macros that the command line binds
    knobs_from_params: dict[tuple[str, Callable[..., Any]], dict[str, str]] = field(default_factory=dict)  # to its flag


def nested_references(value: Any) -> Iterator[Reference | Macro]:
    """Every reference and macro inside a value."""
    match value:
        case Reference() | Macro():
            yield value
        case dict():
            yield from nested_references([*value.keys(), *value.values()])
        case list() | tuple():
            for item in value:
                yield from nested_references(item)


def functions(bindings: Bindings) -> list[Callable[..., Any]]:
    """Every function that is bound or referenced, each once."""
    named = nested_references([*bindings.knobs.values(), bindings.macros])
    referenced = [item.target for item in named if isinstance(item, Reference)]
    return list(dict.fromkeys([*(target for _, target in bindings.knobs), *referenced]))


def used_macros(bindings: Bindings) -> set[str]:
    """Macros that some knob uses, directly or through other macros."""
    todo, used = list(bindings.knobs.values()), set()
    while todo:
        new = {item.name for item in nested_references(todo) if isinstance(item, Macro)} - used
        used |= new
        todo = [bindings.macros[name] for name in new if name in bindings.macros]
    return used


def full_name(target: Any) -> str:
    """`package.module.function`: the name by which workers and relaunched files find it."""
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', repr(target))}"


def search_folder(folder: Path) -> None:
    """Let modules of a folder be imported, after all others: `python -m` alone does so for the working folder."""
    if not {str(folder), "" if folder == Path.cwd() else str(folder)} & {*sys.path}:
        sys.path.append(str(folder))


def comma_list(names: Iterable[str]) -> str:
    """`a, b, c`, or `none`."""
    return ", ".join(names) or "none"


def complain(problems: Sequence[str]) -> None:
    """Raise one ValueError with every problem, each on its line, if there are any."""
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


# -- references and macros to functions with knobs


def resolve(bindings: Bindings, root: Callable[..., Any], expected: Collection[str]) -> Node:
    """The root with all knobs of `expected` that it would receive. Raises ValueError with all that is missing or wrong.

    Knobs bound in a file for a function that the root never reaches are no error: an include may set the knobs of a
    function which a later include replaces. Those bound on the command line are, where all of the root is resolved.
    """
    complain(list(unused_macros(bindings)))
    resolver = Resolver(bindings, expected)
    node = resolver.node(Reference(root, (), False), (), (), ())
    complain(resolver.problems)
    if set(knobs_of(root)) <= set(expected):
        complain(list(unused_params(bindings, resolver.reached)))
    return node


def unused_macros(bindings: Bindings) -> Iterator[str]:
    """A macro bound in a file has to be mentioned somewhere, though a later binding may have replaced that place since;
    one bound on the command line has to have an effect."""
    used = used_macros(bindings)
    for name in bindings.macros:
        mentioned = set() if name in bindings.from_params else bindings.used_at.keys()
        if name not in used | mentioned:
            hint = suggest_name(name, used) or f"; macros in use: {comma_list(sorted(used))}"
            yield f"{name}: nothing uses this macro (bound at {bindings.bound_at[name]}){hint}"


def unused_params(bindings: Bindings, reached: Collection[tuple[str, Callable[..., Any]]]) -> Iterator[str]:
    """A knob bound on the command line has to be one of a function that the run uses, in that scope."""
    used = {target for _, target in reached}
    for (scope, target), knobs in bindings.knobs_from_params.items():
        if (scope, target) in reached:
            continue
        where = f" in the scope {scope}" if target in used else ""
        for knob, flag in knobs.items():
            owners = [f"{gin_name(other)}.{knob}" for other in used - {target} if knob in knobs_of(other)]
            hint = suggest_name(f"{gin_name(target)}.{knob}", owners)
            yield f"{flag}: the run does not use {gin_name(target)}{where}, expected a knob that has an effect{hint}"


def gin_name(target: Callable[..., Any]) -> str:
    """`module.function`, as a gin file writes it."""
    return ".".join(full_name(target).split(".")[-2:])


def fill_macros(bindings: Bindings, standing_for: Mapping[str, str]) -> None:
    """Give each macro that is used and not bound the value of the knob that it stands for, which then has the macro.

    `standing_for`: macro -> `package.module.function.knob`. A knob that is not bound has nothing to give.
    """
    places = {
        f"{full_name(target)}.{knob}": (knobs, knob)
        for (scope, target), knobs in bindings.knobs.items()
        if not scope
        for knob in knobs
    }
    for name in used_macros(bindings) & standing_for.keys() - bindings.macros.keys():
        knobs, knob = places.get(standing_for[name], ({}, ""))
        if knob and Macro(name) not in nested_references(knobs[knob]):
            bindings.macros[name], knobs[knob] = knobs[knob], Macro(name)


class Resolver:
    """Walks from the root and collects what is wrong, so that all of it is reported at once; `...` stands for it."""

    def __init__(self, bindings: Bindings, expected: Collection[str]) -> None:
        self.bindings, self.expected = bindings, expected  # of the root
        self.problems: list[str] = []
        self.reached: set[tuple[str, Callable[..., Any]]] = set()  # scopes and functions whose knobs are looked up

    def value(self, value: Any, scope: tuple[str, ...], supplied: Collection[str], trail: tuple[str, ...]) -> Any:
        """`trail` names the functions and macros on the way from the root; `supplied` is for a reference right here."""
        match value:
            case Reference():
                return self.node(value, value.scope or scope, supplied, trail)
            case Macro():
                return self.macro(value.name, scope, supplied, trail)
            case dict():
                keys = [self.key(key, scope, trail) for key in value]
                self.problems += [f"{trail[-1]}: got two keys {key!r}" for key in keys if keys.count(key) > 1]
                return {key: self.value(item, scope, (), trail) for key, item in zip(keys, value.values(), strict=True)}
            case list() | tuple():
                return type(value)(self.value(item, scope, (), trail) for item in value)
        return value

    def key(self, key: Any, scope: tuple[str, ...], trail: tuple[str, ...]) -> Any:
        """A key of a dictionary: plain, or a macro for something plain."""
        plain = self.value(key, scope, (), trail)
        if plain is ... or isinstance(plain, (str, int, float, bool, type(None))):
            return plain
        what = f"@{full_name(plain.target)}" if isinstance(plain, Node) else repr(plain)
        self.problems.append(f"{trail[-1]}: got {what} as a key of a dictionary, expected text or a number")
        return ...

    def node(self, ref: Reference, scope: tuple[str, ...], supplied: Collection[str], trail: tuple[str, ...]) -> Any:
        label = "/".join([*scope, full_name(ref.target)])
        if label in trail:
            return self.circle(label, trail)
        parameters = signature(ref.target)
        prefixes = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        self.reached.update((prefix, ref.target) for prefix in prefixes)
        bound = reduce(dict.__or__, (self.bindings.knobs.get((prefix, ref.target), {}) for prefix in prefixes))
        left = () if trail else parameters.keys() - self.expected
        bound = {knob: value for knob, value in bound.items() if knob not in left}
        self.problems += [*missing(ref, label, bound, {*supplied, *left}), *not_taken(ref, label, supplied, trail)]
        by_knob: Mapping[str, Collection[str]] = getattr(ref.target, "SUPPLIED", {})
        knobs = {k: self.value(bound[k], scope, by_knob.get(k, ()), (*trail, label)) for k in sorted(bound)}
        self.problems += [p for k, item in knobs.items() for p in type_problem(label, parameters.get(k), item)]
        return Node(ref.target, knobs, ref.call)

    def macro(self, name: str, scope: tuple[str, ...], supplied: Collection[str], trail: tuple[str, ...]) -> Any:
        if f"%{name}" in trail:
            return self.circle(f"%{name}", trail)
        if name in self.bindings.macros:
            return self.value(self.bindings.macros[name], scope, supplied, (*trail, f"%{name}"))
        self.problems.append(
            f"{name}: got no value for this macro (used at {self.bindings.used_at[name]} by {trail[-1]}), expected "
            f"--set '{name}=...' or a line `{name} = ...` in a gin file{suggest_name(name, self.bindings.macros)}"
        )
        return ...

    def circle(self, again: str, trail: tuple[str, ...]) -> Any:
        steps = [*trail[trail.index(again) :], again]
        self.problems.append(f"{again}: got a circle, {' -> '.join(steps)}; expected a value that does not need itself")
        return ...


def signature(target: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Parameters by name; some builtins have no signature, and such a function has none to bind."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def knobs_of(target: Callable[..., Any]) -> list[str]:
    """Names that a gin file may bind: keyword-only parameters of a function, any parameter of a constructor."""
    bindable = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)[: 1 + inspect.isclass(target)]
    return [name for name, p in signature(target).items() if p.kind in bindable]


def bad_names(label: str, target: Callable[..., Any], knobs: Iterable[str]) -> Iterator[str]:
    """Bound names that are data, or that the function does not have."""
    parameters, allowed = signature(target), knobs_of(target)
    for knob in knobs:
        if knob in allowed:
            continue
        if knob in parameters:
            yield f"{label}: got a binding for {knob}, which is data (positional), expected a keyword-only parameter"
        elif not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            hint = suggest_name(knob, allowed)
            yield f"{label}: got a binding for {knob}, expected one of {comma_list(allowed)}{hint}"


def missing(ref: Reference, label: str, bound: Collection[str], supplied: Collection[str]) -> Iterator[str]:
    """Required parameters without a value. Positional ones are for the caller, unless the call is made here."""
    required = {name: p for name, p in signature(ref.target).items() if p.default is p.empty}
    unbound = {name: p.kind for name, p in required.items() if name not in bound and name not in supplied}
    knobs = [name for name, kind in unbound.items() if kind is Parameter.KEYWORD_ONLY]
    data = [name for name, kind in unbound.items() if kind.name.startswith("POSITIONAL")]
    if knobs:
        yield f"{label}: got no value for {', '.join(knobs)}, expected each bound in a gin file or with --set"
    if ref.call and data:
        yield f"@{label}(): got no value for {', '.join(data)}, expected @{label} without (): its caller passes them"
    for name in sorted(set(bound) & set(supplied)):
        yield f"{label}: got a binding for {name}, expected none, as the program passes it"


def not_taken(ref: Reference, label: str, supplied: Collection[str], trail: tuple[str, ...]) -> Iterator[str]:
    """Keyword parameters that the program passes to what is bound here, and that the function does not have."""
    parameters = signature(ref.target)
    names = [] if ref.call else [name for name in supplied if name not in parameters]
    if names and parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield (
            f"{label}: got a function of ({', '.join(parameters)}) in a knob of {trail[-1]}, which passes it "
            f"{', '.join(names)}; expected one that takes this too"
        )


def type_problem(label: str, parameter: Parameter | None, value: Any) -> Iterator[str]:
    """Plain annotations (int, float, str, bool) against what is bound; anything richer is the function's business."""
    expected = None if parameter is None else parameter.annotation
    if expected not in (int, float, str, bool) or value is ... or (isinstance(value, Node) and value.call):
        return
    fits = isinstance(value, (int, float) if expected is float else expected)
    if not fits or (isinstance(value, bool) and expected is not bool):
        got = f"@{full_name(value.target)}" if isinstance(value, Node) else f"{value!r} ({type(value).__name__})"
        yield f"{label}.{parameter.name}: got {got}, expected {expected.__name__}"


# -- resolved values to plain Python: partials that pickle, compile and mean the same wherever they are called


def freeze(value: Any, results: dict[str, Any]) -> Any:
    """Nodes to `functools.partial` (the bare function when it has no knobs), also inside lists, tuples and dicts.

    A live gin reference takes a lock and a lookup per call, does not pickle, breaks `torch.compile(fullgraph=True)`
    and changes its meaning inside a scope. `results` keeps what each `@f()` returned: equal knobs, one call.
    """
    match value:
        case Node():
            knobs = freeze(value.knobs, results)
            function = partial(value.target, **knobs) if knobs else value.target
            if not value.call:
                return function
            key = canonical_text(value)
            if key not in results:
                results[key] = function()
            return results[key]
        case dict():
            return {key: freeze(item, results) for key, item in value.items()}
        case list() | tuple():
            return type(value)(freeze(item, results) for item in value)
    return value


def canonical_text(value: Any) -> str:
    """A resolved value as text: two are equal exactly when the values are. Dictionaries keep their order."""
    match value:
        case Node():
            return f"@{full_name(value.target)}{canonical_text(value.knobs)}{'()' * value.call}"
        case dict():
            return "{" + ", ".join(f"{key!r}: {canonical_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(canonical_text, value))})"
    return repr(value)


def value_fingerprint(value: Any) -> str:
    """SHA-256 of a resolved value."""
    return hashlib.sha256(canonical_text(value).encode()).hexdigest()


# -- a function as a command line names it: a short name or `module.function`, with knobs as `KNOB=VALUE`


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
        expected = "KNOB=VALUE, the value as in Python, text in quotes, or @module.function"
        raise ValueError(f"{flag}: got {text!r}, expected {expected}") from error


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
            raise ValueError(f"{flag} {path}{knob}: got a knob of no function, expected {owner}=@... too")
    for knob, value in own.items():
        if isinstance(value, _At):
            inner = {k.removeprefix(f"{knob}."): v for k, v in of_functions.items() if k.startswith(f"{knob}.")}
            own[knob] = _bound(value, inner, f"{path}{knob}.", flag, short)
    parameters = signature(fn)
    complain([text for knob, value in own.items() for text in type_problem(label, parameters.get(knob), value)])
    unbound = [knob for knob, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [knob for knob in unbound if knob not in own]:
        expected = f"{flag} {path}{missing[0]}=VALUE"
        raise ValueError(f"{name}: got no value for {comma_list(missing)}, expected {expected}")
    return partial(fn, **own) if own else fn


def _function(name: str, short: Sequence[str]) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {name!r}, expected {comma_list(short)} or module.function{suggest_name(name, short)}")
    search_folder(Path.cwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ValueError(f"got {name!r}, expected a module that can be imported: {error}") from error
    fn = getattr(imported, function, None)
    if not callable(fn):
        functions = [other for other, value in vars(imported).items() if callable(value) and not other.startswith("_")]
        raise ValueError(f"got {name!r}, expected a function of {module}{suggest_name(function, functions)}")
    return fn
