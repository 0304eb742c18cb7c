"""The bench runs, at a size at which its figures mean nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def printed(what: str, *flags: str) -> list[list[str]]:
    """The cells of the table's rows."""
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), what, "--size", "tiny", "--steps", "1", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def test_scaling_has_a_row_for_each_number_of_ranks() -> None:
    one, two = printed("scaling", "--ranks", "1,2")
    assert [one[0], two[0]] == ["1", "2"]
    assert one[1].endswith("(1.00x)")
    assert one[3] == "0%"
    assert re.fullmatch(r"\d+%", two[3])
    assert int(two[3][:-1]) > 0, "two ranks have something to tell each other"


@pytest.mark.slow
def test_a_checkpoint_costs_a_step_something() -> None:
    ((ranks, _, plain, waiting, beside, lost),) = printed("checkpoint")
    assert ranks == "1"
    assert plain.endswith(" s")
    assert waiting.endswith("x)")
    assert beside.endswith("x)")
    assert re.fullmatch(r"-?\d+%", lost)
