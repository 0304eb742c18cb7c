"""Memory of the main rank's process, and memory and utilisation of every rank's card."""

import sys
from contextlib import suppress

import psutil
import torch

from grpo_fn.shell.model.blocks import recompilations
from grpo_fn.shell.world import World

COMPILER = "torch._dynamo.convert_frame"


def usage(world: World) -> dict[str, float]:
    """What the ranks use of their machines; every rank calls it."""
    found = {"system/memory_gb": psutil.Process().memory_info().rss / 1e9}
    if world.device.type == "cuda":
        cards = world.exchange(card_usage(world.device), what="memory of the cards")
        found |= {f"system/gpu{rank}_{name}": value for rank, card in enumerate(cards) for name, value in card.items()}
    if COMPILER in sys.modules:  # asking would import it, which takes seconds
        graphs = recompilations()
        found |= {"system/compiled_graphs": float(graphs.built), "system/recompilations": float(graphs.again)}
    return found


def card_usage(device: torch.device) -> dict[str, float]:
    """Memory that this process has allocated on a card, now and at most, in GB (1e9 bytes), and utilisation in %.

    Utilisation needs nvidia-ml-py and a device that reports it; without either its key is left out.
    """
    found = {
        "memory_gb": torch.cuda.memory_allocated(device) / 1e9,
        "memory_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
    }
    with suppress(Exception):  # no nvidia-ml-py or driver library, a MIG slice: a missing gauge must not end a run
        found["utilization"] = float(torch.cuda.utilization(device))
    return found
