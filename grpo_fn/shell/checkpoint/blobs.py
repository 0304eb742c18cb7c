"""Small parts of a checkpoint as bytes: plain containers of numbers, strings and tensors that come back as they are."""

import io
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIX = ".pt"
# What torch.load(weights_only=True) gives back as it was.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def packed(blobs: Mapping[str, Any]) -> dict[str, bytes]:
    """File name to bytes, for every blob. Raises ValueError for what would not come back as it is."""
    if odd := [name for name in blobs if not name.isidentifier()]:
        raise ValueError(f"got blob names {odd}, wanted identifiers: they become file names")
    for name, blob in blobs.items():
        _check(name, blob)
    return {f"{name}{SUFFIX}": _bytes(blob) for name, blob in blobs.items()}


def unpacked(file: Path) -> Any:
    """What was packed, its tensors on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)


def _bytes(blob: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(blob, buffer)
    return buffer.getvalue()


def _check(where: str, value: Any) -> None:
    """Raise ValueError at whatever weights_only loading would refuse on resume."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check(where, key)
            _check(f"{where}[{key!r}]", item)
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            _check(f"{where}[{i}]", item)
    elif not isinstance(value, Tensor) and type(value) not in PLAIN:
        raise ValueError(
            f"got a {type(value).__name__} at {where}, wanted tensors, numbers, strings and plain containers"
        )
