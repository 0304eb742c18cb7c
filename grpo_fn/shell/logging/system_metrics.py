"""What the process uses of its machine."""

import sys
from contextlib import suppress

import psutil
import torch

from grpo_fn.shell.model.blocks import recompilations

COMPILER = "torch._dynamo.convert_frame"


def usage() -> dict[str, float]:
    """Resident memory in GB (1e9 bytes) and, per visible GPU, memory allocated now and at most, and utilisation in %.

    Utilisation needs nvidia-ml-py and a device that reports it; without either its key is left out. Where blocks are
    compiled, also how many graphs have been built, and how often code that had been compiled was compiled again.
    """
    found = {"system/memory_gb": psutil.Process().memory_info().rss / 1e9}
    for i in range(torch.cuda.device_count()):
        found[f"system/gpu{i}_memory_gb"] = torch.cuda.memory_allocated(i) / 1e9
        found[f"system/gpu{i}_memory_peak_gb"] = torch.cuda.max_memory_allocated(i) / 1e9
        with suppress(Exception):  # no nvidia-ml-py or driver library, a MIG slice: a missing gauge must not end a run
            found[f"system/gpu{i}_utilization"] = float(torch.cuda.utilization(i))
    if COMPILER in sys.modules:  # asking would import it, which takes seconds
        graphs = recompilations()
        found |= {"system/compiled_graphs": float(graphs.built), "system/recompilations": float(graphs.again)}
    return found
