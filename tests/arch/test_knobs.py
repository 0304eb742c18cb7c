"""In pure packages data is positional, knobs are keyword-only, neither has a default: a number lives in gin, once."""

import ast
from pathlib import Path

import pytest
from test_arrows import PACKAGE, PURE

Function = ast.FunctionDef | ast.AsyncFunctionDef


def pure_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] in PURE]


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


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f(x, *, eps=1e-6): ...", "m.py:1: f: got eps=1e-06, which is a knob"),
        ("def f(x, mask=None): ...", "m.py:1: f: got mask=None, which is data"),
        ("def f(x, y=2, /): ...", "m.py:1: f: got y=2, which is data"),
        ("def f(\n    x,\n    *,\n    a,\n    b=None,\n): ...", "m.py:5: f: got b=None, which is a knob"),
        ("class C:\n    def go(self, *, lr=1): ...", "m.py:2: C.go: got lr=1, which is a knob"),
        ("class C:\n    def __init__(self, lr=1): ...", "m.py:2: C.__init__: got lr=1, which is data"),
        ("if True:\n    async def f(*, a=0): ...", "m.py:2: f: got a=0, which is a knob"),
    ],
)
def test_a_default_is_seen(source: str, complaint: str) -> None:
    (message,) = defaults("m.py", source)
    assert message.startswith(complaint)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x, y, *, eps, clip): ...",
        "def f(x, *rest, eps, **more): ...",
        "def _f(x, *, eps=1): ...",
        "class T(NamedTuple):\n    step: int = 0",
        "def f(x):\n    def g(y, z=1): ...",
    ],
)
def test_what_is_allowed_is_not(source: str) -> None:
    assert defaults("m.py", source) == []
