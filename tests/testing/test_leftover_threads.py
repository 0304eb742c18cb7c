"""A session of tests whose threads do not end fails with their names; one whose threads end passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
TEST = "import threading\ndef test_it():\n    threading.Thread(target={}, name='of the test', daemon={}).start()\n"


@pytest.mark.parametrize(
    ("target", "daemon", "code"),
    [("threading.Event().wait", False, 1), ("threading.Event().wait", True, 0), ("print", False, 0)],
)
def test_a_thread_that_keeps_the_process_is_named(tmp_path: Path, target: str, daemon: bool, code: int) -> None:
    (tmp_path / "leftover_threads.py").write_text(
        (HELPERS / "leftover_threads.py").read_text().replace("SECONDS = 30.0", "SECONDS = 0.5")
    )
    (tmp_path / "test_it.py").write_text(TEST.format(target, daemon))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "leftover_threads", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert ("'of the test'" in done.stderr and "wait" in done.stderr) == bool(code)
