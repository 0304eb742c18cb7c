"""python -m grpo_fn.redteam --reward R --task T: the best score that a text gets that cannot know the answer.

Flags only; imports wait until they are understood, so --help is immediate.
"""

import argparse
import sys
from collections.abc import Sequence

from grpo_fn.command_line import CommandParser, exit_code


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser(
        "grpo_fn.redteam",
        "Attack a reward on a task with texts that are made without the answers, look for the best of them "
        "with a bandit on half of the held-out problems, and measure what it gets on the others.",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        dest="rewards",
        metavar="NAME",
        help="math, math_evaluated, lenient, code, share_of_tests, or a function: module.function; repeat it for a sum",
    )
    weight = "of each reward in the sum, in their order (default: 1)"
    parser.add_argument("--weight", action="append", type=float, default=[], dest="weights", metavar="W", help=weight)
    parser.add_argument(
        "--reward_param",
        action="append",
        default=[],
        dest="reward_knobs",
        metavar="KNOB=VALUE",
        help="a knob of each reward that has it, as a Python literal or @module.function; repeatable",
    )
    parser.add_argument("--task", metavar="NAME", help="arithmetic, gsm8k, math, mbpp, or a function: module.function")
    parser.add_argument(
        "--task_param",
        action="append",
        default=[],
        dest="task_knobs",
        metavar="KNOB=VALUE",
        help="a knob of the task, as for --reward_param; gsm8k, math and mbpp need data='DIR'",
    )
    parser.add_argument(
        "--problems", type=int, default=64, metavar="N", help="held-out problems, a share of all (default: %(default)s)"
    )
    parser.add_argument(
        "--pulls",
        type=int,
        default=100,
        metavar="N",
        help="of the bandit, after each text's first (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes that score (default: %(default)s); a run's are its own",
    )
    parser.add_gin_flags(files="attack the reward and the task of a run, instead of --reward and --task; repeatable")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Attack and print the scores; returns the exit code. Bad input is 2 and one message."""
    args = flags().parse_args(argv)
    return exit_code(lambda: attack_reward(args), interrupted="interrupted; nothing was found yet")


def attack_reward(args: argparse.Namespace) -> int:
    """The exit code of the attack. Raises ValueError or OSError for bad input."""
    named = {name: vars(args)[name] for name in ("rewards", "weights", "reward_knobs", "task", "task_knobs")}
    of_run = bool(args.gin_file or args.gin_param)
    if (of_run and any(named.values())) or (not of_run and not (args.rewards and args.task)):
        raise ValueError(
            "got neither --reward and --task nor --gin_file alone, expected either the two or the gin files"
        )
    if of_run:
        from grpo_fn.config import load_config

        config = load_config(args.gin_file, args.gin_param, taker="grpo_fn.lab.redteam.attack_run")
        from grpo_fn.lab import redteam

        campaign = redteam.attack_run(" + ".join(args.gin_file), args.problems, args.pulls, **config.kwargs())
    else:
        from grpo_fn.lab import redteam

        numbers = {"problems": args.problems, "pulls": args.pulls, "workers": args.workers}
        campaign = redteam.attack_named(**named, **numbers)
    print(redteam.report_attack(campaign))
    return 0


if __name__ == "__main__":
    sys.exit(main())
