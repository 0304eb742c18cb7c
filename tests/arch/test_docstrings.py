"""Docstrings of what a user can name: Args, Returns and Raises, as the signature and the body have them."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import grpo_fn
from grpo_fn.config import parse_gin
from grpo_fn.config.nodes import functions

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"MODEL": "'MODEL'", "DATA": "'DATA'"}  # macros that a user gives
# Whose public functions are imported from other people's code and named in their gin files; but not what serves them.
LIBRARY = ("grpo_fn.algo", "grpo_fn.rewards", "grpo_fn.environments", "grpo_fn.tasks", "grpo_fn.testing")
INTERNAL = ("grpo_fn.algo.metrics", "grpo_fn.rewards.math.", "grpo_fn.tasks.rows")
# How a first line does not begin: it is to say what the thing is, not to ask.
QUESTIONS = re.compile(r"(What|Where|Which|Whether|Who|Whose|How|When)\b")


def gin_targets() -> set[Callable[..., Any]]:
    """Everything that a gin file of ours binds or names."""
    found: set[Callable[..., Any]] = set()
    for path in sorted((ROOT / "gin").rglob("*.gin")):
        text = path.read_text(encoding="utf-8")
        found |= set(functions(parse_gin([str(path)], [f"{k}={v}" for k, v in GIVEN.items() if f"%{k}" in text])))
    return {target for target in found if target.__module__.startswith("grpo_fn.")}


def library_targets() -> Iterator[Callable[..., Any]]:
    """The public functions of the packages that others import."""
    for module in pkgutil.walk_packages(grpo_fn.__path__, "grpo_fn."):
        if module.name.startswith(LIBRARY) and not module.name.startswith(INTERNAL):
            for name, value in vars(importlib.import_module(module.name)).items():
                own = inspect.isfunction(value) and value.__module__ == module.name and not name.startswith("_")
                if own and (name.startswith("check_") or not module.name.startswith("grpo_fn.testing")):
                    yield value


TARGETS = sorted({*gin_targets(), *library_targets()}, key=lambda target: (target.__module__, target.__qualname__))


def parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names that a caller gives."""
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


def faults(target: Callable[..., Any]) -> list[str]:
    """What is missing in the docstring of a function or class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(target))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    text = inspect.getdoc(target) or ""
    found = [] if not QUESTIONS.match(text) else ["a first line that says what the thing is, not a question word"]
    sections = dict(re.findall(r"^(Args|Returns|Yields|Raises|Attributes):\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE))
    block = sections.get("Args", "") + sections.get("Attributes", "")
    entries = set(re.findall(r"^ {4}([\w, ]+)(?: \([^)]*\))?: ", block, re.MULTILINE))
    names = {name.strip() for entry in entries for name in entry.split(",")}
    commented = set(re.findall(r"^ {4}(\w+)\b[^#\n]*:[^#\n]*#", inspect.getsource(target), re.MULTILINE))
    wanted = parameters(node)
    missing = [
        name for name in wanted if name not in names and not (isinstance(node, ast.ClassDef) and name in commented)
    ]
    found += [f"Args: {', '.join(missing)}"] if missing else []
    found += [f"no parameter {name}" for name in sorted(names - set(wanted) - {""}) if wanted]
    if isinstance(node, ast.ClassDef):
        return found
    none = node.returns is None or ast.unparse(node.returns) in ("None", "NoReturn")
    if not none and not sections.keys() & {"Returns", "Yields"}:
        found.append("Returns")
    raised = {
        ast.unparse(one.exc.func if isinstance(one.exc, ast.Call) else one.exc)
        for one in ast.walk(node)
        if isinstance(one, ast.Raise) and one.exc is not None
    }
    said = sections.get("Raises", "")
    found += [f"Raises: {name}" for name in sorted(raised) if name[0].isupper() and name not in said]
    return found


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.__module__}.{target.__qualname__}")
def test_what_a_user_can_name_has_args_returns_and_raises(target: Callable[..., Any]) -> None:
    assert not faults(target)


def test_the_targets_are_those_of_the_package() -> None:
    assert len(TARGETS) > 150
