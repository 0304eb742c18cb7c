"""python -m grpo_fn.replay RUN --step N: flags only. As in `run`, nothing in here can be bound by gin, and imports
wait."""

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "grpo_fn.replay",
        "Take a step of a run again and compare it, bit for bit, with what the run recorded. Nothing in "
        "the run folder is changed, and the run may still be at work.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    parser.add_argument(
        "--override",
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the step would have been under another knob, side by side; a gin file of changes will do, too; "
        "repeatable",
    )
    parser.add_argument(
        "--use_stored_rollout",
        dest="stored",
        action="store_true",
        help="learn from the tokens in RUN/rollouts instead of sampling them again",
    )
    parser.add_argument(
        "--token_report",
        dest="show",
        type=Path,
        metavar="FILE.html",
        help="write the step's learning signal, token by token, as a page",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check, launch; the exit code is 0 for the same, 1 for a difference, 2 for bad input."""
    args = flags().parse_args(argv)
    from grpo_fn.lab.replay import ReplayRequest, launch_replay

    return exit_code(lambda: launch_replay(ReplayRequest(**vars(args))), interrupted="interrupted; nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
