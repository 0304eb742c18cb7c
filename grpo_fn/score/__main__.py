"""python -m grpo_fn.score --reward math < rows.jsonl > scored.jsonl: a verdict for every row, without training.

Flags only; imports wait until they are understood, so --help is immediate.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code

MOST_WORKERS = 8  # by default: each takes its share of memory


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "grpo_fn.score",
        "Score a file of completions, one JSON object a line: `completion`, and `answer` or `tests` as "
        "the reward needs. Every row comes back as it was, with verdict, score, reason and seconds.",
    )
    parser.add_argument(
        "--reward",
        required=True,
        metavar="NAME",
        help="math, math_evaluated, lenient, code, share_of_tests, or a function of yours: module.function",
    )
    parser.add_argument(
        "--reward_param",
        action="append",
        default=[],
        dest="knobs",
        metavar="KNOB=VALUE",
        help="a knob of the reward, as a Python literal or @module.function; repeatable",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="rows to score (default: standard input)")
    parser.add_argument("--output", "--out", type=Path, metavar="FILE", help="a new file (default: standard output)")
    parser.add_argument(
        "--field_suffix",
        dest="suffix",
        default="",
        metavar="TEXT",
        help="put after the four names, for a second verdict beside the first",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(MOST_WORKERS, os.cpu_count() or 1),
        metavar="N",
        help="processes that score (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", dest="deadline", type=float, metavar="SECONDS", help="for one row (default: 5, code 30)"
    )
    parser.add_argument(
        "--memory_mb", type=int, default=1024, metavar="MB", help="for one worker (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Score and print a summary; returns the exit code. Bad input is 2 and one message, after the rows before it."""
    args = flags().parse_args(argv)
    return exit_code(lambda: score_rows(args), interrupted="interrupted; every row that was written is whole")


def score_rows(args: argparse.Namespace) -> int:
    """The exit code of the scoring. Raises ValueError or OSError for bad input."""
    from grpo_fn.score import scoring

    return scoring.score_file(**vars(args))  # a flag for each argument


if __name__ == "__main__":
    sys.exit(main())
