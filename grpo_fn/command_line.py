"""The commands, the flags that they share, and how bad input and Ctrl-C end them.

It imports the standard library and `core`: --help is immediate, and the doctor starts where gin or torch
is broken.
"""

import argparse
import errno
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from grpo_fn.core.display_text import escape_control, suggest_name
from grpo_fn.core.partials import FunctionMisfit

EXIT_ERROR, EXIT_BAD_INPUT, EXIT_FULL, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 74, 130, 143  # 74: EX_IOERR
FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries that warn while transformers imports them, before the first line of a command.
QUIET = ("torchao", "torch.utils._pytree")
ERRORS = "GRPO_FN_ERRORS"  # environment variable with a folder of the launch: a file for each error that was printed
BINDINGS = "binding on top of the files: a macro (STEPS=10) or a knob (train.train.steps=10); repeatable"


class Command(NamedTuple):
    """A word after `grpo_fn`, and the module whose `flags` and `main` it is."""

    word: str
    module: str
    summary: str


COMMANDS = {
    "train": (
        Command("run", "grpo_fn.run", "train as gin files say, or resume a run"),
        Command("tiny-model", "grpo_fn.tiny_model", "make a small random model, to try a pipeline without a download"),
        Command("import", "grpo_fn.import_config", "turn a configuration of TRL or NeMo-RL into a gin file"),
        Command("doctor", "grpo_fn.doctor", "see whether this machine is ready"),
    ),
    "measure": (
        Command("eval", "grpo_fn.eval", "measure a model on held-out problems"),
        Command("score", "grpo_fn.score", "score a file of completions"),
        Command("redteam", "grpo_fn.redteam", "find what a reward pays to a text without the answer"),
    ),
    "look at runs": (
        Command("report", "grpo_fn.lab.report", "write one page about one or several runs"),
        Command("compare", "grpo_fn.lab.compare", "compare evaluations problem by problem"),
        Command("replay", "grpo_fn.replay", "take a step of a run again, or under another knob"),
        Command("lens", "grpo_fn.lab.lens", "show what every preset would have made of a step"),
        Command("export", "grpo_fn.export", "write a checkpoint as a model folder"),
    ),
    "run many": (
        Command("pair", "grpo_fn.lab.pair", "compare configurations on the same problems and random numbers"),
        Command("sweep", "grpo_fn.lab.sweep", "search over values of knobs"),
    ),
}


class CommandParser(argparse.ArgumentParser):
    """The flags of one command: the same words mean the same in all of them, and bad input is one line.

    A dash in a flag is an underscore (--dry-run), no flag can be shortened, and gin files that stand without
    --gin_file are laid over those that stand with it. `--version` is there always.
    """

    def __init__(self, module: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            allow_abbrev=False,
            prog=program_name(module),
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.needs_gin_file = False
        self.add_argument("--version", action="version", version=package_version())

    def add_gin_flags(
        self, *, files: str, params: str = BINDINGS, required: bool = False, positional: bool = True
    ) -> None:
        """--gin_file and --gin_param, each a list; `files` and `params` are their help."""
        self.needs_gin_file = required
        if positional:
            self.add_argument("bare_gin_file", nargs="*", metavar="FILE.gin", help="the same as --gin_file FILE.gin")
        self.add_argument("--gin_file", action="append", default=[], metavar="FILE", help=files)
        self.add_argument("--gin_param", "--set", action="append", default=[], metavar="NAME=VALUE", help=params)

    def add_quiet_flag(self, what: str) -> None:
        """--quiet, of a command that leaves what it has to say in files: `what` and where."""
        self.add_argument("--quiet", action="store_true", help=f"print errors alone; {what}")

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """The flags, in any order with gin files between them."""
        words = [self.spelled_flag(word) for word in (sys.argv[1:] if args is None else args)]
        parsed = self.parse_intermixed_args(words, namespace)
        if hasattr(parsed, "bare_gin_file"):
            parsed.gin_file = [*parsed.gin_file, *vars(parsed).pop("bare_gin_file")]
        if self.needs_gin_file and not parsed.gin_file:
            self.error("got no gin file, expected one, such as run/gsm8k.gin")
        return parsed

    def spelled_flag(self, word: str) -> str:
        """The flag with underscores for its dashes, if there is such a flag; any other word as it is."""
        name, equals, value = word.partition("=")
        flag = f"--{name[2:].replace('-', '_')}"
        return f"{flag}{equals}{value}" if word.startswith("--") and flag in self._option_string_actions else word

    def error(self, message: str) -> NoReturn:
        """One line, with the flag that was probably meant; exit code 2."""
        unknown = re.match(r"unrecognized arguments: (--\w+)", message)
        hint = suggest_name(unknown[1], self._option_string_actions) if unknown else ""
        self.exit(EXIT_BAD_INPUT, f"error: {message}{hint or f'; {self.prog} --help lists the flags'}\n")


def program_name(module: str) -> str:
    """What a user types for a module's command: `grpo_fn WORD` if this process was started so; a tool's path."""
    started = Path(sys.argv[0])
    one_command = started.stem == "grpo_fn" or (started.parent.name, started.name) == ("grpo_fn", "__main__.py")
    word = next((each.word for group in COMMANDS.values() for each in group if each.module == module), "")
    if one_command and word:
        return f"grpo_fn {word}"
    return f"python {module}" if module.endswith(".py") else f"python -m {module}"


def installed_script(script: str, module: str) -> str:
    """The script's name if the shell finds it, else how this Python runs its module."""
    if shutil.which(script) is not None:
        return script
    python = Path(sys.executable)
    here = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{here} -m {module}"


def package_version() -> str:
    """What --version prints."""
    try:
        return f"grpo_fn {version('grpo-fn')}"
    except PackageNotFoundError:
        return "grpo_fn, not installed as a package"


def launcher_command(ranks: int) -> str:
    """What starts a run on so many ranks of all hosts: the command that the user typed, or this launch's `torchrun`."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    hosts = f"--nnodes {ranks // here} " if ranks > here else ""
    return program_name("grpo_fn.run") if ranks == 1 else f"torchrun {hosts}--nproc-per-node {here} -m grpo_fn.run"


def resume_command(run_dir: Path, ranks: int) -> str:
    """The command that resumes a run, whatever it was started with: its folder holds the configuration."""
    words = [*run_words([str(run_dir / "config.gin")], []), "--run_dir", str(run_dir)]
    return f"{launcher_command(ranks)} {shlex.join(words)}"


def run_words(gin_files: Sequence[str], gin_params: Sequence[str]) -> list[str]:
    """Gin files and bindings as words of `grpo_fn run`."""
    return [*gin_files, *(word for param in gin_params for word in ("--set", param))]


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


def quiet_libraries() -> None:
    """Have libraries keep to themselves what they warn of while they are imported."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def bad_input(error: ValueError | OSError) -> tuple[int, str] | None:
    """The exit code and the line for an error that is bad input or a full disk; None for one that keeps its traceback.

    An error with notes is no bad input: they are put on what is raised once work has begun. A disk that is full by then
    is one line with the notes all the same, and so is a function that does not fit its knob.
    """
    full, notes = getattr(error, "errno", None) in FULL, getattr(error, "__notes__", [])
    if notes and not full and not isinstance(error, FunctionMisfit):
        return None
    return EXIT_FULL if full else EXIT_BAD_INPUT, "; ".join([str(error), *notes])


def exit_code(work: Callable[[], int], *, interrupted: str, quiet: bool = False) -> int:
    """What `work` returns; 2 and one line for bad input, 74 for a full disk, 130 or 143 and `interrupted` for a signal.

    SIGINT (Ctrl-C) is 130 and SIGTERM 143; training notes both and saves instead, once it has begun. An error that is
    no `bad_input` keeps its traceback. `quiet` drops what this process prints on standard output.
    """
    quiet_libraries()
    try:
        with sigterm_interrupts(), silenced_output() if quiet else nullcontext():
            return work()
    except (ValueError, OSError) as error:
        if (refusal := bad_input(error)) is None:
            raise
        code, text = refusal
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        if first_on_host(text):
            print(f"{who}error: {escape_control(text)}", file=sys.stderr)
        return code
    except KeyboardInterrupt as signalled:
        print(interrupted, file=sys.stderr)
        return EXIT_TERMINATED if isinstance(signalled, Terminated) else EXIT_INTERRUPTED


@contextmanager
def silenced_output() -> Iterator[None]:
    """While entered, what Python prints on standard output goes nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        yield


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
