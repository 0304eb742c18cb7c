"""What is asked of the host."""

import os
import platform
import subprocess
import sys

import pytest

# Two tensors, so that one is not simply given the place of the other.
FAULTS = """
import resource, torch
from grpo_fn.shell.process import keep_freed_memory

KEEP
def cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = torch.ones(1 << 24)
    second = torch.ones(1 << 24)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()

for _ in range(20):  # until both have found their places
    share = cleared() / (8 << 24)
print(share)
"""


def cleared(keep: str, **settings: str) -> float:
    """The share of 128 MiB, freed before, that the system had to clear again."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | settings
    code = FAULTS.replace("KEEP", keep)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library is told")
def test_freed_memory_is_used_again_unless_told_otherwise_from_outside() -> None:
    """Pages are cleared once, not at each use."""
    assert cleared("keep_freed_memory()") < 0.1
    assert cleared("") > 0.9
    assert cleared("keep_freed_memory()", MALLOC_MMAP_THRESHOLD_="131072") > 0.9
