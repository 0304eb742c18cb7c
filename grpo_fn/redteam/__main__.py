"""python -m grpo_fn.redteam --reward R --task T: the best score that a text gets that cannot know the answer.

Flags only; imports wait until they are understood, so --help is immediate.
"""

import argparse
import sys
from collections.abc import Sequence

from grpo_fn.command_line import add_version_flag, exit_code


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m grpo_fn.redteam",
        description="Attack a reward on a task with texts that are made without the answers, look for the best of them "
        "with a bandit on half of the held-out problems, and measure what it gets on the others.",
    )
    parser.add_argument(
        "--reward",
        action="append",
        required=True,
        dest="rewards",
        metavar="NAME",
        help="math, math_evaluated, lenient, code, share_of_tests, or a function: module.function; repeat it for a sum",
    )
    parser.add_argument(
        "--weight",
        action="append",
        type=float,
        default=[],
        dest="weights",
        metavar="W",
        help="of each reward in the sum, in their order (default: 1)",
    )
    parser.add_argument(
        "--reward_param",
        action="append",
        default=[],
        dest="reward_knobs",
        metavar="KNOB=VALUE",
        help="a knob of each reward that has it, as a Python literal or @module.function; repeatable",
    )
    parser.add_argument(
        "--task", required=True, metavar="NAME", help="arithmetic, gsm8k, math, mbpp, or a function: module.function"
    )
    parser.add_argument(
        "--task_param",
        action="append",
        default=[],
        dest="task_knobs",
        metavar="KNOB=VALUE",
        help="a knob of the task, as for --reward_param; gsm8k, math and mbpp need data='DIR'",
    )
    parser.add_argument(
        "--problems", type=int, default=64, metavar="N", help="held-out problems, the first ones (default: %(default)s)"
    )
    parser.add_argument(
        "--pulls",
        type=int,
        default=100,
        metavar="N",
        help="of the bandit, after each text's first (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="processes that score (default: %(default)s)"
    )
    add_version_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Attack and print the scores; returns the exit code. Bad input is 2 and one message."""
    args = flags().parse_args(argv)
    return exit_code(lambda: attack_reward(args), interrupted="interrupted; nothing was found yet")


def attack_reward(args: argparse.Namespace) -> int:
    """The exit code of the attack. Raises ValueError or OSError for bad input."""
    from grpo_fn.redteam import campaign

    print(campaign.report_attack(campaign.attack_named(**vars(args))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
