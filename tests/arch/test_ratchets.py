"""Numbers of the package that may only go down: how much there is to read, and how scattered it is.

    python tests/arch/test_ratchets.py              write the lower numbers to ratchets.json; refuse to raise one
    python tests/arch/test_ratchets.py NAME ...     raise these, too

No length is an error by itself. A function of more than 60 lines of code, or a file of more than 600, is a question,
and the command prints it: lines of code are neither blank nor a comment nor a docstring.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from test_arrows import imported

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("ratchets.json")
FUNCTION, FILE = 60, 600  # lines of code above which there is a question
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A Python file of the package."""

    path: Path
    text: str
    tree: ast.Module


class Ratchet(NamedTuple):
    """A number that may only go down, and what lowers it."""

    measure: Callable[[], int]
    advice: str


@cache
def sources() -> list[Source]:
    """Every Python file of the package."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "grpo_fn").rglob("*.py"))}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def code_lines(text: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that are neither blank nor a comment nor part of a docstring."""
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None
    }
    lines = text.splitlines()
    return {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE and token.start not in docstrings
        for number in range(token.start[0], token.end[0] + 1)
        if lines[number - 1].strip()
    }


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(dotted name, node) of every function of a file, methods and inner functions too."""
    for child in ast.iter_child_nodes(tree):
        scope = isinstance(child, Function | ast.ClassDef)
        if isinstance(child, Function):
            yield prefix + child.name, child
        yield from functions(child, f"{prefix}{child.name}." if scope else prefix)


@cache
def long_functions() -> list[str]:
    """What has more than FUNCTION lines of code."""
    questions = []
    for path, text, tree in sources():
        code = code_lines(text, tree)
        for name, node in functions(tree):
            length = len(code & {*range(node.lineno, node.end_lineno + 1)})
            questions += [f"{path.relative_to(ROOT)}:{name}: {length} lines of code"] if length > FUNCTION else []
    return questions


@cache
def long_files() -> list[str]:
    """What has more than FILE lines of code."""
    lengths = {path: len(code_lines(text, tree)) for path, text, tree in sources()}
    return [f"{path.relative_to(ROOT)}: {length} lines of code" for path, length in lengths.items() if length > FILE]


def mentions(trees: Iterable[ast.AST]) -> Counter[str]:
    """How often each identifier is written, definitions included, imports and strings not."""
    names: Counter[str] = Counter()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] += 1
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names[name] += 1
    return names


def functions_with_mentions(count: int) -> int:
    """How many functions and methods have a name that is written so often."""
    trees = [source.tree for source in sources()]
    names = mentions(trees)
    return sum(names[node.name] == count for tree in trees for _, node in functions(tree))


def importers(texts: dict[str, str]) -> dict[str, set[str]]:
    """For each module by its dotted name, `p.__init__` for a package, the modules that import it or a name of it."""
    files = defaultdict(set)
    for name, text in texts.items():
        for _, target in imported(text, name.rpartition(".")[0]):
            parts = target.split(".")
            prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            candidates = [module for prefix in prefixes for module in (prefix, f"{prefix}.__init__")]
            module = next((module for module in candidates if module in texts), name)
            files[module] |= {name} - {module}
    return files


def files_with_one_importer() -> int:
    """How many files only one other file of the package imports."""
    texts = {".".join(path.relative_to(ROOT).with_suffix("").parts): text for path, text, _ in sources()}
    return sum(len(files) == 1 for files in importers(texts).values())


def files_of_a_step() -> int:
    """How many files a step of the embedded default enters, as tools/step_files.py prints it."""
    argv = [sys.executable, str(ROOT / "tools" / "step_files.py")]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    totals = re.search(r"^files (\d+) functions \d+ lines of files \d+$", process.stdout, re.MULTILINE)
    assert totals, f"tools/step_files.py ended with {process.returncode}: {process.stderr[-2000:]}"
    return int(totals[1])


def knobs() -> int:
    """How many knobs the page has that tools/tables writes."""
    page = (ROOT / "docs" / "configuration" / "knobs.md").read_text(encoding="utf-8")
    return len(re.findall(r"^\| `", page, re.MULTILINE))


def lines_of_tools() -> int:
    """How many lines all files of tools/ have."""
    paths = [path for path in (ROOT / "tools").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def total(count: Callable[[Source], int]) -> Callable[[], int]:
    """The sum of a number over the files of the package."""
    return lambda: sum(map(count, sources()))


RATCHETS = {
    "lines of the package": Ratchet(total(lambda source: len(source.text.splitlines())), "remove what nothing needs"),
    "code lines of the package": Ratchet(
        total(lambda source: len(code_lines(source.text, source.tree))), "remove what nothing needs"
    ),
    "files of the package": Ratchet(total(lambda _: 1), "put the code into the file of its callers"),
    "functions": Ratchet(
        total(lambda source: len([*functions(source.tree)])), "write the small ones where they are called"
    ),
    "functions that nothing else names": Ratchet(
        lambda: functions_with_mentions(1), "remove those that neither gin nor a protocol nor a test calls"
    ),
    "functions that one other place names": Ratchet(
        lambda: functions_with_mentions(2), "write the function where it is called, unless it holds one idea"
    ),
    "functions above 60 code lines": Ratchet(
        lambda: len(long_functions()),
        "python tests/arch/test_ratchets.py prints them; split one where it has two ideas",
    ),
    "files above 600 code lines": Ratchet(
        lambda: len(long_files()), "python tests/arch/test_ratchets.py prints them; split one where it has two ideas"
    ),
    "files with one importer": Ratchet(files_with_one_importer, "put the code into the file that imports it"),
    "files that a step enters": Ratchet(files_of_a_step, "python tools/step_files.py --functions prints them"),
    "knobs": Ratchet(knobs, "make constants of those that no configuration changes"),
    "lines of tools": Ratchet(lines_of_tools, "remove what nothing needs"),
}


def complaint(name: str, limit: int, value: int) -> str:
    """What is wrong with a number that rose, and what to do about it, in one line."""
    return (
        f"{name}: recorded {limit:,}, measured {value:,}: {RATCHETS[name].advice}; "
        f"where it is worth it, raise it: python tests/arch/test_ratchets.py '{name}'"
    )


def write_record(values: dict[str, int], names: Sequence[str], path: Path = RECORD) -> int:
    """Record lower numbers, and higher ones of these names. If another rose: write nothing, exit code 1."""
    limits = values | json.loads(path.read_text())
    higher = [name for name, value in values.items() if value > limits[name] and name not in names]
    for name, value in values.items():
        print(f"{limits[name]:8,} -> {value:8,}  {name}")
    for name in higher:
        print(complaint(name, limits[name], values[name]), file=sys.stderr)
    if not higher:
        path.write_text(json.dumps(values, indent=2) + "\n")
    return int(bool(higher))


@pytest.mark.parametrize("name", RATCHETS)
def test_a_number_only_goes_down(name: str) -> None:
    limit, value = json.loads(RECORD.read_text())[name], RATCHETS[name].measure()
    if value > limit:
        pytest.fail(complaint(name, limit, value), pytrace=False)


if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - RATCHETS.keys():
        sys.exit(f"error: got {', '.join(sorted(unknown))}, expected names of {', '.join(RATCHETS)}")
    status = write_record({name: ratchet.measure() for name, ratchet in RATCHETS.items()}, sys.argv[1:])
    print("", *long_functions(), *long_files(), sep="\n")
    sys.exit(status)
