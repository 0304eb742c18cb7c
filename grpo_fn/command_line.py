"""What the commands share: the flags for gin files, and how bad input and Ctrl-C end a command.

It imports the standard library and `core.display_text`: --help is immediate, and the doctor starts where gin or torch
is broken.
"""

import argparse
import errno
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from types import FrameType

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.partials import FunctionMisfit

EXIT_ERROR, EXIT_BAD_INPUT, EXIT_FULL, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 74, 130, 143  # 74: EX_IOERR
FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries that warn while transformers imports them, before the first line of a command.
QUIET = ("torchao", "torch.utils._pytree")
ERRORS = "GRPO_FN_ERRORS"  # environment variable with a folder of the launch: a file for each error that was printed
BINDINGS = "binding on top of the files; repeatable"


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser of `python -m COMMAND`, whose help shows the description as it stands; no flag can be shortened."""
    return argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_gin_flags(
    parser: argparse.ArgumentParser, *, files: str, params: str = BINDINGS, required: bool = False
) -> None:
    """--gin_file and --gin_param, each a list; `files` and `params` are their help."""
    parser.add_argument(
        "--gin_file", action="append", required=required, default=None if required else [], metavar="FILE", help=files
    )
    parser.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help=params)


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """--version."""
    try:
        text = f"grpo_fn {version('grpo-fn')}"
    except PackageNotFoundError:
        text = "grpo_fn, not installed as a package"
    parser.add_argument("--version", action="version", version=text)


def launcher_command(ranks: int) -> str:
    """The start of a command on so many ranks of all hosts: `python`, or `torchrun` with this launch's."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    hosts = f"--nnodes {ranks // here} " if ranks > here else ""
    return "python" if ranks == 1 else f"torchrun {hosts}--nproc-per-node {here}"


def resume_command(run_dir: Path, ranks: int) -> str:
    """The command that resumes a run, whatever it was started with: its folder holds the configuration."""
    words = ["--gin_file", str(run_dir / "config.gin"), "--run_dir", str(run_dir)]
    return f"{launcher_command(ranks)} -m grpo_fn.run {shlex.join(words)}"


def free_folder(first: Path) -> Path:
    """The path, or with -2, -3, ... behind it where that is taken: two commands may begin in one second."""
    later = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], later) if not folder.exists())


def first_on_host(text: str) -> bool:
    """Whether no other rank of this host has printed this error in this attempt; True outside of tools/launch."""
    folder = os.environ.get(ERRORS)
    if folder is None:
        return True
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {text}"
    try:
        os.close(os.open(Path(folder) / sha256(attempt.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # the folder is gone: an error that is printed twice is better than one that is not
        return True
    return True


def exit_code(work: Callable[[], int], *, interrupted: str) -> int:
    """What `work` returns; 2 and one line for bad input, 74 for a full disk, 130 or 143 and `interrupted` for a signal.

    SIGINT (Ctrl-C) is 130 and SIGTERM 143; training notes both and saves instead, once it has begun. An error with
    notes is no bad input: they are put on what is raised once work has begun, and it keeps its traceback; a disk that
    is full by then is one line with the notes all the same, and so is a function that does not fit its knob.
    """
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with sigterm_interrupts():
            return work()
    except (ValueError, OSError) as error:
        full, notes = getattr(error, "errno", None) in FULL, getattr(error, "__notes__", [])
        if notes and not full and not isinstance(error, FunctionMisfit):
            raise
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        text = "; ".join([str(error), *notes])
        if first_on_host(text):
            print(f"{who}error: {escape_control(text)}", file=sys.stderr)
        return EXIT_FULL if full else EXIT_BAD_INPUT
    except KeyboardInterrupt as signalled:
        print(interrupted, file=sys.stderr)
        return EXIT_TERMINATED if isinstance(signalled, Terminated) else EXIT_INTERRUPTED


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While entered, SIGTERM raises Terminated, so that the message of Ctrl-C is printed and what is open is closed.

    A rank that torchrun has started dies of it: it may be waiting for others where Python does not see signals, and
    torchrun would wait for it in turn. A process that has a handler keeps it, and outside of the main thread
    none can be set.
    """
    alone = "TORCHELASTIC_RUN_ID" not in os.environ and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
