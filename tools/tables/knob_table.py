"""Every knob that a gin file can bind, in a table for each function.

A knob is what `knobs_of` lets a gin file bind and the program does not pass itself. Its type and meaning are those of
the code: the annotation, and the comment beside it, its line under "Args:" or, for all functions of
a module, in the table of the module's docstring.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import function_table
from page_tables import PLACE

from grpo_fn.config import expand_macros, gin_literal, parse_gin
from grpo_fn.config.resolve import Reference, functions, gin_name, knobs_of, nested_references, signature

ROOT = Path(__file__).resolve().parents[2]
GIN = ROOT / "gin"
# Packages of which a gin file may name any function that can stand in the place of one that our files name.
CATALOGUE = ("algo", "environments", "rewards", "tasks")
# Such functions that are the program's own: it wraps what a gin file names in them.
INTERNAL = {"sample_and_follow"}
Target = Callable[..., Any]


def table(_: str) -> str:
    """A heading, the docstring's first line and a table for every function with knobs."""
    usage, parts = Usage(), []
    for target in sorted(usage.catalogue(), key=place):
        if rows := list(usage.rows(target)):
            first_line = (inspect.getdoc(target) or "").partition("\n")[0]
            parts += [f"## {gin_name(target)}\n\n{cell(first_line)} (`{target.__module__}`)\n"]
            parts += ["| knob | type | default | meaning |\n|---|---|---|---|", *rows, ""]
    return "\n".join(parts)


def kind(target: Target) -> Hashable:
    """Functions of one kind take the same data, and return the same where the names of the data say little."""
    if not inspect.isfunction(target):
        return target
    data = tuple(name for name, p in signature(target).items() if p.kind is not p.KEYWORD_ONLY)
    return data, "" if len(data) > 1 else str(inspect.signature(target).return_annotation)


class Selectors(dict[Target, str]):
    """The name of every function, as a value has it."""

    def __missing__(self, target: Target) -> str:
        return gin_name(target)


class Usage:
    """What the gin files name, and what they and the program pass to it; by kind, a class being a kind of its own."""

    def __init__(self) -> None:
        self.base = parse_gin([str(GIN / "base.gin")], [])
        self.targets: set[Target] = set()
        self.calls: set[Target] = set()  # what some file names as `@f()`
        self.arguments: dict[Hashable, set[str]] = defaultdict(set)  # keyword arguments that the program passes
        self.scopes: dict[tuple[Hashable, str], set[str]] = defaultdict(set)  # in which some file binds a knob
        for bindings in (parse_gin([str(path)], []) for path in sorted(GIN.rglob("*.gin"))):
            self.targets |= {target for target in functions(bindings) if target.__module__.startswith("grpo_fn.")}
            named = nested_references([*bindings.knobs.values(), bindings.macros])
            self.calls |= {one.target for one in named if isinstance(one, Reference) and one.call}
            for (scope, owner), values in bindings.knobs.items():
                supplied = getattr(owner, "SUPPLIED", {})
                for knob, value in values.items():
                    self.scopes[kind(owner), knob].add(scope)
                    if isinstance(value := expand_macros(value, bindings.macros), Reference):
                        self.arguments[kind(value.target)].update(supplied.get(knob, ()))

    def catalogue(self) -> set[Target]:
        """All functions that a file or the catalogue names, and those of their kinds in their modules or CATALOGUE."""
        targets, kinds = {*self.targets}, {kind(target) for target in self.targets}
        page = (ROOT / "docs" / "algorithms" / "catalogue.md").read_text(encoding="utf-8")
        for _, words in PLACE.findall(page):
            targets.update(function_table.functions(words).values())
        modules = {target.__module__ for target in self.targets}
        for package in CATALOGUE:
            modules |= {f"grpo_fn.{package}.{one.name}" for one in iter_modules([str(ROOT / "grpo_fn" / package)])}
        for name in sorted(modules):
            for one in filter(inspect.isfunction, vars(import_module(name)).values()):
                own = one.__module__ == name and one.__name__[0] != "_" and one.__name__ not in INTERNAL
                if own and kind(one) in kinds and self.arguments[kind(one)] <= {*knobs_of(one)}:
                    targets.add(one)
        return targets

    def rows(self, target: Target) -> Iterator[str]:
        """A row for every knob of a function. What the program passes is one only in a scope that some file binds."""
        types, meanings = declarations(target)
        for name in knobs_of(target):
            parameter, scopes = signature(target)[name], self.scopes[kind(target), name]
            # The caller of a class passes it data: what comes by position, where no file binds it.
            data = parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
            passed = name in self.arguments[kind(target)] or (data and not scopes and target not in self.calls)
            for scope in sorted(scopes) if passed else [""]:
                value = self.base.knobs.get((scope, target), {}).get(name, parameter.default)
                value = Reference(value, (), False) if inspect.isfunction(value) else value
                default = "" if value is parameter.empty else gin_literal(value, Selectors()).replace(", )", ",)")
                whole = code(f"{scope}/{gin_name(target)}.{name}".lstrip("/"))
                yield f"| {whole} | {code(types[name])} | {code(default)} | {cell(meanings[name])} |"


def declarations(target: Target) -> tuple[dict[str, str], dict[str, str]]:
    """The types and the meanings of the parameters of a function, or of the fields of a class and of its bases."""
    types, meanings = {}, {}
    bases = inspect.getmro(target)[1:] if inspect.isclass(target) else ()
    for owner in [target, *(base for base in bases if base.__module__.startswith("grpo_fn."))]:
        source = textwrap.dedent(inspect.getsource(owner))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
        lines = {**shared_lines(owner), **argument_lines(owner)}
        for node in ast.walk(ast.parse(source)):  # the outermost first: a field before a parameter of some method
            name = node.arg if isinstance(node, ast.arg) else getattr(getattr(node, "target", None), "id", "")
            if name and name not in types and (annotation := getattr(node, "annotation", None)):
                above = comments.get(node.lineno - 1)
                comment = comments.get(node.lineno) or (above if above and above.line.lstrip()[0] == "#" else None)
                types[name] = ast.unparse(annotation)
                meanings[name] = lines.get(name) or (comment.string.lstrip("# ") if comment else "")
    return types, meanings


def argument_lines(target: Target) -> Mapping[str, str]:
    """The lines under "Args:" of a docstring, by name."""
    _, label, rest = (inspect.getdoc(target) or "").partition("Args:\n")
    block = re.split(r"\n(?=\S)", rest, maxsplit=1)[0] if label else ""
    entries = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {6,}.*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def shared_lines(target: Target) -> Mapping[str, str]:
    """The table in the docstring of a function's module, `    name   meaning`: what all functions there take."""
    text = inspect.getmodule(target).__doc__ or "" if inspect.isfunction(target) else ""
    entries = re.findall(r"^ {4}(\w+) {2,}(\S.*(?:\n {8,}\S.*)*)", text, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def place(target: Target) -> tuple[object, ...]:
    """Where a function stands on the page: the root, its sections, then everything else by module, as in the source."""
    module, (_, line) = target.__module__, inspect.getsourcelines(target)
    return module != "grpo_fn.train", module != "grpo_fn.trainer.sections", module, line


def cell(text: str) -> str:
    """Text of a table's cell: what is no code in it is no link either."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(part if i % 2 else part.replace("[", r"\[").replace("<", "&lt;") for i, part in enumerate(parts))


def code(text: str) -> str:
    """Code of a table's cell; nothing for nothing."""
    return "`{}`".format(text.replace("|", r"\|")) if text else ""
