"""--help and usage errors of every tool come at once: without torch, and without a line of a library before ours."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
TOOLS += [path.parent for path in sorted((ROOT / "tools").glob("*/__main__.py"))]
CODE = """
import runpy, sys
_, folder, tool = sys.argv
sys.path.insert(0, folder)
for flag in ("--help", "--no_such_flag"):
    sys.argv = [tool, flag]
    try:
        runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        print("torch" in sys.modules, end.code)
"""


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_help_and_a_wrong_flag_come_without_torch(tool: Path) -> None:
    argv = [sys.executable, "-c", CODE, str(tool if tool.is_dir() else tool.parent), str(tool)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: "), done.stderr
    assert done.stderr.startswith(("usage: ", "error: "))
    assert done.stdout.endswith("\nFalse 0\nFalse 2\n")
