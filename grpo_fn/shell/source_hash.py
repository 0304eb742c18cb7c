"""A hash of the source that functions depend on, found by following imports: for what is kept under such a name."""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """What a source file imports and states."""

    imports: tuple[str, ...]  # dotted names, some of which may be no modules
    statements: str  # without docstrings, comments and layout


def hash_of_sources(names: Iterable[str]) -> str:
    """A hash of modules and of all that they import, within functions too, from their own top packages.

    Comments, docstrings and layout do not count. Other packages are left to their versions.
    """
    files = imported_sources(names)
    text = "".join(f"{name}\n{source_in(name, files[name]).statements}\n" for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


def imported_sources(names: Iterable[str]) -> dict[str, Path]:
    """The files of modules and of what they import, over any number of imports, each from its top package."""
    files: dict[str, Path] = {}
    waiting = [*names]
    for name in waiting:
        if source_of(name) is None:
            raise ValueError(f"got the module {name} without a source file, wanted one that can be read")
    while waiting:
        name = waiting.pop()
        file = None if name in files else source_of(name)
        if file is None:
            continue
        files[name] = file
        top = name.partition(".")[0]
        waiting += (one for one in source_in(name, file).imports if one.partition(".")[0] == top)
    return files


def source_in(name: str, file: Path) -> Source:
    """What the file of a module imports and states."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    return parse_source(file.read_text(encoding="utf-8"), package)


@lru_cache(maxsize=512)
def parse_source(text: str, package: str) -> Source:
    """What a source text imports and states. A process parses a text once."""
    tree = ast.parse(text)
    return Source(tuple(imported_names(tree, package)), statements_of(tree))


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names that import statements mention, wherever they stand; what is imported from a module may be none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            whole = importlib.util.resolve_name(base, package) if node.level else base
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names)


def source_of(name: str) -> Path | None:
    """The file of the module of that name; None where there is no such module, or none that is written in Python."""
    if name in sys.modules:  # __main__ has no spec
        file = getattr(sys.modules[name], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # what precedes the last dot is no package
            return None
        file = spec and spec.origin
    return Path(file) if file and file.endswith(".py") else None


def statements_of(tree: ast.Module) -> str:
    """The statements of a module, without docstrings, comments and layout; those docstrings are taken from `tree`."""
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
