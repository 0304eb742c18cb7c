"""Writes docs/configuration/{knobs,gin_files}.md from the gin files and from the code that they name.

python tools/tables/gin_pages.py            rewrite both pages
python tools/tables/gin_pages.py --check    exit 1 if a page is not what would be written

A knob's type and meaning are those of the code: the annotation, and the comment beside it or its line under "Args:".
"""

import argparse
import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.config import parse_gin
from grpo_fn.config.nodes import Bindings, Macro, Reference, functions

ROOT = Path(__file__).resolve().parents[2]
PAGES, GIN = ROOT / "docs" / "configuration", ROOT / "gin"
# What a file uses without a value of its own: a user gives it.
GIVEN = {"MODEL": "'MODEL'", "DATA": "'DATA'", "DEMONSTRATIONS": "'DEMONSTRATIONS'"}
KNOBS = """# Knobs

Every knob that a gin file can bind: its type, its value in `gin/base.gin` where that binds it, and what it means.
Written by `python tools/tables/gin_pages.py`; a test holds it against the code.

    python -m grpo_fn.run --gin_file run/arithmetic.gin --gin_param 'sections.Sampling.temperature=0.8' --dry_run

prints the plan with the value that every knob has then. A knob without a value in `base.gin` is bound by the file that
names its function, or given by the program (a sampler's temperature). What a function computes is in its docstring;
those of the algorithms are in [the catalogue](../algorithms/catalogue.md) with their papers, the files in
[gin files](gin_files.md).
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


class Knob(NamedTuple):
    """A knob as the code has it."""

    name: str
    type: str
    meaning: str


def bindings_of(path: Path) -> Bindings:
    """What a file and its includes bind."""
    text = path.read_text(encoding="utf-8")
    return parse_gin([str(path)], [f"{name}={value}" for name, value in GIVEN.items() if f"%{name}" in text])


def gin_name(target: Callable[..., Any]) -> str:
    """`module.function`, as gin files write it."""
    return f"{target.__module__.rpartition('.')[2]}.{target.__qualname__}"


def shown(value: Any) -> str:
    """A bound value as gin writes it."""
    match value:
        case Reference():
            scope = "".join(f"{name}/" for name in value.scope)
            return f"@{scope}{gin_name(value.target)}{'()' if value.call else ''}"
        case Macro():
            return f"%{value.name}"
        case list() | tuple():
            inside = ", ".join(map(shown, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{shown(k)}: {shown(v)}' for k, v in value.items())}}}"
    return repr(value)


def comments(source: str) -> Mapping[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def described(target: Callable[..., Any]) -> Mapping[str, str]:
    """The lines under "Args:" of a docstring, by name."""
    _, found, rest = (inspect.getdoc(target) or "").partition("Args:\n")
    block = re.split(r"\n(?=\S)", rest, maxsplit=1)[0] if found else ""
    entries = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {6,}.*)*)", block, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def knobs(target: Callable[..., Any]) -> list[Knob]:
    """The keyword-only parameters of a function, or the fields of a section, in the order of the source."""
    source = textwrap.dedent(inspect.getsource(target))
    (node,) = ast.parse(source).body
    said, args, lines = comments(source), described(target), source.splitlines()
    found: list[tuple[str, ast.expr | None, int]] = []
    if isinstance(node, ast.ClassDef):
        init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
        if init is None:
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
            found = [(one.target.id, one.annotation, one.lineno) for one in fields if not one.target.id.isupper()]
        node = init
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found = [(arg.arg, arg.annotation, arg.lineno) for arg in node.args.kwonlyargs]
    made = []
    for name, annotation, line in found:
        alone = line - 1 in said and lines[line - 2].lstrip().startswith("#")  # a comment line above
        meaning = args.get(name) or said.get(line) or (said[line - 1] if alone else "")
        made.append(Knob(name, "" if annotation is None else ast.unparse(annotation), meaning))
    return made


def cell(text: str) -> str:
    """Text of a table's cell: what is no code in it is no link either."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(part if i % 2 else part.replace("[", r"\[").replace("<", "&lt;") for i, part in enumerate(parts))


def code(text: str) -> str:
    """Code of a table's cell; nothing for nothing."""
    return "`{}`".format(text.replace("|", r"\|")) if text else ""


def first_line(target: Callable[..., Any]) -> str:
    """Of a docstring."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def knob_sections(base: Bindings, targets: Sequence[Callable[..., Any]]) -> Iterator[str]:
    """A heading, the docstring's first line and a table of knobs for every function that has some."""
    for target in targets:
        if not (found := knobs(target)):
            continue
        bound = base.knobs.get(("", target), {})
        yield f"## {gin_name(target)}\n\n{cell(first_line(target))} (`{target.__module__}`)\n"
        yield "| knob | type | in base.gin | |\n|---|---|---|---|"
        for knob in found:
            value = code(shown(bound[knob.name])) if knob.name in bound else ""
            yield f"| `{gin_name(target)}.{knob.name}` | {code(knob.type)} | {value} | {cell(knob.meaning)} |"
        yield ""


def knobs_page(paths: Sequence[Path]) -> str:
    """docs/configuration/knobs.md: the root, its sections, then everything else by module."""
    found = dict.fromkeys(target for path in paths for target in functions(bindings_of(path)))

    def order(target: Callable[..., Any]) -> tuple[bool, bool, str, int]:
        module = target.__module__
        return (
            module != "grpo_fn.train",
            module != "grpo_fn.trainer.sections",
            module,
            inspect.getsourcelines(target)[1],
        )

    return "\n".join([KNOBS, *knob_sections(bindings_of(GIN / "base.gin"), sorted(found, key=order))]).rstrip() + "\n"


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


def pages() -> dict[Path, str]:
    """Both pages as they would be written."""
    paths = sorted(GIN.rglob("*.gin"))
    return {PAGES / "knobs.md": knobs_page(paths), PAGES / "gin_files.md": files_page(paths)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or say which are not what would be written."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page would change")
    check = parser.parse_args(argv).check
    changed = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed if check else ():
        print(
            f"docs/configuration/{path.name}: got another page than the code gives, run "
            "python tools/tables/gin_pages.py"
        )
    for path in () if check else changed:
        path.write_text(pages()[path], encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
