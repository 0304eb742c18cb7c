"""What `make test` leaves out, `make test-slow` runs, and ten days of `.ci/run` have seen."""

import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
SUITE = """
import pytest

@pytest.mark.slow_after(3)
@pytest.mark.parametrize("i", range(25))
def test_many(i): pass

@pytest.mark.slow
def test_one(): pass

def test_two(): pass
"""


def collected(folder: Path, *args: str) -> list[str]:
    """The tests of SUITE that these arguments choose."""
    (folder / "test_suite.py").write_text(SUITE)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "slow_part",
        "--collect-only",
        "-q",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
    ]
    env = {"PYTHONPATH": str(HELPERS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*argv, *args, "test_suite.py"], cwd=folder, env=env, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_quick_and_the_slow_part_are_the_whole(tmp_path: Path) -> None:
    quick, slow = collected(tmp_path, "-m", "not slow"), collected(tmp_path, "-m", "slow")
    assert [name.split("::")[1] for name in quick] == ["test_many[0]", "test_many[1]", "test_many[2]", "test_two"]
    assert len(slow) == 23
    assert sorted(quick + slow) == sorted(collected(tmp_path))


def test_ten_tenths_are_the_slow_part_each_test_in_one(tmp_path: Path) -> None:
    tenths = [collected(tmp_path, "-m", "slow", f"--tenth={day}") for day in range(331, 341)]
    assert sorted([name for tenth in tenths for name in tenth]) == sorted(collected(tmp_path, "-m", "slow"))
    assert max(map(len, tenths)) <= 4
    assert collected(tmp_path, "-m", "slow", "--tenth=341") == tenths[0]
