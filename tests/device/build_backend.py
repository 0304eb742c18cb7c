"""The C++ part of the fake device, built for the torch that is installed and kept for the next time.

python tests/device/build_backend.py        # builds it where there is none yet, and prints where it lies
"""

import fcntl
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIMIT = 600  # seconds for the compiler
LIBRARY = "fake_cuda_backend.so"  # the module's name


class NoCompiler(RuntimeError):
    """There is none, or it does not know what torch's headers are written in."""


def backend_library() -> Path:
    """The library's path, compiled first where there is none for this source and this torch.

    Raises:
        NoCompiler: when it cannot be built, with what the compiler said last.
    """
    of = [torch.__version__, sysconfig.get_platform(), *library_paths()]  # where it looks for torch is written in it
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(of).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}-{digest[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / LIBRARY
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that want it builds it
        if not library.is_file():
            compile_backend(library)
    return library


def compile_backend(library: Path) -> None:
    """Compile without optimisation: half a minute of one core, and the kernels are torch's own anyway."""
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        *(get_cxx_compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
        *(f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])),
        *(str(SOURCE), "-o", str(unfinished)),
        *(part for folder in library_paths() for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")),
        *("-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except OSError as error:
        raise NoCompiler(f"got no C++ compiler ({error}), wanted c++, or one named by CXX") from error
    if done.returncode:
        raise NoCompiler(f"got {command[0]} that ends with {done.returncode}: {done.stderr[-2000:]}")
    unfinished.rename(library)


if __name__ == "__main__":
    print(backend_library())
