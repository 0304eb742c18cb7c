"""How large a file, a function and a folder of the package and its tools may be: one idea fits on a few screens."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE, FUNCTION, FOLDER = 400, 60, 16  # lines, lines with the docstring, entries to choose among
UNREAD = {"__pycache__", "__init__.py", "py.typed"}
# Folders with more entries, and why.
FULLER = {
    "gin/algo": "one file for each published algorithm, which the command line names",
    "grpo_fn": "a package for each role and one for each command",
    "grpo_fn/shell": "a package for each part with state, and what they share",
    "grpo_fn/algo": "a module for each kind of function",
    "grpo_fn/tasks": "a module for each task and each way to read problems",
    "tools/tables": "a tool for each table of the documentation",
    "gin/scale": "one file for each way to spread, save, compute or teach, which the command line names",
}
# Functions that are longer, and why.
LONGER = {
    "grpo_fn/train.py:train": "the root: the sections and what a run is made of, documented and handed on by name"
}


def sources() -> list[Path]:
    """Every Python file of the package and of tools."""
    return sorted(path for folder in ("grpo_fn", "tools") for path in (ROOT / folder).rglob("*.py"))


def functions(source: str) -> list[tuple[str, int]]:
    """(dotted name, lines) of every function of a file, methods and inner functions too."""

    def below(node: ast.AST, prefix: str) -> list[tuple[str, int]]:
        found = []
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}." if named else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((name[:-1], child.end_lineno - child.lineno + 1))
            found += below(child, name)
        return found

    return below(ast.parse(source), "")


def test_a_file_is_short() -> None:
    files = sources()
    assert len(files) > 100
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files}
    long = [f"{path}: got {n} lines, wanted at most {FILE}" for path, n in lines.items() if n > FILE]
    assert not long, "\n".join(long)


def test_a_function_is_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{name}": lines for path in sources() for name, lines in functions(path.read_text())
    }
    long = [
        f"{name}: got {n} lines, wanted at most {FUNCTION}"
        for name, n in lengths.items()
        if n > FUNCTION and name not in LONGER
    ]
    assert not long, "\n".join(long)
    assert all(lengths.get(name, 0) > FUNCTION for name in LONGER), "an exception that is none any more"


def test_a_folder_has_few_entries() -> None:
    below = [path for top in ("grpo_fn", "tools", "gin", "docs") for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    folders = [path for path in below if path.is_dir() and path.name not in UNREAD]
    entries = {path: [e for e in path.iterdir() if e.name not in UNREAD] for path in folders}
    over = {str(path.relative_to(ROOT)): len(e) for path, e in entries.items() if len(e) > FOLDER}
    wide = [f"{path}: got {n} entries, wanted at most {FOLDER}" for path, n in over.items() if path not in FULLER]
    assert not wide, "\n".join(wide)
    assert set(FULLER) <= set(over), "an exception that is none any more"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Test folders are no packages: of two modules of one name pytest imports one and refuses the other.

    Those of the real vLLM are run by themselves.
    """
    places: dict[str, list[str]] = {}
    for path in sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != ROOT / "tests" / "vllm"):
        places.setdefault(path.name, []).append(str(path.parent.relative_to(ROOT)))
    twice = [f"{name}: got it in {' and '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert places
    assert not twice, "\n".join(twice)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n    pass\n", [("f", 2)]),
        ("class C:\n    @property\n    def f(self):\n        return 1\n", [("C.f", 2)]),
        ("def f():\n    async def g():\n        pass\n    return g\n", [("f", 4), ("f.g", 2)]),
        ("if True:\n    def f(\n        x,\n    ): ...\n", [("f", 3)]),
    ],
)
def test_lines_are_counted_from_the_name_to_the_end(source: str, found: list[tuple[str, int]]) -> None:
    assert functions(source) == found
