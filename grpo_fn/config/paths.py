"""Paths in a configuration: relative ones in absolute form, so that what is stored means the same from any folder."""

import glob
import os
from dataclasses import replace
from typing import Any

from grpo_fn.config.nodes import Bindings, Macro

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


def is_relative_path(text: str) -> bool:
    """Whether a text names a file or folder of the working folder, or with `*` or `?` some of them."""
    if not text or os.path.isabs(text) or text.startswith("~"):
        return False
    return bool(glob.glob(text)) if glob.has_magic(text) else os.path.exists(text)
