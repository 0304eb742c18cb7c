"""Resolved values to plain Python: partials that pickle, compile and mean the same wherever they are called."""

import hashlib
from functools import partial
from typing import Any

from grpo_fn.config.nodes import Node, full_name


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
