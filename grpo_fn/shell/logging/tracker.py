"""The run's TensorBoard stream once more, elsewhere: `(run_dir) -> context`, entered before the events are opened.

Only the main rank opens it, so a run is one run there, however many ranks share the work.
"""

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.logging.tensorboard_layout import read_hparams

Mirror = Callable[[Path], AbstractContextManager[None]]

MODES = ("offline", "online")


def none() -> Mirror:
    """No mirror.

    Returns:
        A context for a run folder that does nothing.
    """
    return nullcontext


def wandb(*, project: str, mode: str) -> Mirror:
    """Weights & Biases: all that TensorBoard gets, under the same names, as the run RUN_DIR's name in `project`.

    Offline, everything stays in RUN_DIR/wandb until `wandb sync RUN_DIR/wandb/offline-run-*`. A run that resumes goes
    on under its id (RUN_DIR/wandb/id); steps that it takes again are there twice, distinguished by `global_step`.

    Args:
        project: project of the run in Weights & Biases.
        mode: "offline" or "online".

    Returns:
        The mirror: (run folder) -> context.

    Raises:
        ValueError: when the package is not there or `mode` is another.
    """
    if mode not in MODES:
        raise ValueError(f"tracker.wandb.mode: got {mode!r}, wanted one of {', '.join(MODES)}")
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "got sections.Logging.mirror = @tracker.wandb() without the package wandb, wanted it installed "
            "(pip install 'grpo-fn[wandb]'), or @tracker.none()"
        )
    return partial(_mirrored, project=project, mode=mode)


@contextmanager
def _mirrored(run_dir: Path, *, project: str, mode: str) -> Iterator[None]:
    package = importlib.import_module("wandb")
    # Given the root, it opens the stream at once and keeps the names as they are; `init` alone waits to find it out.
    package.tensorboard.patch(root_logdir=str((run_dir / "tensorboard").absolute()), save=False)
    with ExitStack() as stack:
        stack.callback(package.tensorboard.unpatch)  # the next run of this process opens a mirror of its own, or none
        opened = package.init(
            project=project,
            mode=mode,
            id=run_id(run_dir),
            resume="allow",
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=read_hparams(run_dir),
            sync_tensorboard=True,
            settings=package.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        stack.push(lambda kind, *error: opened.finish(exit_code=int(kind is not None)))
        yield


def run_id(run_dir: Path) -> str:
    """The run's name there, drawn once and kept in its folder: a copied or repeated run gets another one."""
    path = run_dir / "wandb" / "id"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, secrets.token_hex(8).encode())
    return path.read_text(encoding="ascii")
