"""--help and usage errors of every command of the lab come at once: without torch."""

import subprocess
import sys

import pytest

COMMANDS = ["replay", "redteam", "lab.compare", "lab.lens", "lab.pair", "lab.report", "lab.sweep"]
CODE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
print("torch" in sys.modules, code)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_a_wrong_flag_come_without_torch(command: str) -> None:
    outputs = []
    for flag in ("--help", "--no_such_flag"):
        argv = [sys.executable, "-c", CODE, f"grpo_fn.{command}", flag]
        outputs.append(subprocess.run(argv, capture_output=True, text=True, timeout=60))
    shown, refused = outputs
    assert shown.stdout.startswith(f"usage: python -m grpo_fn.{command} "), shown.stderr
    assert shown.stdout.endswith("False 0\n")
    assert refused.stderr.startswith("usage: ")
    assert refused.stdout == "False 2\n"
