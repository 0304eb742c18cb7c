"""Small faults put into the package one at a time, and the tests that notice them: a table of mutants and killers.

    nice python tools/mutants.py --sample 120 --out tests/mutants.md

A mutant is one change to one line of a copy: `<` for `<=`, `+` for `-`, a number and one more, `.detach()` or a mask
left out, a condition negated. A run with coverage (`pip install pytest-cov`) shows which quick tests execute which
lines, in subprocesses too, but not in the ranks of tests/helpers/crew.py, which end without a record. A mutant meets
those of its line until one fails, one case of every test function first, quick ones first; tests that fail without it
are left out. Every run, with the same examples of Hypothesis, is a fork that has imported torch and not the package.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("algo", "core", "shell/policy", "shell/sampler", "shell/checkpoint", "rewards")  # of grpo_fn/ and of tests/
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add}
SECONDS = 20.0  # of processor time that the tests of a mutant may take
HEAD = "| line | before | after | noticed by |\n|---|---|---|---|\n"
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments)  # messages and types
COVERAGE = "[run]\nparallel=true\ndata_file={0}/.coverage\ninclude={0}/grpo_fn/*\ncontext=${{PYTEST_CURRENT_TEST-}}\n"
# A file with one change; a test that executes one of the lines executes it.
FIELDS = {"path": str, "line": int, "before": str, "after": str, "text": str, "lines": range}
Mutant = NamedTuple("Mutant", FIELDS.items())


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
        case ast.If(test=test) | ast.While(test=test):
            yield ast.UnaryOp(ast.Not(), test)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)


def expressions(node: ast.AST, lines: range, inside: bool = False) -> Iterator[tuple[ast.AST, range]]:
    """Every node below that is computed with, and the lines of its statement; outside of functions `lines`."""
    inside = inside or isinstance(node, ast.FunctionDef)
    for child in (child for child in ast.iter_child_nodes(node) if not isinstance(child, UNTOUCHED)):
        place = lines
        if inside and isinstance(child, ast.stmt):
            place = range(child.lineno, child.body[0].lineno if hasattr(child, "body") else child.end_lineno + 1)
        yield child, place
        yield from expressions(child, place, inside)


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file."""
    raw, starts = text.encode(), [0]
    starts += accumulate(len(line) for line in raw.splitlines(keepends=True))
    for node, lines in expressions(ast.parse(text), range(1, len(starts))):
        place = node.test if isinstance(node, ast.If | ast.While) else node
        for other in changes(node):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            before, after = " ".join(raw[begin:end].decode().split()), ast.unparse(other)
            changed = (raw[:begin] + f"({after})".encode() + raw[end:]).decode()
            yield Mutant(path, place.lineno, before, after, changed, lines)


class Chooser:
    """A pytest plugin: runs the given tests, or all, in their order for so long; keeps seconds and failures."""

    def __init__(self, tests: Sequence[str], limit: float) -> None:
        self.order = {test: i for i, test in enumerate(tests)}
        self.limit, self.seconds, self.failed = limit, Counter[str](), []

    def pytest_collection_modifyitems(self, session, items) -> None:
        self.session = session
        if self.order:
            items[:] = sorted((x for x in items if x.nodeid in self.order), key=lambda x: self.order[x.nodeid])

    def pytest_collectreport(self, report) -> None:
        self.failed.extend([report.nodeid] if report.failed else [])

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] += report.duration
        self.pytest_collectreport(report)
        self.session.shouldstop = self.session.shouldstop or time.process_time() > self.limit


def run_tests(root: Path, args: Sequence[str], tests: Sequence[str], seconds: float) -> tuple[dict, list]:
    """The seconds of tests in a fork, and those that failed. Without `tests` all run."""
    (record := root / "record.json").unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            os.setpgid(0, 0)
            _ = [os.dup2(os.open(os.devnull, os.O_RDWR), stream) for stream in (0, 1, 2)]
            os.chdir(root)
            sys.path.insert(0, str(root))
            os.environ["PYTHONPATH"] = str(root)
            resource.setrlimit(resource.RLIMIT_CPU, (int(2 * seconds + 60),) * 2)
            drawn = {"max_examples": 25 if tests else 5, "phases": (Phase.explicit, Phase.generate)}
            settings.register_profile("mutants", deadline=None, derandomize=True, database=None, **drawn)
            more = ["-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=mutants", "-o", "timeout=60"]
            pytest.main([*more, *args], plugins=[chooser := Chooser(tests, time.process_time() + seconds)])
            record.write_text(json.dumps([chooser.seconds, chooser.failed]))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests had started
    return json.loads(record.read_text()) if record.exists() else ({}, ["the end of pytest itself"])


def executed(root: Path) -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
    """For each file and line the tests that execute it and pass; the seconds of each test."""
    from coverage import CoverageData

    (root / "coverage.ini").write_text(COVERAGE.format(root))
    os.environ |= {"COVERAGE_PROCESS_START": str(root / "coverage.ini"), "PYTEST_CURRENT_TEST": ""}  # for subprocesses
    folders = [f"tests/{place}" for place in (*AREAS, "test_invariants.py") if (root / "tests" / place).exists()]
    options = ["--cov", "--cov-config=coverage.ini", "--cov-context=test", "--cov-report="]
    seconds, failed = run_tests(root, [*options, *folders], [], 36_000)
    del os.environ["COVERAGE_PROCESS_START"]
    data, passed, found = CoverageData(str(root / ".coverage")), seconds.keys() - set(failed), {}
    data.read()
    for file in data.measured_files():  # a context is "test|run", or of a subprocess "test (call)"
        cut = {n: {re.split(r"\|\w*$| \(\w+\)$", x)[0] for x in of} for n, of in data.contexts_by_lineno(file).items()}
        found[str(Path(file).relative_to(root))] = {n: tests & passed for n, tests in cut.items()}
    return found, seconds


def in_order(tests: set[str], seconds: Mapping[str, float]) -> list[str]:
    """The quickest case of every test function, then the next ones, each time quick functions first."""
    quick, cases = sorted(tests, key=lambda test: (seconds[test], test)), Counter[str]()
    rank = {test: cases.update([name := test.partition("[")[0]]) or cases[name] for test in quick}
    return sorted(quick, key=rank.__getitem__)  # which keeps the order of seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the table, which is whole after every mutant")
    parser.add_argument("--sample", type=int, help="how many mutants, drawn with seed 0; without it all")
    args = parser.parse_args()
    import coverage, torch, transformers  # noqa: E401, F401, I001 once for all forks

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        root = (Path(folder) / "copy").resolve()
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"), symlinks=True)
        files = [file for area in AREAS for file in sorted((root / "grpo_fn" / area).rglob("*.py"))]
        texts = {str(file.relative_to(root)): file.read_text() for file in files}
        every = [mutant for path, text in texts.items() for mutant in mutants(path, text)]
        chosen = random.Random(0).sample(every, min(args.sample or len(every), len(every)))
        (lines, seconds), rows = executed(root), []
        for i, mutant in enumerate(chosen):
            tests = in_order(set().union(*(lines.get(mutant.path, {}).get(n, ()) for n in mutant.lines)), seconds)
            (root / mutant.path).write_text(mutant.text)
            os.utime(root / mutant.path, (i, i))  # so that no other version of it is taken for the compiled one
            given = ["-x", *sorted({test.partition("::")[0] for test in tests})]
            took, failed = run_tests(root, given, tests, SECONDS) if tests else ({}, [])
            (root / mutant.path).write_text(texts[mutant.path])
            said = f"survived {len(took)} of {len(tests)} tests" if tests else "unexecuted by the quick tests"
            rows.append((mutant, f"`{failed[0].partition('[')[0].removeprefix('tests/')}`" if failed else said))
            kinds = Counter(said.split()[0] if said[0] != "`" else "noticed" for _, said in rows).most_common()
            page = f"# Mutants\n\n    {' '.join(['python', *sys.argv])}\n\nThe first {len(rows)} of {len(chosen)} "
            page += f"mutants, drawn from {len(every)} at commit {git.stdout.strip()}, {time.strftime('%Y-%m-%d')}: "
            page += f"{', '.join(f'{n} {kind}' for kind, n in kinds)}.\n\n{HEAD}"
            for one, said in sorted(rows, key=lambda row: (row[1][0] == "`", row[0])):  # survivors first
                before, after = (text[:90].replace("|", "¦") for text in (one.before, one.after))
                page += f"| `{one.path}:{one.line}` | `{before}` | `{after}` | {said} |\n"
            args.out.write_text(page)
            print(f"{i + 1}/{len(chosen)} {mutant[:4]}: {rows[-1][1]}", flush=True)


if __name__ == "__main__":
    main()
