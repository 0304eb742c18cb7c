"""A folder that vouches for itself: a manifest with the size and hash of every file, and of the manifest."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fn.shell.atomic_io import finite, flush_file, to_json

FORMAT = 2
MANIFEST = "manifest.json"
Entry = Mapping[str, int | str]  # size in bytes, sha256 in hexadecimal


class Broken(ValueError):
    """A checkpoint that is not what was saved; the message says which file and why."""


def seal(folder: Path, step: int, meta: Mapping[str, Any], hashed: Mapping[str, Entry]) -> None:
    """Write the manifest over the files that are there, and wait until all of it is on the disk.

    `hashed` has the entries of the files that others wrote, hashed and flushed; the rest is done here.
    """
    rest = sorted(p.name for p in folder.iterdir() if p.name not in hashed)
    files = {**hashed, **{name: entry(folder / name) for name in rest}}
    (folder / MANIFEST).write_text(_text({"format": FORMAT, "step": step, "meta": finite(meta), "files": files}))
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
