"""Writes docs/configuration/{knobs,gin_files}.md from the gin files and from the code that they name.

python tools/tables/gin_pages.py            rewrite both pages
python tools/tables/gin_pages.py --check    exit 1 if a page is not what would be written

A knob is what `knobs_of` lets a gin file bind and the program does not pass itself. Its type and meaning are those of
the code: the annotation, and the comment beside it or its line under "Args:".
"""

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import catalogue_page
from page_files import write_pages

from grpo_fn.config import parse_gin
from grpo_fn.config.dump import expand_macros, gin_literal
from grpo_fn.config.nodes import Reference, functions, nested_references
from grpo_fn.config.resolve import gin_name, knobs_of, signature

ROOT = Path(__file__).resolve().parents[2]
PAGES, GIN = ROOT / "docs" / "configuration", ROOT / "gin"
# Packages of which a gin file may name any function that can stand in the place of one that our files name.
CATALOGUE = ("algo", "environments", "rewards", "tasks")
# Such functions that are the program's own: it wraps what a gin file names in them.
INTERNAL = {"sample_and_follow", "weighted_objective"}
Target = Callable[..., Any]
KNOBS = """# Knobs

Every knob that a gin file can bind: its type, its default, and what it means. The default is the value in
`gin/base.gin`, or else in the code. Written by `python tools/tables/gin_pages.py`; a test holds it against the code.

    python -m grpo_fn.run --gin_file run/arithmetic.gin --gin_param 'sections.Sampling.temperature=0.8' --dry_run

prints the plan with the value that every knob has then. A knob without a default is bound by the file that names its
function. A knob with a scope (`eval/`) is bound in that scope alone: elsewhere the program passes the value. What a
function computes is in its docstring; those of the algorithms are in [the catalogue](../algorithms/catalogue.md) with
their papers, the files in [gin files](gin_files.md).
"""
FILES = """# Gin files

Every gin file of `gin/`: what it is for, what it includes, and what it binds. Written by
`python tools/tables/gin_pages.py`; a test holds it against the files.

    python -m grpo_fn.run --gin_file run/arithmetic.gin --gin_file algo/dapo.gin --gin_file scale/bf16.gin --dry_run

A run file comes first, files laid over it after: of two bindings of one knob the later one holds.
"""
FOLDERS = {
    "run": "runs: a task, a model and an algorithm, ready to start",
    "algo": "algorithms, laid over a run; each binds the algorithm and nothing else",
    "task": "problems and their rewards, laid over a run",
    "reward": "rewards, laid over a run",
    "eval": "what is evaluated",
    "scale": "precision, memory and devices",
    "engine": "what samples",
    "": "what every run includes",
}


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

    def __init__(self, paths: Sequence[Path]) -> None:
        self.base = parse_gin([str(GIN / "base.gin")], [])
        self.targets: set[Target] = set()
        self.calls: set[Target] = set()  # what some file names as `@f()`
        self.arguments: dict[Hashable, set[str]] = defaultdict(set)  # keyword arguments that the program passes
        self.scopes: dict[tuple[Hashable, str], set[str]] = defaultdict(set)  # in which some file binds a knob
        for bindings in (parse_gin([str(path)], []) for path in paths):
            self.targets.update(functions(bindings))
            named = nested_references([*bindings.knobs.values(), bindings.macros])
            self.calls |= {one.target for one in named if isinstance(one, Reference) and one.call}
            for (scope, owner), values in bindings.knobs.items():
                supplied = getattr(sys.modules[owner.__module__], "SUPPLIED", {}) | getattr(owner, "SUPPLIED", {})
                for knob, value in values.items():
                    self.scopes[kind(owner), knob].add(scope)
                    if isinstance(value := expand_macros(value, bindings.macros), Reference):
                        self.arguments[kind(value.target)].update(supplied.get(knob, ()))

    def catalogue(self) -> set[Target]:
        """All functions that a file or the catalogue names, and those of their kinds in their modules or CATALOGUE."""
        targets, kinds = {*self.targets}, {kind(target) for target in self.targets}
        for module, data in catalogue_page.TABLE.findall(catalogue_page.PAGE.read_text(encoding="utf-8")):
            functions_of = catalogue_page.functions(import_module(f"grpo_fn.algo.{module}"), tuple(data.split(", ")))
            targets.update(functions_of.values())
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
        lines = argument_lines(owner)
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


def cell(text: str) -> str:
    """Text of a table's cell: what is no code in it is no link either."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(part if i % 2 else part.replace("[", r"\[").replace("<", "&lt;") for i, part in enumerate(parts))


def code(text: str) -> str:
    """Code of a table's cell; nothing for nothing."""
    return "`{}`".format(text.replace("|", r"\|")) if text else ""


def place(target: Target) -> tuple[object, ...]:
    """Where a function stands on the page: the root, its sections, then everything else by module, as in the source."""
    module, (_, line) = target.__module__, inspect.getsourcelines(target)
    return module != "grpo_fn.train", module != "grpo_fn.trainer.sections", module, line


def knobs_page(paths: Sequence[Path]) -> str:
    """docs/configuration/knobs.md: a heading, the docstring's first line and a table for every function with knobs."""
    usage, parts = Usage(paths), [KNOBS]
    for target in sorted(usage.catalogue(), key=place):
        if rows := list(usage.rows(target)):
            first_line = (inspect.getdoc(target) or "").partition("\n")[0]
            parts += [f"## {gin_name(target)}\n\n{cell(first_line)} (`{target.__module__}`)\n"]
            parts += ["| knob | type | default | meaning |\n|---|---|---|---|", *rows, ""]
    return "\n".join(parts).rstrip() + "\n"


def opening(path: Path) -> str:
    """The first sentence of the comment that a file opens with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or not line.lstrip("# "):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=\w\w\w\.) (?=[A-Z@])", " ".join(lines), maxsplit=1)[0]


def own_bindings(path: Path) -> list[str]:
    """What a file binds itself, as it is written there, functions once."""
    text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
    names = re.findall(r"^([\w./]+)(?:\.\w+ *=|:$| *=)", text, re.MULTILINE)
    return list(dict.fromkeys(name for name in names if name != "include"))


def files_page(paths: Sequence[Path]) -> str:
    """docs/configuration/gin_files.md: a table for each folder."""
    parts = [FILES]
    for folder, what in FOLDERS.items():
        parts += [f"## gin/{folder}", "", f"{what[0].upper()}{what[1:]}.", ""]
        parts += ["| file | what it is for | includes | binds |", "|---|---|---|---|"]
        for path in [path for path in paths if path.parent == GIN / folder]:
            includes = re.findall(r'^include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
            names, bound = (", ".join(map(code, found)) for found in (includes, own_bindings(path)))
            parts.append(f"| `{path.relative_to(GIN)}` | {cell(opening(path))} | {names} | {bound} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or say which are not what would be written."""
    paths = sorted(GIN.rglob("*.gin"))
    pages = {PAGES / "knobs.md": knobs_page, PAGES / "gin_files.md": files_page}
    return write_pages("gin_pages", __doc__, lambda: {path: page(paths) for path, page in pages.items()}, argv)


if __name__ == "__main__":
    sys.exit(main())
