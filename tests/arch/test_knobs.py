"""In pure packages data is positional, knobs are keyword-only, neither has a default: a number lives in gin, once.

How a file of rows is read is no science: its readers have defaults.
"""

import ast
from pathlib import Path

from test_arrows import PACKAGE, PURE

Function = ast.FunctionDef | ast.AsyncFunctionDef


READERS = PACKAGE / "tasks" / "rows.py"


def pure_files() -> list[Path]:
    pure = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] in PURE]
    return [path for path in pure if path != READERS]


def public_functions(body: list[ast.stmt], prefix: str = "") -> list[tuple[str, Function]]:
    """Module-level functions and methods of classes; a class's fields are data and may have defaults."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += public_functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            if not node.name.startswith("_") or node.name in ("__init__", "__call__"):
                found.append((prefix + node.name, node))
        elif isinstance(node, ast.If | ast.Try):
            found += public_functions([*node.body, *node.orelse], prefix)
    return found


def defaults(path: str, source: str) -> list[str]:
    """Every parameter of a public function that has a default, one message each."""
    found = []
    for name, node in public_functions(ast.parse(source).body):
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        given = positional[len(positional) - len(args.defaults) :]
        for arg, value, kind in [
            *((arg, value, "data") for arg, value in zip(given, args.defaults, strict=True)),
            *((arg, value, "a knob") for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value),
        ]:
            got = f"got {arg.arg}={ast.unparse(value)}"
            found.append(f"{path}:{arg.lineno}: {name}: {got}, which is {kind}, expected no default in a pure package")
    return found


def test_no_public_function_of_a_pure_package_has_a_default() -> None:
    files = pure_files()
    assert len(files) > 10
    found = [m for path in files for m in defaults(str(path.relative_to(PACKAGE)), path.read_text())]
    assert not found, "\n".join(found)
