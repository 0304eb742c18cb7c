"""The counterfactual lens: what every preset would have made of one stored step.

grpo_fn lens RUN --step 20                 seen with the run's newest weights
grpo_fn lens RUN --step 20 --policy NAME   with others: a model folder, or a checkpoint
grpo_fn lens RUN --step 20 --on_policy     as the policy that sampled it saw it: every ratio 1

Prints the figures and writes one HTML file (default RUN/lens/step_N.html) that opens without a network. With
--token_report FILE.html also every token of the run: signal, ratio, clip, KL, entropy (docs/monitoring/tensorboard.md).
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.lab.lens", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="a step whose rollout is stored")
    parser.add_argument("--policy", metavar="NAME", help="weights to look with (default: the run's newest)")
    parser.add_argument("--on_policy", action="store_true", help="look with the stored log-probs")
    parser.add_argument("--reference", metavar="NAME", help="reference model (default: none, every KL is to logp_old)")
    parser.add_argument("--token_report", type=Path, metavar="FILE", help="the run's own signal, token by token")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default RUN/lens/step_N.html")
    parser.add_quiet_flag("--out has the page")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags, print the figures, write the pages; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(show, args), interrupted="interrupted", quiet=args.quiet)


def show(args: argparse.Namespace) -> int:
    """Print and write. Raises ValueError or OSError for bad input."""
    from transformers.utils.logging import disable_progress_bar

    from grpo_fn.lab import presets
    from grpo_fn.shell.atomic_io import write_bytes

    disable_progress_bar()
    views = presets.view_step(
        args.run,
        args.step,
        policy=args.policy or str(args.run),
        on_policy=args.on_policy,
        reference=args.reference,
    )
    print(*presets.figure_lines(views), sep="\n")
    title = f"Step {args.step} of {args.run}"
    pages = {args.out or args.run / "lens" / f"step_{args.step}.html": presets.lens_page}
    if args.token_report is not None:
        pages[args.token_report] = presets.own_signal_page
    for path, page in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, page(views, title).encode())
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
