"""python -m grpo_fn.run --gin_file F: flags only.

Nothing in here can be bound by gin: under `python -m` this module exists twice, as `__main__` and under its own name,
and bindings to the one are lost on the other. Imports wait until the flags are understood, so --help is immediate.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from grpo_fn.command_line import (
    EXIT_BAD_INPUT,
    EXIT_ERROR,
    CommandParser,
    escape_control,
    exit_code,
    first_on_host,
    free_folder,
    launcher_command,
    program_name,
    run_words,
)


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.run", "Train as the gin files say: grpo_fn run run/gsm8k.gin --set MODEL=DIR")
    parser.add_gin_flags(
        files="gin file, from here or from the gin/ folder; repeat it to lay one over another, the last one wins",
        required=True,
    )
    parser.add_argument(
        "--run_dir",
        "--out",
        type=Path,
        metavar="DIR",
        help="run folder, resumed when it exists (default: runs/<file>-<time>)",
    )
    parser.add_argument("--dry_run", action="store_true", help="print what the run would be, load no weights, and exit")
    parser.add_argument(
        "--show_config", action="store_true", help="with --dry_run: also print the resolved configuration, every knob"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="with --dry_run: so many devices, without starting them"
    )
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="with --ranks: on so many hosts")
    parser.add_argument("--force", action="store_true", help="resume in a run folder that has another configuration")
    parser.add_quiet_flag("RUN/log.txt has the lines of the run")
    return parser


def default_run_dir(gin_file: str, now: datetime, launch: str | None) -> Path:
    """runs/<file>-<time>; a run.gin or config.gin goes by the name of its folder; -2, -3, ... where that is taken.

    Under torchrun the launch's id stands for the time: all ranks have to find the same folder, and a job that is
    started again its own.
    """
    path = Path(gin_file)
    name = path.resolve().parent.name if path.stem in ("run", "config") else path.stem
    if launch:
        return Path("runs") / f"{name}-{launch}"
    return free_folder(Path("runs") / f"{name}-{format(now, '%Y%m%d-%H%M%S')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Load, check, launch; returns the exit code. Bad input is 2 and one message; anything else keeps its traceback."""
    args = flags().parse_args(argv)
    refusal = ""
    if args.ranks < 1 or args.hosts < 1 or args.ranks % args.hosts:
        refusal = f"got --ranks {args.ranks} --hosts {args.hosts}, expected as many ranks on every host, at least one"
    elif args.ranks > 1 and not args.dry_run:
        refusal = (
            f"got --ranks {args.ranks}, expected --dry_run with it; "
            "to train on several devices: torchrun --nproc-per-node N -m grpo_fn.run"
        )
    elif args.show_config and not args.dry_run:
        refusal = (
            "got --show_config, expected --dry_run with it; the configuration of a run is in its folder, config.gin"
        )
    if refusal:
        flags().exit(EXIT_BAD_INPUT, f"error: {refusal}\n")
    launch, ready = os.environ.get("TORCHELASTIC_RUN_ID"), start_command(args)
    args.run_dir = args.run_dir or default_run_dir(args.gin_file[0], datetime.now(), launch)
    return exit_code(
        lambda: launch_training(args, ready),
        interrupted=f"interrupted; to resume from the newest checkpoint, or from the start: {command_again(args)}",
        quiet=args.quiet,
    )


def command_again(args: argparse.Namespace) -> str:
    """The command that resumes in the run folder, also where that was named by the time; with the launcher."""
    launcher = launcher_command(int(os.environ.get("WORLD_SIZE", 1)))
    return f"{launcher} {shlex.join([*run_words(args.gin_file, args.gin_param), '--run_dir', str(args.run_dir)])}"


def start_command(args: argparse.Namespace) -> str:
    """The command that starts what a dry run was about."""
    hosts = f"--nnodes {args.hosts} " if args.hosts > 1 else ""
    ranks = f"torchrun {hosts}--nproc-per-node {args.ranks // args.hosts} -m grpo_fn.run"
    words = [*run_words(args.gin_file, args.gin_param), *(("--run_dir", str(args.run_dir)) if args.run_dir else ())]
    return f"{program_name('grpo_fn.run') if args.ranks == 1 else ranks} {shlex.join(words)}"


def launch_training(args: argparse.Namespace, ready: str) -> int:
    """The run's exit code; an engine that is refused is one line. Raises ValueError or OSError for bad input.

    `ready` is the command with which a dry run ends.
    """
    if not args.dry_run and os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):  # a console that is gone ends no run
            print(f"reading {', '.join(args.gin_file)}", flush=True)
    from grpo_fn.config import load_config

    config = load_config(args.gin_file, args.gin_param, check_paths=True)
    kwargs = config.kwargs()
    from grpo_fn.train import EngineRefused, RunRequest, launch

    request = RunRequest(
        config=config,
        run_dir=args.run_dir,
        dry_run=args.dry_run,
        ranks=args.ranks,
        hosts=args.hosts,
        force=args.force,
    )
    try:
        code = launch(request, kwargs)
        if args.dry_run:
            print(*(["", config.text] if args.show_config else []), f"ready: {ready}", sep="\n", flush=True)
        return code
    except EngineRefused as error:  # where in the engine or the probe it was found out is no news to anyone
        if first_on_host(str(error)):
            notes = getattr(error, "__notes__", [])
            print(f"error: {escape_control('; '.join([str(error), *notes]))}", file=sys.stderr, flush=True)
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
