"""Files that are whole or absent: written beside their place, flushed to the disk, renamed into it."""

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoSpace(OSError, ValueError):
    """The disk is full or would be; a ValueError as well, because before a run starts it is bad input."""


def no_space(path: Path, expected: int) -> NoSpace:
    """The error of a disk at `path` that did not take `expected` bytes: it has too few, no inode, or a quota."""
    if (free := free_bytes(path)) < expected:
        text = f"no space left: got {free:,} bytes free, expected {expected:,}"
    elif out_of_inodes(path):
        text = f"no space left: got {free:,} bytes and no inode free, expected one for each new file"
    else:
        text = f"no space left: got {free:,} bytes free, expected {expected:,}, refused all the same: is there a quota?"
    return NoSpace(errno.ENOSPC, text, str(path))


def free_bytes(path: Path) -> int:
    """Bytes that may still be written under `path`, which need not exist yet."""
    return shutil.disk_usage(existing_folder(path)).free


def out_of_inodes(path: Path) -> bool:
    """Whether no file can be added under `path`, however many bytes are free."""
    disk = os.statvfs(existing_folder(path))
    return disk.f_files > 0 and disk.f_favail == 0  # some file systems have no fixed number of files and say 0


def existing_folder(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(p for p in (path, *path.absolute().parents) if p.is_dir())


def check_space(path: Path, need_bytes: int) -> None:
    """Raises NoSpace when fewer than `need_bytes`, or no file at all, can be written under `path`."""
    if free_bytes(path) < need_bytes or out_of_inodes(path):
        raise no_space(path, need_bytes)


def finite_or_none(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None: JSON has no other honest word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON in ASCII, so that no text can break a line or an encoding; NaN and infinities become null."""
    try:  # nearly always: looking at every number takes longer than writing it down
        return json.dumps(value, allow_nan=False, indent=indent)
    except (TypeError, ValueError):
        return json.dumps(finite_or_none(value), allow_nan=False, indent=indent)


def flush_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk; for a folder, its entries."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_tree(folder: Path) -> None:
    """Wait until all files and folders below are on the disk, and the folder's own entry."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        flush_file(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file at once: a reader, or a crash, finds the old bytes or the new ones."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_bytes(data)
        flush_file(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_file(path.parent)


def write_json(path: Path, obj: Any) -> None:
    """Replace the file at once with `obj` as indented JSON; NaN and infinities become null."""
    write_bytes(path, (to_json(obj, indent=2) + "\n").encode())


def append_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Add `obj` as a line to a file of JSON lines, and wait until it is on the disk."""
    with open(path, "ab") as file:
        file.write((to_json(obj) + "\n").encode("ascii"))
    flush_file(path)


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind the error.

    Libraries report the system's message without its number, or raise an error of their own while handling ours.
    """
    codes = (errno.ENOSPC, errno.EDQUOT)
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in codes:
        return True
    return any(os.strerror(code) in str(error) for code in codes) or is_full(error.__cause__ or error.__context__)
