"""The run folder: whose it is, who is in it, and what configuration made it.

config.gin, run.json (what the folder answers to, and the knobs as a table), run.lock, metrics.jsonl, log.txt,
kernels.jsonl (on CUDA), summary.json, and the folders tensorboard, rollouts, checkpoints, model.
"""

import difflib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from grpo_fn.shell.atomic_io import check_space, write_bytes, write_json

FOLDERS = ("tensorboard", "rollouts", "checkpoints")
MARKER = "run.json"
SEED_KNOBS = ("train.train.seed", "models.TinyModel.seed")  # what a configuration is repeated over
LOCK = "run.lock"
USER_CODE = "user_code_"  # modules with functions of a script or notebook (`grpo_fn.api.UserCode`)
SHOWN = 10

# Descriptors of the locks this process holds. They stay open until it ends: closing any descriptor of a file drops
# the process's lock on it. A POSIX lock is the process's alone, so a worker that outlives it cannot keep the folder.
_held: dict[Path, int] = {}


def open_run(
    run_dir: Path,
    *,
    config_text: str,
    fingerprint: str,
    hparams: Mapping[str, int | float | str],
    force: bool,
    need_bytes: int,
) -> bool:
    """Make or enter a run folder and hold it until the process ends; True when it was a run folder before.

    One that was keeps its configuration until `write_config`.

    Raises ValueError, and leaves what is there as it is, when the path is a file or a folder of something else, another
    process is in it, its fingerprint differs (unless `force`), or fewer than `need_bytes` are free (NoSpace), those of
    its checkpoints and models counted, which make space for others.
    """
    _check_kind(run_dir)
    present = (path for folder in ("checkpoints", "model") for path in (run_dir / folder).rglob("*"))
    check_space(run_dir, need_bytes - sum(path.stat().st_size for path in present if path.is_file()))
    run_dir.mkdir(parents=True, exist_ok=True)
    _hold(run_dir)
    resumed = (run_dir / MARKER).exists()
    if resumed and not force:
        _check_same(run_dir, config_text, fingerprint)
    for name in FOLDERS[: 2 if resumed else 3]:  # checkpoints that are gone are missed when a run is resumed
        (run_dir / name).mkdir(exist_ok=True)
    if resumed:
        _clean_up_export(run_dir)
    else:
        write_config(run_dir, config_text, fingerprint, hparams)
    return resumed


def write_config(run_dir: Path, config_text: str, fingerprint: str, hparams: Mapping[str, int | float | str]) -> None:
    """Make the folder one of this configuration."""
    write_bytes(run_dir / "config.gin", config_text.encode())
    write_json(run_dir / MARKER, {"fingerprint": fingerprint, "hparams": hparams})


def _clean_up_export(run_dir: Path) -> None:
    """Undo what a process that was killed in `hf.export_model_folder` has left."""
    for path in run_dir.glob(".model-old-*"):
        if not (run_dir / "model").exists():
            path.rename(run_dir / "model")
    for path in run_dir.glob(".model-*-*"):
        shutil.rmtree(path, ignore_errors=True)


def _check_kind(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"got run folder {run_dir}, a file; expected a folder or a free name")
    names = sorted(p.name for p in run_dir.iterdir()) if run_dir.is_dir() else []
    # A process killed while it made the folder leaves some of these and no marker yet.
    ours = {LOCK, "config.gin", ".config.gin.tmp", f".{MARKER}.tmp", *FOLDERS}
    ours |= {name for name in names if name == "__pycache__" or name.startswith(USER_CODE)}
    if MARKER not in names and not ours.issuperset(names):
        raise ValueError(f"got run folder {run_dir} with {names[:5]}, expected an empty one or one with {MARKER}")


def _hold(run_dir: Path) -> None:
    path = (run_dir / LOCK).resolve()
    if path in _held:
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ValueError(
            f"got run folder {run_dir}, which process {holder} is working in; expected another one, or wait for it"
        ) from error
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    _held[path] = fd


def leave_run(run_dir: Path) -> None:
    """Let other processes into a run folder that this one holds, if it does."""
    if (fd := _held.pop((run_dir / LOCK).resolve(), None)) is not None:
        os.close(fd)


def keep_lock(run_dir: Path) -> None:
    """Lock the folder anew where run.lock was deleted while this process is in it.

    Raises ValueError when another process has entered it meanwhile.
    """
    path = (run_dir / LOCK).resolve()
    if path not in _held or (path.exists() and os.path.samestat(path.stat(), os.fstat(_held[path]))):
        return
    os.close(_held.pop(path))
    _hold(run_dir)


def check_run(run_dir: Path, *, config_text: str, fingerprint: str) -> None:
    """Raise ValueError for a folder of something else, or of a run of another configuration; changes nothing."""
    _check_kind(run_dir)
    if (run_dir / MARKER).exists():
        _check_same(run_dir, config_text, fingerprint)


def _check_same(run_dir: Path, config_text: str, fingerprint: str) -> None:
    try:
        recorded = json.loads((run_dir / MARKER).read_bytes())["fingerprint"]
        same = not {*recorded.split("/")}.isdisjoint(fingerprint.split("/"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"got {run_dir / MARKER} that names no fingerprint ({error!r}), expected a run's own: choose another "
            "--run_dir, or pass --force to go on in this one with the new configuration"
        ) from error
    if same:
        return
    path = run_dir / "config.gin"
    before = path.read_text().splitlines() if path.exists() else []
    diff = [*difflib.unified_diff(before, config_text.splitlines(), n=0, lineterm="")]
    changes = [line for line in diff[2:] if not line.startswith("@@")]  # the first two name the files
    shown = changes[:SHOWN] + ([f"... and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else [])
    names = {match[1] for line in changes if (match := re.match(r"[-+](\w+) = ", line))}
    readers = [line for line in config_text.splitlines() if {*re.findall(r"%(\w+)", line)} & names]
    if readers:
        shown += [f"read by: {', '.join(readers)}"]
    listing = "\n  ".join(shown or [f"the same text; fingerprint {recorded}, now {fingerprint}"])
    raise ValueError(
        f"got run folder {run_dir} of another configuration, expected the same one (- there, + now):\n  {listing}\n"
        "choose another --run_dir, or pass --force to go on in this one with the new configuration"
    )
