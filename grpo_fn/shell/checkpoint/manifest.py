"""The manifest of a checkpoint (size and SHA-256 of every file, and its own), and small state as bytes."""

import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fn.shell.atomic_io import finite_or_none, flush_file, to_json

FORMAT = 2
MANIFEST = "manifest.json"
SUFFIX = ".pt"  # of a blob
# What torch.load(weights_only=True) gives back as it was.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
Entry = Mapping[str, int | str]  # size in bytes, sha256 in hexadecimal


class Broken(ValueError):
    """A checkpoint that is not what was saved; the message says which file and why."""


def seal(folder: Path, step: int, meta: Mapping[str, Any], hashed: Mapping[str, Entry]) -> None:
    """Write the manifest over the files that are there, and wait until all of it is on the disk.

    `hashed` has the entries of the files that others wrote, hashed and flushed; the rest is done here.
    """
    rest = sorted(p.name for p in folder.iterdir() if p.name not in hashed)
    files = {**hashed, **{name: entry(folder / name) for name in rest}}
    body = {"format": FORMAT, "step": step, "meta": finite_or_none(meta), "files": files}
    (folder / MANIFEST).write_text(_text(body))
    for name in (*rest, MANIFEST):
        flush_file(folder / name)
    flush_file(folder)


def entry(path: Path) -> Entry:
    """What the manifest says of a file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def verify(path: Path) -> dict[str, Any]:
    """The manifest, once every file is there with its size and sha256. Raises Broken with the reason."""
    manifest = read_manifest(path)
    for name, wanted in manifest["files"].items():
        if (got := _sha256(path / name)) != wanted["sha256"]:
            raise Broken(f"{name} has sha256 {got[:12]}..., wanted {wanted['sha256'][:12]}...")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, once it vouches for itself and every file it names has its size."""
    if not (path / MANIFEST).is_file():
        raise Broken(f"{MANIFEST} is missing")
    text = (path / MANIFEST).read_bytes()
    try:
        body = json.loads(text)
        del body["sha256"]
        sound = _text(body).encode() == text
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise Broken(f"{MANIFEST} does not match its own sha256")
    if body["format"] != FORMAT:
        raise ValueError(f"got checkpoint {path} of format {body['format']}, wanted {FORMAT}: another version wrote it")
    if path.name != f"step_{body['step']}":
        raise Broken(f"{MANIFEST} is of step {body['step']}")
    for name, wanted in body["files"].items():
        if not (path / name).is_file():
            raise Broken(f"{name} is missing")
        if (got := (path / name).stat().st_size) != wanted["size"]:
            raise Broken(f"{name} has {got:,} bytes, wanted {wanted['size']:,}")
    return body


def _text(body: dict[str, Any]) -> str:
    """The manifest's text: the body and the hash of the body, so that the manifest vouches for itself."""
    return to_json({**body, "sha256": hashlib.sha256(to_json(body).encode()).hexdigest()})


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack_blobs(blobs: Mapping[str, Any]) -> dict[str, bytes]:
    """File name to bytes, for every blob. Raises ValueError for what would not come back as it is."""
    if odd := [name for name in blobs if not name.isidentifier()]:
        raise ValueError(f"got blob names {odd}, wanted identifiers: they become file names")
    packed = {}
    for name, blob in blobs.items():
        _check(name, blob)
        buffer = io.BytesIO()
        torch.save(blob, buffer)
        packed[f"{name}{SUFFIX}"] = buffer.getvalue()
    return packed


def unpack_blob(file: Path) -> Any:
    """What was packed, its tensors on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)


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
