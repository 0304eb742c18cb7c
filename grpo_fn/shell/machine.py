"""What there is of a host: processors, memory, disk and limits. Without torch: it answers where torch cannot."""

import ctypes
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import psutil

SHARED = Path("/dev/shm")
# Of the control group that a container runs in: a number of bytes or the word "max" (v2), a huge number for none (v1).
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


# Of the GNU C library's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what comes next, as torch does with a GPU's memory.

    By default it hands large blocks back to the system, which clears each one page by page when it is asked for again:
    of the tensors of a step on CPU that is all of them, every step. Whoever has set one of its MALLOC_ variables has
    chosen; another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(TRIM_THRESHOLD, -1)  # never
        mallopt(MMAP_THRESHOLD, 2**31 - 1)


def host(folder: str) -> dict[str, Any]:
    """Sizes in bytes. `disk` is free on the file system of `folder`, or of the nearest parent that exists."""
    memory = psutil.virtual_memory()
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory": memory.total,
        "memory_free": min(memory.available, _left_in_group(memory.total)),
        "disk_free": shutil.disk_usage(_existing(Path(folder))).free,
        "shared": shutil.disk_usage(SHARED).total if SHARED.is_dir() else None,
        "shared_free": shutil.disk_usage(SHARED).free if SHARED.is_dir() else None,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],  # -1 for any number
    }


def _left_in_group(total: int) -> int:
    """What the control group leaves this process of the host's memory."""
    for limit, used in zip(LIMITS, USED, strict=True):
        try:
            return int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # not this version of control groups; the word "max"
            continue
    return total


def _existing(path: Path) -> Path:
    path = path.expanduser().resolve()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
