"""What a YAML of NeMo-RL means: the files it is laid over (`defaults`) and its interpolations (`${a.b}`, `${.b}`)."""

import re
from collections.abc import Callable, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any

from import_draft import leaves, number

PLACE = re.compile(r"\$\{([^${}]*)\}")
DEEPEST = 20  # levels of files or references, beyond which they go round in circles


def inherited(path: Path, read: Callable[[Path], Mapping[str, Any]], *, depth: int = 0) -> dict[str, Any]:
    """A file with those of its `defaults` under it, paths relative to the file; `_override_: true` replaces a mapping.

    Raises ValueError for files that are laid over each other in a circle, and as `read` does.
    """
    if depth > DEEPEST:
        raise ValueError(f"{path}: got defaults that lead back to it, wanted files below one another")
    own = dict(read(path))
    names = own.pop("defaults", None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: got defaults {names!r}, wanted the name of a file, or several")
    below: Mapping[str, Any] = {}
    for name in names:
        below = laid_over(below, inherited(path.parent / name, read, depth=depth + 1))
    return laid_over(below, own)


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping `below` with the values of `above`, key by key."""
    found = {} if above.get("_override_") is True else dict(below)
    for key, value in above.items():
        if key == "_override_":
            continue
        under = found.get(key)
        found[key] = (
            laid_over(under if isinstance(under, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return found


def interpolated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves with ${a.b}, ${.b} and ${mul:x,y} replaced. Raises ValueError for one that leads nowhere, or round.

    ${.b} is `b` beside the key that it stands at; each further dot is one level up.
    """
    values = dict(leaves(config))

    def resolve(value: Any, key: str, depth: int) -> Any:
        if isinstance(value, list):
            return [resolve(item, key, depth) for item in value]
        if not isinstance(value, str) or not (found := PLACE.search(value)):
            return value
        if depth > DEEPEST:
            raise ValueError(f"got {value!r}, which refers to itself, wanted a value")
        there, place = looked_up(found[1], key, depth)
        if found[0] == value:
            return resolve(there, place, depth + 1)
        return resolve(value[: found.start()] + str(there) + value[found.end() :], key, depth + 1)

    def looked_up(inside: str, key: str, depth: int) -> tuple[Any, str]:
        name, _, args = inside.partition(":")
        if name == "mul":
            factors = [number(str(resolve(part.strip(), key, depth + 1))) for part in args.split(",")]
            if not all(isinstance(factor, float) and isfinite(factor) for factor in factors):
                raise ValueError(f"got ${{{inside}}}, wanted numbers to multiply")
            return prod(int(factor) if factor.is_integer() else factor for factor in factors), key
        place = absolute(inside, key)
        if place not in values:
            raise ValueError(f"got ${{{inside}}} at {key}, wanted a key of the file")
        return values[place], place

    return {name: resolve(value, name, 0) for name, value in values.items()}


def absolute(name: str, key: str) -> str:
    """The dotted key that a name at `key` means."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    return ".".join([*key.split(".")[:-dots], name[dots:]])
