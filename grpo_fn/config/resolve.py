"""References to functions with knobs, macros to values, every name against the signature that it claims to fit.

What is resolved is frozen into plain partials (`freeze`).
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from inspect import Parameter
from typing import Any

from grpo_fn.config.nodes import (
    Bindings,
    Macro,
    Node,
    Reference,
    comma_list,
    complain,
    full_name,
    nested_references,
    suggest_name,
    used_macros,
)

Supplied = Mapping[str, Collection[str]]


def resolve(bindings: Bindings, root: Callable[..., Any], supplied: Supplied, wanted: Collection[str]) -> Node:
    """The root with all of the wanted knobs that it would receive. Raises ValueError with all that is missing or wrong.

    Knobs bound in a file for a function that the root never reaches are no error: an include may set the knobs of a
    function which a later include replaces. Those bound on the command line are, where all of the root is wanted.
    """
    complain(list(unused_macros(bindings)))
    resolver = Resolver(bindings, supplied, wanted)
    node = resolver.node(Reference(root, (), False), (), (), ())
    complain(resolver.problems)
    if set(knobs_of(root)) <= set(wanted):
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
            yield f"{flag}: the run does not use {gin_name(target)}{where}, wanted a knob that has an effect{hint}"


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

    def __init__(self, bindings: Bindings, supplied: Supplied, wanted: Collection[str]) -> None:
        self.bindings, self.supplied, self.wanted = bindings, supplied, wanted  # the last two are the root's
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
        found = self.value(key, scope, (), trail)
        if found is ... or isinstance(found, (str, int, float, bool, type(None))):
            return found
        what = f"@{full_name(found.target)}" if isinstance(found, Node) else repr(found)
        self.problems.append(f"{trail[-1]}: got {what} as a key of a dictionary, wanted text or a number")
        return ...

    def node(self, ref: Reference, scope: tuple[str, ...], supplied: Collection[str], trail: tuple[str, ...]) -> Any:
        label = "/".join([*scope, full_name(ref.target)])
        if label in trail:
            return self.circle(label, trail)
        parameters = signature(ref.target)
        prefixes = ["/".join(scope[:depth]) for depth in range(len(scope) + 1)]
        self.reached.update((prefix, ref.target) for prefix in prefixes)
        bound = reduce(dict.__or__, (self.bindings.knobs.get((prefix, ref.target), {}) for prefix in prefixes))
        left = () if trail else parameters.keys() - self.wanted
        bound = {knob: value for knob, value in bound.items() if knob not in left}
        self.problems += [*missing(ref, label, bound, {*supplied, *left}), *not_taken(ref, label, supplied, trail)]
        by_knob = getattr(ref.target, "SUPPLIED", {}) if trail else self.supplied
        knobs = {k: self.value(bound[k], scope, by_knob.get(k, ()), (*trail, label)) for k in sorted(bound)}
        self.problems += [p for k, item in knobs.items() for p in type_problem(label, parameters.get(k), item)]
        return Node(ref.target, knobs, ref.call)

    def macro(self, name: str, scope: tuple[str, ...], supplied: Collection[str], trail: tuple[str, ...]) -> Any:
        if f"%{name}" in trail:
            return self.circle(f"%{name}", trail)
        if name in self.bindings.macros:
            return self.value(self.bindings.macros[name], scope, supplied, (*trail, f"%{name}"))
        self.problems.append(
            f"{name}: got no value for this macro (used at {self.bindings.used_at[name]} by {trail[-1]}), wanted "
            f"--gin_param '{name}=...' or a line `{name} = ...` in a gin file{suggest_name(name, self.bindings.macros)}"
        )
        return ...

    def circle(self, again: str, trail: tuple[str, ...]) -> Any:
        steps = [*trail[trail.index(again) :], again]
        self.problems.append(f"{again}: got a circle, {' -> '.join(steps)}; wanted a value that does not need itself")
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
            yield f"{label}: got a binding for {knob}, which is data (positional), wanted a keyword-only parameter"
        elif not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            yield f"{label}: got a binding for {knob}, wanted one of {comma_list(allowed)}{suggest_name(knob, allowed)}"


def missing(ref: Reference, label: str, bound: Collection[str], supplied: Collection[str]) -> Iterator[str]:
    """Required parameters without a value. Positional ones are for the caller, unless the call is made here."""
    required = {name: p for name, p in signature(ref.target).items() if p.default is p.empty}
    unbound = {name: p.kind for name, p in required.items() if name not in bound and name not in supplied}
    knobs = [name for name, kind in unbound.items() if kind is Parameter.KEYWORD_ONLY]
    data = [name for name, kind in unbound.items() if kind.name.startswith("POSITIONAL")]
    if knobs:
        yield f"{label}: got no value for {', '.join(knobs)}, wanted each bound in a gin file or with --gin_param"
    if ref.call and data:
        yield f"@{label}(): got no value for {', '.join(data)}, wanted @{label} without (), for its caller to pass them"
    for name in sorted(set(bound) & set(supplied)):
        yield f"{label}: got a binding for {name}, wanted none, as the program passes it"


def not_taken(ref: Reference, label: str, supplied: Collection[str], trail: tuple[str, ...]) -> Iterator[str]:
    """Keyword parameters that the program passes to what is bound here, and that the function does not have."""
    parameters = signature(ref.target)
    names = [] if ref.call else [name for name in supplied if name not in parameters]
    if names and parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield (
            f"{label}: got a function of ({', '.join(parameters)}) in a knob of {trail[-1]}, which passes it "
            f"{', '.join(names)}; wanted one that takes this too"
        )


def type_problem(label: str, parameter: Parameter | None, value: Any) -> Iterator[str]:
    """Plain annotations (int, float, str, bool) against what is bound; anything richer is the function's business."""
    wanted = None if parameter is None else parameter.annotation
    if wanted not in (int, float, str, bool) or value is ... or (isinstance(value, Node) and value.call):
        return
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        got = f"@{full_name(value.target)}" if isinstance(value, Node) else f"{value!r} ({type(value).__name__})"
        yield f"{label}.{parameter.name}: got {got}, wanted {wanted.__name__}"


# -- resolved values to plain Python: partials that pickle, compile and mean the same wherever they are called


def freeze(value: Any, made: dict[str, Any]) -> Any:
    """Nodes to `functools.partial` (the bare function when it has no knobs), also inside lists, tuples and dicts.

    A live gin reference takes a lock and a lookup per call, does not pickle, breaks `torch.compile(fullgraph=True)`
    and changes its meaning inside a scope. `made` keeps what each `@f()` returned: equal knobs, one call.
    """
    match value:
        case Node():
            knobs = freeze(value.knobs, made)
            function = partial(value.target, **knobs) if knobs else value.target
            if not value.call:
                return function
            key = canonical_text(value)
            if key not in made:
                made[key] = function()
            return made[key]
        case dict():
            return {key: freeze(item, made) for key, item in value.items()}
        case list() | tuple():
            return type(value)(freeze(item, made) for item in value)
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
