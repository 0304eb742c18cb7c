"""Trackers: what TensorBoard shows of a run, once more in Weights & Biases or trackio.

A mirror is `(run_dir) -> context -> MirrorWrite`. Only the main rank opens it, so a run is one run there, however many
ranks share the work. W&B reads TensorBoard's events by its own sync, and is given nothing but tables, which are text
there; trackio has no sync (its `import_tf_events` reads a run that is over), so it is given figures as well.
"""

import importlib
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.logging.metrics_writer import Mirrored, MirrorWrite, read_hparams

Mirror = Callable[[Path], AbstractContextManager[MirrorWrite | None]]

OFFLINE, ONLINE = "offline", "online"


def none() -> Mirror:
    """No mirror.

    Returns:
        A context for a run folder that does nothing.
    """
    return lambda run_dir: nullcontext()


# -- Weights & Biases


def wandb(*, destination: str) -> Mirror:
    """Weights & Biases: scalars, histograms and tables of TensorBoard, under the same names, as one run.

    Offline, everything stays in RUN_DIR/wandb until `wandb sync RUN_DIR/wandb/offline-run-*`. A run that resumes goes
    on under its id (RUN_DIR/wandb/id); steps that it takes again are there twice, distinguished by `global_step`.

    Args:
        destination: project and mode, "PROJECT:offline" or "PROJECT:online"; ENTITY/PROJECT for a team's.

    Returns:
        The mirror: (run folder) -> context.

    Raises:
        ValueError: when the package is not there or `destination` is of another form.
    """
    project, mode = _destination("wandb", destination, "PROJECT:offline or PROJECT:online")
    if mode not in (OFFLINE, ONLINE):
        raise ValueError(f"tracker.wandb.destination: got {destination!r}, expected PROJECT:offline or PROJECT:online")
    _require("wandb")
    entity, _, name = project.rpartition("/")
    return partial(_wandb_run, entity=entity or None, project=name, mode=mode)


@contextmanager
def _wandb_run(run_dir: Path, *, entity: str | None, project: str, mode: str) -> Iterator[MirrorWrite]:
    package = importlib.import_module("wandb")

    def write(step: int, values: Mapping[str, Mirrored]) -> None:
        """Tables; figures and histograms come by way of TensorBoard's events."""
        for tag, rows in values.items():
            if isinstance(rows, Sequence):
                columns = list(dict.fromkeys(name for row in rows for name in row))
                cells = [[row.get(name) for name in columns] for row in rows]
                table = package.Table(columns=columns, data=cells, allow_mixed_types=True)
                opened.log({tag: table, "global_step": step})

    # Given the root, it opens the stream at once and keeps the names as they are; `init` alone waits to find it out.
    package.tensorboard.patch(root_logdir=str((run_dir / "tensorboard").absolute()), save=False)
    with ExitStack() as stack:
        stack.callback(package.tensorboard.unpatch)  # the next run of this process opens its own mirror, or none
        opened = package.init(
            entity=entity,
            project=project,
            mode=mode,
            id=run_id(run_dir, "wandb"),
            resume="allow",
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=read_hparams(run_dir),
            sync_tensorboard=True,
            settings=package.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        stack.push(lambda kind, *error: opened.finish(exit_code=int(kind is not None)))
        yield write


# -- trackio


def trackio(*, destination: str) -> Mirror:
    """trackio: scalars, histograms and tables of TensorBoard, under the same names, as one run of a project.

    Offline, everything goes to trackio's own folder on this machine (TRACKIO_DIR), where `trackio show` finds it. A run
    that resumes keeps its name (the run folder's and RUN_DIR/trackio/id); steps that it takes again are there
    twice.

    Args:
        destination: project and where it is kept: "PROJECT:offline", "PROJECT:USER/SPACE" for a Hugging Face Space,
            "PROJECT:http://HOST:PORT" for a trackio server.

    Returns:
        The mirror: (run folder) -> context.

    Raises:
        ValueError: when the package is not there or `destination` is of another form.
    """
    expected = "PROJECT:offline, PROJECT:USER/SPACE or PROJECT:http://HOST:PORT"
    project, place = _destination("trackio", destination, expected)
    if place == OFFLINE:
        target: dict[str, str] = {}
    elif place.startswith(("http://", "https://")):
        target = {"server_url": place}
    elif place.count("/") == 1 and all(place.split("/")):
        target = {"space_id": place}
    else:
        raise ValueError(f"tracker.trackio.destination: got {destination!r}, expected {expected}")
    _require("trackio")
    return partial(_trackio_run, project=project, target=target)


@contextmanager
def _trackio_run(run_dir: Path, *, project: str, target: Mapping[str, str]) -> Iterator[MirrorWrite]:
    package = importlib.import_module("trackio")

    def shown(value: Mirrored) -> Any:
        if isinstance(value, Tensor):
            return package.Histogram(value.numpy())
        return package.Table(data=[dict(row) for row in value]) if isinstance(value, Sequence) else float(value)

    name = f"{run_dir.resolve().name}-{run_id(run_dir, 'trackio')[:6]}"
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints where its dashboard is
        opened = package.init(
            project=project,
            name=name,
            resume="allow",
            config=read_hparams(run_dir),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **target,
        )
    try:
        yield lambda step, values: opened.log({name: shown(value) for name, value in values.items()}, step=step)
    finally:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            package.finish()


# -- what both need


def _destination(tracker: str, destination: str, expected: str) -> tuple[str, str]:
    """Project and place of a destination."""
    project, _, place = destination.partition(":")
    if not project.strip("/") or not place:
        raise ValueError(f"tracker.{tracker}.destination: got {destination!r}, expected {expected}")
    return project, place


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"got sections.Logging.mirror = @tracker.{package}() without the package {package}, expected it installed "
            f"(pip install 'grpo-fn[{package}]'), or @tracker.none()"
        )


def run_id(run_dir: Path, tracker: str) -> str:
    """The run's name there, drawn once and kept in its folder: a copied or repeated run gets another one."""
    path = run_dir / tracker / "id"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, secrets.token_hex(8).encode())
    return path.read_text(encoding="ascii")
