"""A configuration of another trainer: JSON, YAML or Python literals, files it is laid over, ${references}."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any

import yaml

PLACE = re.compile(r"\$\{([^${}]*)\}")
DEEPEST = 20  # levels of files or references, beyond which they go round in circles


def read(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON, YAML or Python file. Raises ValueError naming what was got instead."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"got {path}, which cannot be read ({error}), expected a configuration") from error
    try:
        config = {".json": json.loads, ".py": python_literals}.get(path.suffix, yaml.safe_load)(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: got {said}, expected JSON, YAML or Python literals") from error
    if not isinstance(config, Mapping) or not config:
        raise ValueError(f"{path}: got {type(config).__name__}, expected keys and values")
    return config


def python_literals(text: str) -> Any:
    """A dict literal, or the keywords of a call, alone or assigned to a name."""
    body = reversed(ast.parse(text).body)
    value = next((node.value for node in body if isinstance(node, ast.Expr | ast.Assign)), None)
    if isinstance(value, ast.Call):
        return {word.arg: ast.literal_eval(word.value) for word in value.keywords}
    return ast.literal_eval(value)


def read_with_defaults(path: Path, *, depth: int = 0) -> dict[str, Any]:
    """A file with those of its `defaults` under it, paths relative to the file; `_override_: true` replaces a mapping.

    Raises ValueError for files that are laid over each other in a circle, and as `read` does.
    """
    if depth > DEEPEST:
        raise ValueError(f"{path}: got defaults that lead back to it, expected files below one another")
    own = dict(read(path))
    names = own.pop("defaults", None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: got defaults {names!r}, expected the name of a file, or several")
    below: dict[str, Any] = {}
    for name in names:
        below = lay_over(below, read_with_defaults(path.parent / name, depth=depth + 1))
    return lay_over(below, own)


def lay_over(below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping `below`, if it is one, with the values of `above`, key by key."""
    merged = dict(below) if isinstance(below, Mapping) and above.get("_override_") is not True else {}
    for key, value in above.items():
        if key != "_override_":
            merged[key] = lay_over(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def flat_options(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings."""
    for key, value in config.items():
        if not isinstance(key, str):
            raise ValueError(f"got the key {key!r} in {prefix or 'the file'}, expected text")
        if isinstance(value, Mapping) and value:
            yield from flat_options(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def parse_number(text: str) -> Any:
    """A number written as text, else the text."""
    try:
        return float(text)
    except ValueError:
        return text


def fill_references(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves with ${a.b}, ${.b} and ${mul:x,y} replaced. Raises ValueError for one that leads nowhere, or round.

    ${.b} is `b` beside the key that it stands at; each further dot is one level up.
    """
    values = dict(flat_options(config))

    def resolve(value: Any, key: str, depth: int) -> Any:
        if isinstance(value, list):
            return [resolve(item, key, depth) for item in value]
        if not isinstance(value, str) or not (place := PLACE.search(value)):
            return value
        if depth > DEEPEST:
            raise ValueError(f"got {value!r}, which refers to itself, expected a value")
        if place[1].startswith("mul:"):
            factors = [parse_number(str(resolve(part.strip(), key, depth + 1))) for part in place[1][4:].split(",")]
            if not all(isinstance(factor, float) and isfinite(factor) for factor in factors):
                raise ValueError(f"got {place[0]}, expected numbers to multiply")
            there = prod(int(factor) if factor.is_integer() else factor for factor in factors)
        else:
            name = place[1].lstrip(".")
            if dots := len(place[1]) - len(name):
                name = ".".join([*key.split(".")[:-dots], name])
            if name not in values:
                raise ValueError(f"got {place[0]} at {key}, expected a key of the file")
            there, key = values[name], name if place[0] == value else key
        if place[0] != value:
            there = value[: place.start()] + str(there) + value[place.end() :]
        return resolve(there, key, depth + 1)

    return {name: resolve(value, name, 0) for name, value in values.items()}
