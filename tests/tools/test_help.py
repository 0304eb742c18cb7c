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
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv.pop(0))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
print("torch" in sys.modules, code)
"""


def run_tool(tool: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    folder = tool if tool.is_dir() else tool.parent
    argv = [sys.executable, "-c", CODE, str(folder), str(tool), *flags]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_help_and_a_wrong_flag_come_without_torch(tool: Path) -> None:
    shown = run_tool(tool, "--help")
    assert shown.stdout.startswith("usage: "), shown.stderr
    assert shown.stdout.endswith("False 0\n")
    refused = run_tool(tool, "--no_such_flag")
    assert refused.stderr.startswith("usage: ")
    assert refused.stdout == "False 2\n"
