"""Code rewards: which text is the program, which names of the tests are its, and what a verdict is worth.

Nothing is run here: the runner returns given verdicts. The real one is in tests/sandbox/test_sandbox.py.
"""

import ast
import builtins
import json
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given
from published import published

from grpo_fn.core.problem import Completion, Problem, Program, Ran
from grpo_fn.rewards import code

LINE = st.text(st.characters(exclude_characters="`~", exclude_categories=["Zl", "Zp", "Cc", "Cs"]), max_size=12)
BLOCK = st.lists(LINE.map("{}\n".format), max_size=5).map("".join)
CODE = st.builds(str.__add__, BLOCK, LINE)  # its last line may not end
MARK = st.sampled_from(["python", "Python", "py", "python3"])
OTHER = st.sampled_from(["", "c++", "text", "output", "bash"])
FENCE = st.sampled_from(["```", "````", "~~~"])


def fenced(language, body, fence="```", indent=""):
    lines = "".join(indent + line for line in body.splitlines(keepends=True))
    return f"{indent}{fence}{language}\n{lines}{indent}{fence}\n"


@given(CODE)
def test_without_a_fence_the_text_itself_is_the_program(text):
    assert code.program_of(text, ()) == text


@given(CODE, MARK, BLOCK, FENCE, st.lists(st.tuples(OTHER | MARK, BLOCK)), st.lists(st.tuples(OTHER, BLOCK)))
def test_the_last_block_marked_python_is_the_program(talk, mark, body, fence, before, after):
    blocks = [fenced(*block) for block in before], [fenced(*block) for block in after]
    text = f"\n{talk}\n".join([*blocks[0], fenced(mark, body, fence), *blocks[1]])
    assert code.program_of(text, ()) == body


@given(BLOCK, st.lists(st.tuples(OTHER, BLOCK)), OTHER)
def test_without_such_a_mark_the_last_block_is(body, before, mark):
    assert code.program_of("talk\n".join([*[fenced(*block) for block in before], fenced(mark, body)]), ()) == body


@given(BLOCK, st.sampled_from(["  ", "\t", "    "]))
def test_a_block_in_a_list_loses_the_indentation_of_its_fence(body, indent):
    assert code.program_of("1. So:\n" + fenced("python", body, indent=indent), ()) == body


@given(
    BLOCK,
    st.lists(st.tuples(OTHER | MARK, BLOCK)),
    st.sampled_from(["def f(x):", "async def f(x):", "class f:", "f ="]),
)
def test_the_last_block_that_defines_a_name_of_the_tests_is_the_program(body, after, definition):
    blocks = [fenced("python", f"{definition} 1\n{body}"), *(fenced(*block) for block in after)]
    text = "talk\n".join(["```\nf(1)\n```\n", fenced("", "def f(x): return 0\n"), *blocks])
    assert code.program_of(text, ("g", "f")) == f"{definition} 1\n{body}"
    assert code.program_of(text + fenced("c++", "class f:\n"), ("f",)) == f"{definition} 1\n{body}"
    assert code.program_of(text + fenced("py", "f(1) == 2\n"), ("f",)) == f"{definition} 1\n{body}"


def test_a_fence_indented_by_more_than_three_blanks_is_text():
    body = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert code.program_of(fenced("python", body), ()) == body
    assert code.program_of("So:\n\n    ```python\n    x\n    ```\n" + fenced("", "y\n"), ()) == "y\n"


@given(BLOCK)
def test_a_block_that_never_closes_runs_to_the_end(body):
    assert code.program_of(f"So:\n```python\n{body}", ()) == body


def test_a_longer_fence_holds_a_shorter_one():
    body = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert code.program_of(fenced("python", body, "````"), ()) == body


def test_windows_line_ends_stay_within_the_program():
    assert code.program_of("So:\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\n", ()) == "x = 1\r\ny = 2\r\n"


HOSTILE_TEXTS = {
    "a fence that is none": "```" + "a" * 2**20 + "`",
    "fences": "```python\n" * 2**16,
    "tildes": "~~~" * 2**18 + "`",
    "indented": (" " * 2**10 + "```\n") * 2**9,
}


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS.keys())
def test_the_program_is_found_in_linear_time(text):
    start = time.process_time()
    assert isinstance(code.program_of(text, ()), str)
    assert time.process_time() - start < 2.0


# A runner that returns these verdicts, and what it was asked.
def asked(verdicts, proven=True, *, seen=None):
    def run(program: Program) -> Ran:
        if seen is not None:
            seen.append(program)
        return Ran(tuple(verdicts), proven, "", "", 0.1)

    return run


def problem(*tests, setup="", answer=""):
    return Problem(0, "?", answer, {"tests": tests, "setup": setup})


def said(text="def f(x): return x"):
    return Completion(text, 1, False)


THREE = problem("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3")
VERDICTS = st.lists(st.sampled_from([True, False, None]), min_size=3, max_size=3)


@given(VERDICTS, st.booleans())
def test_a_pass_is_every_verdict_right_and_proven(verdicts, proven):
    score = code.all_tests_pass(THREE, said(), run=asked(verdicts, proven))
    assert (score == 1.0) == (proven and verdicts == [True] * 3)
    assert (score is None) == (None in verdicts and False not in verdicts)
    assert score in (0.0, 1.0, None)


@given(VERDICTS, st.booleans())
def test_the_share_is_that_of_the_right_verdicts_and_1_only_where_it_is_a_pass(verdicts, proven):
    share = code.share_of_tests(THREE, said(), run=asked(verdicts, proven))
    if None in verdicts:
        assert share is None
    elif verdicts == [True] * 3:
        assert share == code.all_tests_pass(THREE, said(), run=asked(verdicts, proven))
    else:
        assert share == verdicts.count(True) / 3


@pytest.mark.parametrize("text", ["", "   \n", "```python\n```", "So:\n```python\n\n   \n```\n"])
@pytest.mark.parametrize("reward", [code.all_tests_pass, code.share_of_tests])
def test_no_program_is_wrong_and_nothing_is_run(text, reward):
    assert reward(THREE, said(text), run=asked([True] * 3, seen=(seen := []))) == 0.0
    assert seen == []


@pytest.mark.parametrize(
    "unfit",
    [
        problem(),
        Problem(0, "?", "", {}),
        problem("assert f(1) =="),
        problem("assert f(1) == 1", setup="def g(:"),
        problem("import numpy\nassert f(1) == 1"),
        problem("assert f(1) == 1", setup="from scipy.stats import norm"),
        problem("assert f(1) == 1", setup="from . import other"),
        problem("assert f(1) == '\0'"),
    ],
)
@pytest.mark.parametrize("reward", [code.all_tests_pass, code.share_of_tests])
def test_a_problem_without_tests_that_can_be_run_is_unscorable(unfit, reward):
    assert reward(unfit, said(), run=asked([True], seen=(seen := []))) is None
    assert seen == []


def program(*tests, setup="", answer="", text="def f(x): return x"):
    """What is run."""
    seen: list[Program] = []
    code.all_tests_pass(
        problem(*tests, setup=setup, answer=answer), said(text), run=asked([True] * len(tests), seen=seen)
    )
    return seen[0]


SUM = "def sum(a, b): return a + b"
NAMES = {
    "a function": ("assert f(1) == g(2)", "", "", {"f", "g"}, []),
    "built-ins are the judge's": ("assert set(f(1)) == set(sorted([1]))", "", "", {"f"}, []),
    "unless the reference defines them": ("assert sum(1, 2) == 3", "", SUM, {"sum"}, []),
    "a function named like a module": ("assert select(1) == 1", "", "", {"select"}, []),
    "both": ("assert token(token.NAME) == 1", "", "", {"token"}, []),
    "what the reference imports": (
        "assert C(f(1)) == C('a')",
        "",
        "from collections import Counter as C",
        {"f"},
        ["from collections import Counter as C"],
    ),
    "not what it imports from elsewhere": ("assert norm(f(1))", "", "from scipy.stats import norm", {"f", "norm"}, []),
    "what the setup makes": ("assert f(root) == 1", "root = Node(1)", "class Node: ...", {"f", "Node"}, []),
    "what the test makes": ("assert f(lambda x: x) == [y for y in (1,)]", "", "", {"f"}, []),
    "within an if of the reference": ("assert len(1) == 3", "", "if True:\n    len = lambda x: 3", {"len"}, []),
    "not within its functions": ("assert f(1) == max(1, 2)", "", "def f(x):\n    max = 3", {"f"}, []),
    "a reference that does not parse": ("assert f(1)", "", "def f(", {"f"}, []),
}


@pytest.mark.parametrize(("test", "setup", "answer", "names", "imports"), NAMES.values(), ids=NAMES.keys())
def test_a_name_is_the_programs_when_it_can_be_nothing_else(test, setup, answer, names, imports):
    run = program(test, setup=setup, answer=answer)
    assert set(run.names) == names
    assert run.setup.splitlines() == [*imports, *setup.splitlines()]


def test_the_program_finds_done_what_the_setup_imports():
    run = program("assert f(1) == 1", setup="import math\nfrom cmath import phase as p\nx = 1")
    assert run.sources == ("import math\nfrom cmath import phase as p", "def f(x): return x")


IDENTIFIER = st.sampled_from(["f", "g", "len", "sum", "math", "re", "x", "Node", "token"])


@given(IDENTIFIER, IDENTIFIER, st.sampled_from(["", "def {}(): ...", "import {}", "class {}: ...", "{} = 1"]))
def test_a_builtin_is_the_programs_only_if_the_reference_says_so(called, bound, reference):
    answer = reference.format(bound)
    run = program(f"assert {called}(1) == 1", answer=answer)
    if hasattr(builtins, called):
        assert (called in run.names) == (called == bound and bool(reference))  # no module has a built-in's name


@pytest.mark.filterwarnings("ignore:invalid escape")
@pytest.mark.parametrize("file", ["mbpp.jsonl", "sanitized-mbpp.jsonl"])
def test_every_published_problem_asks_its_program_for_what_its_reference_defines(file):
    rows = [json.loads(line) for line in (published("mbpp") / file).read_text().splitlines()]
    assert len(rows) in (974, 427)
    for row in rows:
        setup = "\n".join(row["test_imports"]) if "test_imports" in row else row["test_setup_code"]
        run = program(*row["test_list"], setup=setup, answer=row["code"], text=f"```python\n{row['code']}\n```")
        defined = {node.name for node in ast.parse(row["code"]).body if hasattr(node, "name")}
        assert set(run.names) in [{name} for name in defined] or row["task_id"] in (367, 601, 927), row["task_id"]
        assert run.sources[1].replace("\r\n", "\n").rstrip() == row["code"].replace("\r\n", "\n").rstrip()
