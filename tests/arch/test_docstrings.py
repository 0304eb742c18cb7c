"""Docstrings: one line for everything public; Args, Returns and Raises for what a user can name.

Those are the functions and classes that a gin file of gin/ or experiments/ binds or names, and the functions of the
catalogue. Their sections have the names of the signature and the errors of the body. What all functions of a kind take
and return stands once, in a table in the docstring of their module: `    name   meaning`. Everywhere else one true line
suffices, and a comment where the reason for something stands.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Set
from contextlib import chdir
from pathlib import Path
from typing import Any

from grpo_fn.config import parse_gin
from grpo_fn.config.resolve import functions

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "docs" / "algorithms" / "catalogue.md"
MACROS = {"MODEL": "'MODEL'", "DATA": "'DATA'", "DEMONSTRATIONS": "'DEMONSTRATIONS'"}  # a user binds these
# How the first line of what a user can name does not begin: it says what the thing is, and does not ask.
QUESTIONS = re.compile(r"(What|Where|Which|Whether|Who|Whose|How|When)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def gin_targets() -> Iterator[Callable[..., Any]]:
    """Everything of ours that a gin file binds or names."""
    with chdir(ROOT):
        for path in sorted([*ROOT.glob("gin/**/*.gin"), *ROOT.glob("experiments/**/*.gin")]):
            text = path.read_text(encoding="utf-8")
            macros = [f"{name}={value}" for name, value in MACROS.items() if f"%{name}" in text]
            targets = functions(parse_gin([str(path)], macros))
            yield from (target for target in targets if target.__module__.startswith("grpo_fn."))


def catalogue_targets() -> Iterator[Callable[..., Any]]:
    """Every function that has a line of the catalogue; another test says when a line has no function any more."""
    page = CATALOGUE.read_text(encoding="utf-8")
    for module, table in re.findall(r"<!-- functions: (\w+) \(.*?-->(.*?)<!-- end -->", page, re.DOTALL):
        members = vars(importlib.import_module(f"grpo_fn.algo.{module}"))
        yield from (members[name] for name in re.findall(r"^\| `(\w+)", table, re.MULTILINE) if name in members)


def parameters(node: ast.ClassDef | Function) -> list[str]:
    """The names of what a caller passes."""
    if isinstance(node, ast.ClassDef):
        init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if init is not None:
            return parameters(init)
        fields = [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        return [name for name in fields if not name.isupper() and not name.startswith("_")]
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def faults(source: str, shared: Set[str] = frozenset()) -> list[str]:
    """What is missing or wrong in the docstring of a function or class; `shared` is in that of its module."""
    source = textwrap.dedent(source)
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef | Function)
    text = ast.get_docstring(node) or ""
    messages = [] if text else ["no docstring"]
    messages += ["a first line that says what the thing is, not a question word"] if QUESTIONS.match(text) else []
    sections = dict(re.findall(r"^(Args|Returns|Yields|Raises|Attributes):\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE))
    block = sections.get("Args", "") + sections.get("Attributes", "")
    entries = re.findall(r"^ {4}(\w[\w, ]*)(?: \([^)]*\))?: ", block, re.MULTILINE)
    names = {name.strip() for entry in entries for name in entry.split(",")} - {""}
    signature = parameters(node)
    # A field of a class may have its line in a comment beside it.
    comments = set(re.findall(r"^ {4}(\w+)\b[^#\n]*:[^#\n]*#", source, re.MULTILINE))
    documented = names | comments if isinstance(node, ast.ClassDef) else names | shared
    missing = [name for name in signature if name not in documented]
    messages += [f"Args: {', '.join(missing)}"] if missing else []
    messages += [f"no parameter {name}" for name in sorted(names - {*signature}) if signature]
    if isinstance(node, ast.ClassDef):
        return messages
    silent = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn")
    messages += [] if silent or "returns" in shared or sections.keys() & {"Returns", "Yields"} else ["Returns"]
    errors = {
        ast.unparse(one.exc.func if isinstance(one.exc, ast.Call) else one.exc)
        for one in ast.walk(node)
        if isinstance(one, ast.Raise) and one.exc is not None
    }
    raises = sections.get("Raises", "")
    return [*messages, *(f"Raises: {name}" for name in sorted(errors) if name[0].isupper() and name not in raises)]


def definitions_without_docstring(source: str) -> list[str]:
    """`line: name` of every public function and class of a module that has none, and of the module itself."""
    tree = ast.parse(source)
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")]
    messages = [f"{node.lineno}: {node.name}" for node in nodes if ast.get_docstring(node) is None]
    return [*(["1: the module"] if tree.body and ast.get_docstring(tree) is None else []), *messages]


def test_names_for_users_have_args_returns_and_raises() -> None:
    in_gin, in_catalogue = {*gin_targets()}, {*catalogue_targets()}
    assert len(in_gin) > 100
    assert len(in_catalogue) > 50
    wrong = {}
    for target in in_gin | in_catalogue:
        table = re.findall(r"^ {4}(\w+) {2,}\S", inspect.getmodule(target).__doc__ or "", re.MULTILINE)
        if messages := faults(inspect.getsource(target), {*table}):
            wrong[f"{target.__module__}.{target.__qualname__}"] = messages
    assert not wrong


def test_everything_public_has_a_docstring() -> None:
    paths = sorted((ROOT / "grpo_fn").rglob("*.py"))
    messages = [
        f"{path.relative_to(ROOT)}:{message} has no docstring"
        for path in paths
        for message in definitions_without_docstring(path.read_text(encoding="utf-8"))
    ]
    assert not messages, "\n".join(messages)
