"""Doctor probe: processors, memory, disk and limits of this host. Without torch: it answers where torch cannot."""

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


def host_facts(folder: str) -> dict[str, Any]:
    """Sizes in bytes. `disk` is free on the file system of `folder`, or of the nearest parent that exists."""
    path = Path(folder).expanduser().resolve()
    existing = next(candidate for candidate in (path, *path.parents) if candidate.exists())
    memory = psutil.virtual_memory()
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory": memory.total,
        "memory_free": min(memory.available, _left_in_group(memory.total)),
        "disk_free": shutil.disk_usage(existing).free,
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
