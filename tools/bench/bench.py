"""Benches of whole steps: ratios of one run on this machine; absolute figures are of this machine and hour.

    python tools/bench trl [--scale arithmetic,small] [--out experiments/bench/trl.md]
    python tools/bench growth [--completions 64,128,...] [--lengths 32,64,...]
    python tools/bench turns [--turns 1,2,4,8] [--episodes 64]
    python tools/bench scaling [--ranks 1,2] [--scale scale/no_shard.gin] [--size small]
    python tools/bench checkpoint [--ranks 1] [--size small]

`trl`: completions per second and peak memory against TRL's GRPOTrainer, program against program. `growth`: how a step
grows with the number and the length of completions. `turns`: and with the turns of episodes. `scaling`: what more ranks
gain. `checkpoint`: what a save takes from a step. Prints markdown, or writes it with --out. `--help` after the name
lists the flags of each.
"""

import argparse
import importlib
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench_flags import add_growth_flags, add_rank_flags, add_trl_flags, add_turn_flags

from grpo_fn.command_line import exit_code

# Module and function, which are loaded when it is their turn; the flags; what is measured.
BENCHES = {
    "trl": ("bench_trl.trl", add_trl_flags, "completions a second and peak memory against TRL's GRPOTrainer"),
    "growth": ("bench_growth.growth", add_growth_flags, "time per step at growing numbers and lengths of completions"),
    "turns": ("bench_turns.turns", add_turn_flags, "time per step at growing numbers of turns of its episodes"),
    "scaling": ("bench_ranks.ranks", add_rank_flags, "what more ranks gain and cost"),
    "checkpoint": ("bench_ranks.ranks", add_rank_flags, "what a save takes from a step"),
}


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = parser.add_subparsers(dest="what", required=True)
    for name, (_, add_flags, about) in BENCHES.items():
        own = named.add_parser(name, allow_abbrev=False, description=about, help=about)
        add_flags(own)
        own.add_argument("--out", type=Path, metavar="FILE", help="write the markdown there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write it; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(measure, args, sys.argv[1:] if argv is None else argv), interrupted="interrupted")


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the bench. Raises ValueError for flags that do not fit."""
    module, _, function = BENCHES[args.what][0].partition(".")
    bench = getattr(importlib.import_module(module), function)
    document = "\n".join([*heading(argv), *bench(args)]) + "\n"
    print(document, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(document)
    return 0


def heading(argv: Sequence[str]) -> list[str]:
    """The command and the machine."""
    return [f"`python tools/bench {shlex.join(argv)}`", "", machine(), ""]


def machine() -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    where = ", ".join(cards) if cards else f"{os.cpu_count()} CPU cores, {platform.processor() or platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{where}; {versions}"
