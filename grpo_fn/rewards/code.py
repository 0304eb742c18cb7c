"""Does the program work? It is taken from the completion, run against the problem's tests by `run`, and judged.

`run` is the shell's sandbox with its knobs (`sandbox.run_program`); nothing is executed here. A problem brings
`meta["tests"]`, asserts, and may bring `meta["setup"]`, code between the program and them; its answer is a reference
program, or empty.

Tests run apart from the program and see of it only the names that they need. A name in them means the program's when
the reference defines it, or when it is nothing else: not bound by setup or tests, not a built-in, not a module of
the standard library (as the reference imports it, or `name.` where it does not). So a program that redefines `sorted`
or `math` redefines them for itself.

    problem      the problem, with `tests` and perhaps `setup` in `meta`, and a reference program or "" as its answer
    completion   the completion that holds the program
    run          runs a program against its tests: `sandbox.run_program` with its knobs; what it raises is raised
    returns      the reward, less than 1 with the sandbox's reason; None for a problem that cannot be scored
"""

import ast
import builtins
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from grpo_fn.core.problem import Completion, Problem, Program, Ran, ReasonedScore

Runner = Callable[[Program], Ran]

# Possessive, so that no line takes more than linear time.
_FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`]*+")
_PYTHON = {"python", "python3", "py"}
_ITEM = re.compile(r"[ \t]*+(?:[-*+]|[0-9]{1,9}[.)])[ \t]{1,4}")  # of a list
_DEFINES = r"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{0})\b|^(?:{0})[ \t]*(?::[^=\n]*)?=(?!=)"


def all_tests_pass(problem: Problem, completion: Completion, *, run: Runner) -> float | None:
    """1 iff the program passes every test, proven by the sandbox, else 0; None for tests that no program can pass.

    Those are: none at all, tests that do not parse, and tests whose own objects cannot be handed to a program. The
    program is `program_of` the completion and the names that the tests ask for; an empty one is wrong.
    """
    ran = run_against_tests(problem, completion, run)
    if ran is None or (None in ran.verdicts and False not in ran.verdicts):
        return None
    return 1.0 if ran.proven and all(ran.verdicts) else ReasonedScore(0.0, ran.reason)


def share_of_tests(problem: Problem, completion: Completion, *, run: Runner) -> float | None:
    """The share of the tests that the program passes, in [0, 1]: k of n asserts are k / n; None as in `all_tests_pass`.

    What ran before a time-out or a crash counts. A program that answers every test and is not proven to the end
    gets 0: it was gone by then, or left processes behind.
    """
    ran = run_against_tests(problem, completion, run)
    if ran is None or None in ran.verdicts:
        return None
    if all(ran.verdicts):
        return 1.0 if ran.proven else ReasonedScore(0.0, ran.reason)
    return ReasonedScore(sum(map(bool, ran.verdicts)) / len(ran.verdicts), ran.reason)


def program_of(text: str, names: Sequence[str]) -> str:
    """The program in a completion: of its fenced blocks, the last that defines one of the names.

    Without one, it is the last block marked python, or else the last block, or else the whole text. What is marked as
    another language is not looked at for names. A fence is a line of at least three backquotes or tildes, closed by a
    line of as many of the same, or by the end of the text. One that is indented by more than three blanks, from the
    margin or the item of a list that it stands in, or from the fence that it would close, is text. A block loses the
    indentation of its fence.
    """
    blocks = list(_blocks(text.splitlines(keepends=True)))
    marked = [code for language, code in blocks if language.lower() in _PYTHON]
    defines = re.compile(_DEFINES.format("|".join(map(re.escape, names)) or r"(?!)"), re.MULTILINE)
    defining = [code for mark, code in blocks if mark.lower() in {*_PYTHON, ""} and defines.search(code)]
    return (defining or marked or [code for _, code in blocks] or [text])[-1]


def _blocks(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(what the fence is marked with, code) of each block."""
    indent, closing, language, code = "", "", "", []
    margin = 0  # columns before the text of the list's item
    for line in lines:
        fence = _FENCE.fullmatch(line)
        depth = _depth(fence[1]) if fence else 0
        if closing and fence and fence[2].startswith(closing) and not fence[3] and depth <= _depth(indent) + 3:
            yield language, "".join(code)
            closing = ""
        elif closing:
            code.append(line.removeprefix(indent))
        elif fence and depth <= margin + 3:
            indent, closing, language, code = fence[1], fence[2], fence[3], []
        elif item := _ITEM.match(line):
            margin = _depth(item[0])
        elif line.strip() and not line[0].isspace():
            margin = 0
    if closing:
        yield language, "".join(code)


def _depth(blanks: str) -> int:
    return len(blanks.expandtabs(4))


class _Tests(NamedTuple):
    """What is the same for every completion of a problem."""

    imports: str  # of the setup, which the program finds done
    setup: str
    names: tuple[str, ...]
    classes: tuple[str, ...]  # of the names: what the reference defines as one, else by their capital letter


def run_against_tests(problem: Problem, completion: Completion, run: Runner) -> Ran | None:
    """The run of a completion's program against the tests; None where there are none, or they do not parse."""
    tests = tuple(problem.meta.get("tests", ()))
    judged = _judged(tests, problem.meta.get("setup", ""), problem.answer)
    if not tests or judged is None:
        return None
    program = program_of(completion.text, judged.names)
    if not program.strip():
        return Ran((False,) * len(tests), False, "no program", "", 0.0)
    return run(Program((judged.imports, program), judged.setup, tests, judged.names, judged.classes))


@lru_cache(maxsize=1024)
def _judged(tests: Sequence[str], setup: str, reference: str) -> _Tests | None:
    """Which names are the program's, and what the tests have to import themselves; None when they do not parse."""
    trees = [_parsed(code) for code in (setup, *tests)]
    nodes = [node for tree in trees if tree for node in ast.walk(tree)]
    if None in trees or not all(map(_standard, nodes)):
        return None
    expected = {node.id: None for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    modules = _modules(nodes)
    theirs = _parsed(reference) or ast.Module([], [])
    imported = _imports(theirs)
    defined = _bound(_top(theirs)) - imported.keys()
    names, setup_imports = [], []
    for name in expected.keys() - _bound(nodes):
        if name in defined:
            names.append(name)
        elif name in imported:
            setup_imports.append(imported[name])
        elif name in modules:
            setup_imports.append(f"import {name}")
        elif not hasattr(builtins, name):
            names.append(name)
    done = "\n".join(_imports(trees[0] or theirs).values())
    classes = {node.name for node in theirs.body if isinstance(node, ast.ClassDef)}
    classes |= {name for name in names if name[0].isupper() and name not in defined}
    classes &= {*names}
    return _Tests(done, "\n".join([*sorted(setup_imports), setup]), tuple(sorted(names)), tuple(sorted(classes)))


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's texts
            return ast.parse(code)
    except (SyntaxError, ValueError):
        return None


def _standard(node: ast.AST) -> bool:
    """Is it anything but the import of a module from elsewhere? The sandbox has the standard library alone."""
    match node:
        case ast.Import():
            modules = [alias.name for alias in node.names]
        case ast.ImportFrom():
            modules = ["." * node.level + (node.module or "")]
        case _:
            return True
    return all(module.split(".")[0] in sys.stdlib_module_names for module in modules)


def _modules(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of modules of the standard library of which nothing is used except what is in them."""
    names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    whole = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    taken = Counter(node.id for node in whole if isinstance(node, ast.Name))
    return {name for name, times in taken.items() if name in sys.stdlib_module_names and times == names[name]}


def _imports(tree: ast.Module) -> dict[str, str]:
    """What the module imports from the standard library at its top, by the name that it gives it: a statement each."""
    found = {}
    for node in filter(_standard, tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = f"{origin}import {ast.unparse(alias)}"
    return found


def _top(tree: ast.Module) -> Iterable[ast.AST]:
    """What happens when the module is run: not what is within its functions and classes."""
    for node in tree.body:
        yield from [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ast.walk(node)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that these nodes give a meaning to."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return names
