"""A hash of the source that functions depend on, found by following imports: for what is kept under such a name."""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def hash_of_sources(names: Iterable[str]) -> str:
    """A hash of modules and of all that they import, within functions too, from their own top packages.

    Comments, docstrings and layout do not count. Other packages are left to their versions.

    Args:
        names: dotted names of modules.

    Returns:
        The hash, in hexadecimal: the same iff the modules and their statements are.

    Raises:
        ValueError: a module without a source file.
    """
    files = imported_sources(names)
    text = "".join(f"{name}\n{statements_of(files[name])}\n" for name in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


def imported_sources(names: Iterable[str]) -> dict[str, Path]:
    """The files of modules and of what they import, over any number of imports, each from its top package.

    Args:
        names: dotted names of modules.

    Returns:
        File by dotted name.

    Raises:
        ValueError: a module of `names` without a source file.
    """
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
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        found = imported_names(ast.parse(file.read_text(encoding="utf-8")), package)
        waiting += (one for one in found if one.partition(".")[0] == top)
    return files


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names that import statements mention, wherever they stand; what is imported from a module may be none.

    Args:
        tree: of the module.
        package: that relative imports are relative to.
    """
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


def statements_of(file: Path) -> str:
    """The statements of a source file, without docstrings, comments and layout."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
