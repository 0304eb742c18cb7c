"""--help and usage errors of every command of the lab come at once: without torch."""

import subprocess
import sys

import pytest

COMMANDS = ["replay", "redteam", "lab.compare", "lab.lens", "lab.pair", "lab.report", "lab.sweep"]
CODE = """
import runpy, sys
for flag in ("--help", "--no_such_flag"):
    sys.argv = [sys.argv[0], flag]
    try:
        runpy.run_module(COMMAND, run_name="__main__")
    except SystemExit as end:
        print("torch" in sys.modules, end.code)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_wrong_flag_come_without_torch(command: str) -> None:
    argv = [sys.executable, "-W", "ignore", "-c", CODE.replace("COMMAND", repr(f"grpo_fn.{command}"))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"usage: python -m grpo_fn.{command} "), done.stderr
    assert done.stdout.endswith("False 0\nFalse 2\n")
    assert done.stderr.startswith("usage: ")
