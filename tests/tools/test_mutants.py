"""A fault stands under the name of the test that notices it, or is a survivor; nothing but that line changes."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

SOURCE = '''"""1 < 2 in a docstring."""

LOW: int = 0


def above(x, y):
    if x is None:
        raise ValueError("got " + "none")
    return x > y


def shifted(x):
    return x.detach() + 1
'''
TESTS = """
from grpo_fn.algo import toy

def test_above():
    assert toy.above(2, 1) and not toy.above(1, 1)

def test_broken():
    assert False
"""


def test_every_mutant_is_one_change_that_can_be_parsed() -> None:
    made = [*mutants.mutants("grpo_fn/algo/toy.py", SOURCE)]
    assert [(m.line, m.before, m.after) for m in made] == [
        (7, "x is None", "not x is None"),
        (9, "x > y", "x >= y"),
        (13, "x.detach() + 1", "x.detach() - 1"),
        (13, "x.detach()", "x"),
        (13, "1", "2"),
    ]
    for mutant in made:
        ast.parse(mutant.text)
        (changed,) = [a for a, b in zip(mutant.text.splitlines(), SOURCE.splitlines(), strict=True) if a != b]
        assert mutant.after in changed


@pytest.mark.slow
def test_the_table_says_which_test_notices_which(tmp_path: Path) -> None:
    files = {"grpo_fn/__init__.py": "", "grpo_fn/algo/__init__.py": "", "grpo_fn/algo/toy.py": SOURCE}
    files |= {"tests/algo/test_toy.py": TESTS, "pytest.ini": "[pytest]"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(mutants.__file__, tmp_path / "tools")
    argv = [sys.executable, "tools/mutants.py", "--out", "table.md"]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    page = (tmp_path / "table.md").read_text()
    assert ": 3 unexecuted, 2 noticed." in page
    assert "| `grpo_fn/algo/toy.py:9` | `x > y` | `x >= y` | `algo/test_toy.py::test_above` |" in page
    assert (tmp_path / "grpo_fn/algo/toy.py").read_text() == SOURCE
