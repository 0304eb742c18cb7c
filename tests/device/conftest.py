"""Programs on the fake device, each in a process of its own: torch asks once which devices there are."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_backend import NoCompiler, backend_library

HERE = Path(__file__).resolve().parent
Rehearse = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def library() -> Path:
    """The C++ part, built once; the test is skipped with the reason where it cannot be."""
    try:
        return backend_library()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def rehearse(library: Path) -> Rehearse:
    """(program, arguments) -> the object that it prints last; raises AssertionError with its output otherwise."""

    def run(program: str, *argv: str, seconds: float = 600.0, compiled: bool = False) -> dict[str, Any]:
        env = {**os.environ, "FAKE_CUDA_LIBRARY": str(library), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE.parent / "helpers")))
        if not compiled:
            env["TORCH_COMPILE_DISABLE"] = "1"  # Inductor writes kernels for a card, and there is none
        done = subprocess.run(
            [sys.executable, str(HERE / program), *argv],
            capture_output=True, text=True, timeout=seconds, env=env, check=False, cwd=HERE.parents[1],
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
