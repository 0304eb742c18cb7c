"""What a gin file says, without gin: references, macros, and the functions with knobs that they resolve to."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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


def search_working_folder() -> None:
    """Let modules of the working folder be imported by tools and console scripts too, not under `python -m` alone."""
    here = os.getcwd()
    if not {"", here} & {*sys.path}:
        sys.path.append(here)


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """`; did you mean X?`, ignoring case, or nothing when no choice is near."""
    by_case = {choice.lower(): choice for choice in sorted(choices) if choice != name}
    match = difflib.get_close_matches(name.lower(), by_case, n=1)
    return f"; did you mean {by_case[match[0]]}?" if match else ""


def comma_list(names: Iterable[str]) -> str:
    """`a, b, c`, or `none`."""
    return ", ".join(names) or "none"


def complain(problems: Sequence[str]) -> None:
    """Raise one ValueError with every problem, each on its line, if there are any."""
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
