"""What torch sees of the accelerators, and whether they can talk to one another."""

import json
import tempfile
import time
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

ELEMENTS = 1 << 20  # of the tensor that is summed


def device_facts() -> dict[str, Any]:
    """Versions as built, and every device with its memory in bytes.

    `apart` are pairs that cannot read each other's memory; `trouble` is why there is no CUDA device.
    """
    there = torch.cuda.is_available()
    devices = [_device(i) for i in range(torch.cuda.device_count())] if there else []
    pairs = permutations(range(len(devices)), 2)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if there else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there and dist.is_nccl_available() else None,
        "devices": devices,
        "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        "trouble": "" if there or torch.version.cuda is None else _trouble(),
    }


def _device(i: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    with torch.cuda.device(i):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"name": about.name, "capability": [about.major, about.minor], "free": free, "total": total, "bf16": bf16}


def _trouble() -> str:
    """What CUDA says where it does not start, though torch is built for it and a device file is there."""
    if not Path("/dev/nvidiactl").exists():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return "torch finds no device, though a driver is there: is CUDA_VISIBLE_DEVICES empty?"


def time_all_reduce(device: str, count: str, deadline: str) -> dict[str, Any]:
    """Seconds that a sum over `count` devices ("cuda", or "cpu" for as many processes) took, once it was set up.

    Raises RuntimeError when the sum is wrong, and whatever the backend raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (device, int(count), float(deadline), folder)
        multiprocessing.start_processes(_reduce, arguments, nprocs=int(count), start_method="spawn")
        return json.loads((Path(folder) / "seconds").read_text())


def _reduce(rank: int, device: str, count: int, deadline: float, folder: str) -> None:
    own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=deadline),
    )
    for _ in range(2):  # the first one makes the connections
        began = time.monotonic()
        x = torch.full((ELEMENTS,), rank + 1.0, device=own)
        dist.all_reduce(x)
        got, wanted = float(x.min()), count * (count + 1) / 2
        seconds = time.monotonic() - began
    if got != wanted or float(x.max()) != wanted:
        raise RuntimeError(f"got {got:g} as the sum over {count} devices, wanted {wanted:g}")
    if rank == 0:
        (Path(folder) / "seconds").write_text(json.dumps({"seconds": seconds}))
    dist.destroy_process_group()
