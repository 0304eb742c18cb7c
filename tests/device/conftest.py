"""Programs on the fake device, each in its own process: torch asks once which devices there are."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

HERE = Path(__file__).resolve().parent
ROOT, TOOL = HERE.parents[1], "tools/device_check"
SOURCE = HERE / "fake_cuda.cpp"
OnDevice = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def library() -> Path:
    """The C++ part, built where there is none for this source and this torch: half a minute, without optimisation."""
    of = [torch.__version__, sysconfig.get_platform(), *library_paths()]  # where it looks for torch is written in it
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(of).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}-{digest[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built, unfinished = folder / "fake_cuda_backend.so", folder / "unfinished"
    command = [
        *(get_cxx_compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
        *(f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])),
        *(str(SOURCE), "-o", str(unfinished)),
        *(part for path in library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that want it builds it
        if not built.is_file():
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                pytest.skip(f"got no library from {command[0]}, expected a compiler of C++20: {str(said)[-2000:]}")
            unfinished.rename(built)
    return built


@pytest.fixture
def on_device(library: Path) -> OnDevice:
    """(program, arguments) -> the object that it prints last; raises AssertionError with its output otherwise."""

    def run(program: str, *argv: str, seconds: float = 600.0) -> dict[str, Any]:
        env = {**os.environ, "FAKE_CUDA_LIBRARY": str(library), "OMP_NUM_THREADS": "1"}
        env["TORCH_COMPILE_DISABLE"] = "1"  # Inductor writes kernels for a card, and there is none
        env["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in ("", "tests", "tests/helpers", TOOL))
        command = [sys.executable, str(HERE / program), *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, cwd=ROOT)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
