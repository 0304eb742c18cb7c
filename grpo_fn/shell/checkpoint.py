"""Checkpoints that are whole or absent: folders `step_N` with a manifest of hashes, renamed into place when complete.

`root` is the folder that holds them. Inside it, names with a leading dot are unfinished business of one process:
`.tmp-step_N-PID` is being written, `.old-step_N-PID` is being replaced, `.gone-step_N-PID` is being deleted.
"""

import errno
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_fn.shell.durable import check_space, flush_file, free_bytes, no_space
from grpo_fn.shell.manifest import Broken, read_manifest, seal, verify

TENSORS = "tensors.safetensors"
UNFINISHED = re.compile(r"\.(tmp|old|gone)-(step_\d+)-(\d+)")
# What torch.load(weights_only=True) gives back as it was.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


class Checkpoint(NamedTuple):
    """A checkpoint whose hashes have been verified."""

    path: Path
    step: int
    meta: Mapping[str, Any]


class Contents(NamedTuple):
    """What `save` was given, on the CPU."""

    tensors: dict[str, Tensor]
    blobs: dict[str, Any]
    meta: Mapping[str, Any]


def save(
    root: Path, step: int, *, tensors: Mapping[str, Tensor], blobs: Mapping[str, Any], meta: Mapping[str, Any]
) -> Path:
    """Write `root/step_N`: at every moment it is absent, as it was, or complete, and on the disk when this returns.

    `tensors` go to safetensors and share no storage; `blobs` are plain containers, numbers and tensors
    (optimizer states) and go to torch.save; `meta` is JSON, where NaN and infinities become null.
    Raises ValueError for tensors or blobs that would not come back as they are, NoSpace when the disk is full;
    checkpoints saved before stay as they were.
    """
    _check_unique(tensors)
    _check_names(blobs)
    need = sum(t.nbytes for t in tensors.values()) + sum(_weigh(name, b) for name, b in blobs.items()) + 2**16
    root.mkdir(parents=True, exist_ok=True)
    tidy(root)
    check_space(root, need)
    building = _unfinished(root, "tmp", step)
    try:
        _write(building, step, tensors, blobs, meta)
        return _commit(building, step)
    except BaseException as error:
        free = free_bytes(root)
        tidy(root)
        if _is_full(error):
            raise no_space(root / f"step_{step}", free, need) from error
        raise


def latest(root: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies; for the process that owns the run.

    Each one found broken on the way is told to `warn` with the reason and renamed to `broken-step_N`, so that it can
    be looked at and is never counted as one of the newest again. Leftovers of dead processes are removed.
    """
    tidy(root)
    for step in reversed(steps(root)):
        path = root / f"step_{step}"
        try:
            return Checkpoint(path, step, verify(path)["meta"])
        except Broken as error:
            aside = root / f"broken-step_{step}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            warn(f"skipped checkpoint {path}: {error}; moved to {aside.name}")
    return None


def load(path: Path) -> Contents:
    """What was saved, bit for bit. Raises Broken (a ValueError) when the files are not what was saved."""
    manifest = verify(path)
    blobs = {
        Path(name).stem: torch.load(path / name, map_location="cpu", weights_only=True)
        for name in manifest["files"]
        if name.endswith(".pt")
    }
    return Contents(load_file(path / TENSORS), blobs, manifest["meta"])


def prune(root: Path, *, keep_last: int, keep_best: int, metric: str) -> list[int]:
    """Delete all but the newest `keep_last` and the `keep_best` with the largest `meta["metrics"][metric]`.

    The newest always stays; equal scores favour the newer; no score (null or absent) is never best. A folder that is
    visibly broken counts for nothing and is left for `latest` to name. Returns the deleted steps.
    """
    if keep_last < 1 or keep_best < 0:
        raise ValueError(f"got keep_last {keep_last}, keep_best {keep_best}; wanted at least 1 and at least 0")
    metas = {step: meta for step in steps(root) if (meta := _meta_if_whole(root / f"step_{step}")) is not None}
    scores = {step: meta.get("metrics", {}).get(metric) for step, meta in metas.items()}
    ranked = sorted(((score, step) for step, score in scores.items() if score is not None), reverse=True)
    keep = {*list(scores)[-keep_last:], *(step for _, step in ranked[:keep_best])}
    doomed = [step for step in scores if step not in keep]
    for step in doomed:
        gone = _unfinished(root, "gone", step)
        os.rename(root / f"step_{step}", gone)  # no moment at which half a checkpoint bears its name
        shutil.rmtree(gone)
    return doomed


def steps(root: Path) -> list[int]:
    """The steps that have a folder, verified or not, ascending."""
    found = (re.fullmatch(r"step_(0|[1-9]\d*)", p.name) for p in _folders(root))
    return sorted(int(match[1]) for match in found if match)


def tidy(root: Path) -> None:
    """Undo what dead processes left unfinished: restore what was being replaced, remove the rest."""
    for path in _folders(root):
        match = UNFINISHED.fullmatch(path.name)
        if match and _abandoned(path, int(match[3])):
            if match[1] == "old" and not (root / match[2]).exists():
                os.rename(path, root / match[2])
            else:
                shutil.rmtree(path)


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], blobs: Mapping[str, Any], meta: Mapping) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
    for name, blob in blobs.items():
        with open(folder / f"{name}.pt", "wb") as file:  # a file object: torch's own writer hides the errno
            torch.save(blob, file)
    seal(folder, step, meta)


def _commit(building: Path, step: int) -> Path:
    """Rename into place. A folder cannot be renamed over a full one: the old one steps aside, and `tidy` brings it
    back if the process dies in between."""
    root, final = building.parent, building.parent / f"step_{step}"
    retired = _unfinished(root, "old", step)
    if final.exists():
        os.rename(final, retired)
    os.rename(building, final)
    flush_file(root)
    shutil.rmtree(retired, ignore_errors=True)
    return final


def _meta_if_whole(path: Path) -> dict[str, Any] | None:
    """Sizes only: hashing every checkpoint at every save would cost more than the save."""
    try:
        return read_manifest(path)["meta"]
    except Broken:
        return None


def _check_unique(tensors: Mapping[str, Tensor]) -> None:
    owner: dict[int, str] = {}
    for name, t in tensors.items():
        first = owner.setdefault(t.untyped_storage().data_ptr(), name) if t.numel() else name
        if first != name:
            raise ValueError(f"got tensors {first!r} and {name!r} in one storage, wanted each to own its memory")


def _check_names(blobs: Mapping[str, Any]) -> None:
    if odd := [name for name in blobs if not name.isidentifier()]:
        raise ValueError(f"got blob names {odd}, wanted identifiers: they become file names")


def _weigh(where: str, value: Any) -> int:
    """Bytes of the tensors inside. Raises ValueError at whatever weights_only loading would refuse on resume."""
    if isinstance(value, Tensor):
        return value.nbytes + 1024
    if type(value) in (dict, OrderedDict):
        return sum(_weigh(where, key) + _weigh(f"{where}[{key!r}]", item) for key, item in value.items())
    if type(value) in (list, tuple):
        return sum(_weigh(f"{where}[{i}]", item) for i, item in enumerate(value))
    if type(value) in PLAIN:
        return 64
    raise ValueError(f"got a {type(value).__name__} at {where}, wanted tensors, numbers, strings and plain containers")


def _unfinished(root: Path, kind: str, step: int) -> Path:
    return root / f".{kind}-step_{step}-{os.getpid()}"


def _abandoned(path: Path, pid: int) -> bool:
    """Whether nobody works on it: its process is this one, dead, or younger than the folder (the id was reused)."""
    if pid == os.getpid():
        return True
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > path.stat().st_ctime + 1
    except psutil.NoSuchProcess:
        return True


def _folders(root: Path) -> Iterator[Path]:
    return iter(sorted(p for p in root.iterdir() if p.is_dir())) if root.is_dir() else iter(())


def _is_full(error: BaseException | None) -> bool:
    """safetensors reports the system's message without its number; torch raises its own error while handling ours."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in codes:
        return True
    return any(os.strerror(code) in str(error) for code in codes) or _is_full(error.__cause__ or error.__context__)
