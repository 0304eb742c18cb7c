"""Small faults put into the package one at a time, and the tests that notice them.

    python tools/mutants.py --sample 60 --out tests/mutants.md     60 of all, each until the first test that fails
    python tools/mutants.py --all_killers --out D/mutants.md       all; every test that fails, and the cheapest set

A mutant is one change to one line: `<` for `<=`, `+` for `-`, a number and one more, `.detach()` or a mask left out, a
condition negated. It is made in a copy, where the quick tests of its area run that import its module. A test that
fails is run again without the mutant: only one that passes there has noticed it. The table may be stopped at any time.
"""

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("algo", "core", "shell/policy", "shell/sampler", "shell/checkpoint", "rewards")  # of grpo_fn/ and of tests/
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add}
LIMIT = 300  # processor seconds that the tests of a mutant may take
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments)  # messages and types


class Mutant(NamedTuple):  # a file with one change
    path: str
    line: int
    before: str
    after: str
    text: str


def changes(node: ast.AST) -> Iterator[ast.expr]:
    """What may stand for an expression instead."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in OTHER:
            yield ast.Compare(left, [OTHER[type(op)]()], comparators)
        case ast.BinOp(left=left, op=op, right=right):
            yield from [ast.BinOp(left, OTHER[type(op)](), right)] if type(op) in OTHER else []
            yield from [left, right] if isinstance(op, ast.BitAnd) else []
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Attribute(value=value, attr="detach" | "masked_fill")):
            yield value
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, value, _]):
            yield value
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below that is computed with."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, UNTOUCHED):
            yield child
            yield from expressions(child)


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    raw, starts = text.encode(), [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in expressions(ast.parse(text)):
        condition = isinstance(node, ast.If | ast.While)
        place = node.test if condition else node
        for other in [ast.UnaryOp(ast.Not(), place)] if condition else changes(node):
            begin, end = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            before, after = raw[begin:end].decode(), ast.unparse(other)
            changed = (raw[:begin] + f"({after})".encode() + raw[end:]).decode()
            yield Mutant(path, place.lineno, " ".join(before.split()), after, changed)


def concerned(path: str, root: Path) -> list[str]:
    """The test files of the area that import the module, the one of its own name first."""
    area, stem = next(area for area in AREAS if path.startswith(f"grpo_fn/{area}/")), Path(path).stem
    imports = re.compile(rf"^from \S+\.{stem} import|^(from \S+ )?import (\([^)]*|.*)\b{stem}\b", re.MULTILINE)
    files = [file for file in (root / "tests" / area).rglob("test_*.py") if imports.search(file.read_text())]
    files.sort(key=lambda file: (file.stem != f"test_{stem}", file.name))
    return [str(file.relative_to(root)) for file in files]


class Recorder:
    """A pytest plugin that keeps the seconds of every test, and which failed."""

    seconds, failed = Counter[str](), []  # of a process, which has one of these

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] += report.duration
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report) -> None:
        self.failed.extend([report.nodeid] if report.failed else [])


def run_tests(root: Path, args: Sequence[str]) -> tuple[int, dict[str, float], list[str]]:
    """How pytest ended in a fork; the seconds of tests; those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        if (pid := os.fork()) == 0:
            _child(root, args, record)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what its tests had started
        return status, *(json.loads(record.read_text()) if record.exists() else ({}, []))


def _child(root: Path, args: Sequence[str], record: Path) -> None:
    import pytest

    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    code = pytest.main(["-p", "no:cacheprovider", "-m", "not slow", *args], plugins=[Recorder()])
    record.write_text(json.dumps([Recorder.seconds, Recorder.failed]))
    os._exit(int(code))


def put(file: Path, text: str) -> None:
    """Writes a file of the copy, and takes away what was compiled of the one before."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def cheapest(kills: Mapping[str, set[int]], seconds: Mapping[str, float]) -> list[str]:
    """Tests that together notice what all notice, greedily: next the one that notices most new mutants a second."""
    chosen, left = [], set().union(*kills.values())
    while left:
        chosen.append(max(sorted(kills), key=lambda test: len(kills[test] & left) / (seconds.get(test, 0.0) + 0.01)))
        left -= kills[chosen[-1]]
    return chosen


def table(command: str, rows: Sequence[tuple[Mutant, str]], total: int, needed: Sequence[str]) -> str:
    """The page: the command, a line for every mutant, survivors first, and the cheapest tests."""
    survivors = sum(said.startswith("survived") for _, said in rows)
    lines = ["# Mutants", "", f"    {command}", "", f"{len(rows)} of {total} mutants; {survivors} survived.", ""]
    lines += ["| where | it was | it is | noticed by |", "|---|---|---|---|"]
    for mutant, said in sorted(rows, key=lambda row: (not row[1].startswith("survived"), row[0])):
        cells = [f"{mutant.path}:{mutant.line}", mutant.before[:90], mutant.after[:90]]
        lines.append("| " + " | ".join(f"`{cell.replace('|', '¦')}`" for cell in cells) + f" | {said} |")
    lines += ["", "The cheapest tests that notice these:", "", *(f"- `{test}`" for test in needed)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--sample", type=int, help="how many mutants; without it all")
    parser.add_argument("--all_killers", action="store_true", help="do not stop at the first test that fails")
    args = parser.parse_args()
    sys.dont_write_bytecode = False
    import hypothesis, torch, transformers  # noqa: E401, F401, I001 once for all forks

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"), symlinks=True)
        files = sorted(file for area in AREAS for file in (root / "grpo_fn" / area).rglob("*.py"))
        texts = {str(file.relative_to(root)): file.read_text() for file in files}
        every = [x for path, text in texts.items() if concerned(path, root) for x in mutants(path, text)]
        chosen = random.Random(0).sample(every, min(args.sample or len(every), len(every)))
        rows, sound, kills, seconds = [], {}, {}, {}
        for i, mutant in enumerate(chosen):
            tests = [*([] if args.all_killers else ["-x"]), *concerned(mutant.path, root)]
            put(root / mutant.path, mutant.text)
            status, took, failed = run_tests(root, tests)
            put(root / mutant.path, texts[mutant.path])
            sound |= {test: run_tests(root, [test])[0] == 0 for test in failed if test not in sound}
            killers = [test for test in failed if sound[test]]
            kills |= {test: kills.get(test, set()) | {i} for test in killers}
            seconds |= took
            ended = "survived" if took and status in (0, 1) else f"ended with {status} after"
            names = ", ".join(sorted({f"`{test.partition('[')[0].removeprefix('tests/')}`" for test in killers}))
            rows.append((mutant, names or f"{ended} {len(took)} tests"))
            args.out.write_text(table(" ".join(["python", *sys.argv]), rows, len(every), cheapest(kills, seconds)))
            print(f"{i + 1}/{len(chosen)} {mutant[:4]}: {rows[-1][1]}", flush=True)


if __name__ == "__main__":
    main()
