"""Checkpoints that are whole or absent: folders `step_N` with a manifest of hashes, renamed into place when complete.

Not torch.distributed.checkpoint alone, which has the tensors (`tensor_shards`): it keeps no hashes and no newest few.

`async_saver.py` writes checkpoints; here is what is done with them on the disk. `root` is the folder that holds them.
Inside it, names with a leading dot are unfinished business of one process, the main rank's: `.tmp-step_N-OWNER` is
being written, `.old-step_N-OWNER` is being replaced, `.gone-step_N-OWNER` is being deleted. OWNER is its process id
and, of what is written, a word that no other process says: a rank of a job that died cannot write into the next one's
folder.
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from grpo_fn.shell.atomic_io import finite_or_none, flush_file, to_json
from grpo_fn.shell.checkpoint import tensor_shards
from grpo_fn.shell.world import World

UNFINISHED = re.compile(r"\.(tmp|old|gone)-(step_\d+)-(\d+)(?:-[0-9a-f]+)?")


class Checkpoint(NamedTuple):
    """A checkpoint whose hashes have been verified."""

    path: Path
    step: int
    meta: Mapping[str, Any]


def latest_verified(root: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies; for the process that owns the run.

    Each one found broken on the way goes to `warn` with the reason and renamed to `broken-step_N`, so that it can
    be looked at and is never counted as one of the newest again. Leftovers of dead processes are removed.
    """
    clean_up_unfinished(root)
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


def load_into(path: Path, tensors: Mapping[str, Tensor], world: World, *, exact: bool = False) -> None:
    """Copy what the checkpoint holds under these names into the tensors, sharded or not, whatever ranks wrote it.

    Every rank calls it. Raises ValueError, nothing changed, naming the first tensor that the checkpoint does not hold,
    or holds with another shape or dtype; what else it holds is left alone, or refused as well when `exact`.
    """
    world.together(partial(_check_fits, path, tensors, exact), what="comparing the checkpoint with the model")
    world.together(partial(tensor_shards.load_into_tensors, path, tensors), what="reading the checkpoint")


def read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, under the rest of their names, each whole and on the CPU."""
    specs = {name: spec for name, spec in tensor_shards.folder_tensors(path).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    tensor_shards.load_into_tensors(path, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def blobs(path: Path) -> dict[str, Any]:
    """The blobs by name, their tensors on the CPU."""
    files = [path / name for name in read_manifest(path)["files"] if name.endswith(SUFFIX)]
    return {file.stem: torch.load(file, map_location="cpu", weights_only=True) for file in files}


def meta(path: Path) -> dict[str, Any]:
    """The meta that it was saved with."""
    return read_manifest(path)["meta"]


def checkpoint_flaw(root: Path, step: int) -> str | None:
    """The error of a step's checkpoint; None if it verifies."""
    try:
        verify(root / f"step_{step}")
    except Broken as error:
        return str(error)
    return None


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_best: int,
    metric: str,
    scores: Mapping[int, float] | None = None,
    spare: Collection[int] = (),
) -> list[int]:
    """Delete all but the newest `keep_last`, the `keep_best` with the largest `meta["metrics"][metric]`, and `spare`.

    `scores` are those that came, by step, after their checkpoints were written. The newest always stays; equal scores
    favour the newer; no score (null or absent) is never best. A folder that is visibly broken counts for nothing and
    is left for `latest_verified` to name. Returns the deleted steps.
    """
    if keep_last < 1 or keep_best < 0:
        raise ValueError(f"got keep_last {keep_last}, keep_best {keep_best}; expected at least 1 and at least 0")
    scored = {}
    for step in steps(root):
        with suppress(Broken):  # sizes only: hashing every checkpoint at every save would cost more than the save
            score = meta(root / f"step_{step}").get("metrics", {}).get(metric)
            scored[step] = (scores or {}).get(step, score)
    ranked = sorted(((score, step) for step, score in scored.items() if score is not None), reverse=True)
    keep = {*list(scored)[-keep_last:], *(step for _, step in ranked[:keep_best]), *spare}
    doomed = [step for step in scored if step not in keep]
    for step in doomed:
        _remove(root / f"step_{step}")
    return doomed


def steps(root: Path) -> list[int]:
    """The steps that have a folder, verified or not, ascending."""
    return sorted(int(m[1]) for p in _folders(root) if (m := re.fullmatch(r"step_(0|[1-9]\d*)", p.name)))


def clean_up_unfinished(root: Path) -> None:
    """Undo what dead processes left unfinished: restore what was being replaced, remove the rest.

    What this process left counts as dead, so it is for moments in which it writes nothing.
    """
    for path in _folders(root):
        match = UNFINISHED.fullmatch(path.name)
        if match and _abandoned(path, int(match[3])):
            if match[1] == "old" and not (root / match[2]).exists():
                os.rename(path, root / match[2])
            else:
                _remove(path)


def temporary_name(root: Path, kind: str, step: int, owner: str) -> Path:
    """The name of unfinished business; `owner` begins with the id of the process whose business it is."""
    return root / f".{kind}-step_{step}-{owner}"


def commit(building: Path, step: int) -> Path:
    """Rename into place. A folder cannot be renamed over a full one: the old one steps aside, and
    `clean_up_unfinished` brings it back if the process dies in between."""
    root, final = building.parent, building.parent / f"step_{step}"
    retired = temporary_name(root, "old", step, str(os.getpid()))
    if final.exists():
        os.rename(final, retired)
    os.rename(building, final)
    flush_file(root)
    shutil.rmtree(retired, ignore_errors=True)
    return final


def _check_fits(path: Path, tensors: Mapping[str, Tensor], exact: bool) -> None:
    stored = tensor_shards.folder_tensors(path)
    for name, tensor in tensors.items():
        expected = (tuple(tensor.shape), tensor.dtype)
        if (got := stored.get(name)) != expected:
            text = "no such tensor" if got is None else f"{got[0]} {got[1]}"
            raise ValueError(f"got {text} for {name} in checkpoint {path}, expected {expected[0]} {expected[1]}")
    if exact and (more := sorted(stored.keys() - tensors.keys())):
        raise ValueError(
            f"got {len(more)} tensors such as {more[0]} in checkpoint {path}, expected none that the policy lacks"
        )


def _remove(path: Path) -> None:
    """Delete under a separate name, so that at no moment half a checkpoint bears a name that counts.

    That name also keeps it from a process that is not as dead as it seemed: what it renames is no longer there.
    """
    step = int(re.search(r"step_(\d+)", path.name)[1])
    gone = temporary_name(path.parent, "gone", step, str(os.getpid()))
    if path != gone:
        if gone.exists():
            shutil.rmtree(gone)
        try:
            os.rename(path, gone)
        except FileNotFoundError:  # it was finished, or removed by another, in this moment
            return
    shutil.rmtree(gone)


def _abandoned(path: Path, pid: int) -> bool:
    """Whether no process works on it: its owner is this one, dead, or younger than the folder (the id was reused)."""
    if pid == os.getpid():
        return True
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > path.stat().st_ctime + 1
    except psutil.NoSuchProcess:
        return True


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


# -- the manifest of a checkpoint

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
    """The manifest's entry of a file."""
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def verify(path: Path) -> dict[str, Any]:
    """The manifest, once every file is there with its size and sha256. Raises Broken with the reason."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        if (got := _sha256(path / name)) != expected["sha256"]:
            raise Broken(f"{name} has sha256 {got[:12]}..., expected {expected['sha256'][:12]}...")
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
        raise ValueError(
            f"got checkpoint {path} of format {body['format']}, expected {FORMAT}: another version wrote it"
        )
    if path.name != f"step_{body['step']}":
        raise Broken(f"{MANIFEST} is of step {body['step']}")
    for name, expected in body["files"].items():
        if not (path / name).is_file():
            raise Broken(f"{name} is missing")
        if (got := (path / name).stat().st_size) != expected["size"]:
            raise Broken(f"{name} has {got:,} bytes, expected {expected['size']:,}")
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
        raise ValueError(f"got blob names {odd}, expected identifiers: they become file names")
    packed = {}
    for name, blob in blobs.items():
        _check(name, blob)
        buffer = io.BytesIO()
        torch.save(blob, buffer)
        packed[f"{name}{SUFFIX}"] = buffer.getvalue()
    return packed


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
            f"got a {type(value).__name__} at {where}, expected tensors, numbers, strings and plain containers"
        )
