"""Benches of whole steps: ratios of one run on this machine; absolute figures are of this machine and hour.

    python tools/bench trl [--scale arithmetic,small] [--out experiments/bench/trl.md]
    python tools/bench growth [--completions 64,128,...] [--lengths 32,64,...]
    python tools/bench scaling [--ranks 1,2] [--scale scale/no_shard.gin] [--size small]
    python tools/bench checkpoint [--ranks 1] [--size small]

`trl`: completions per second and peak memory against TRL's GRPOTrainer, program against program. `growth`: how a step
grows with the number and the length of completions. `scaling`: what more ranks gain. `checkpoint`: what a save takes
from a step. Prints markdown, or writes it with --out. `--help` after the name lists the flags of each.
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_growth
import bench_ranks
import bench_trl
import torch
import transformers

BENCHES = {
    "trl": (bench_trl.trl, bench_trl.flags),
    "growth": (bench_growth.growth, bench_growth.flags),
    "scaling": (bench_ranks.ranks, bench_ranks.flags),
    "checkpoint": (bench_ranks.ranks, bench_ranks.flags),
}


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = parser.add_subparsers(dest="what", required=True)
    for name, (bench, add_flags) in BENCHES.items():
        about = (bench.__doc__ or "").splitlines()[0]
        own = named.add_parser(name, allow_abbrev=False, description=about, help=about)
        add_flags(own)
        own.add_argument("--out", type=Path, metavar="FILE", help="write the markdown there as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write it; returns the exit code."""
    args = flags().parse_args(argv)
    bench, _ = BENCHES[args.what]
    try:
        document = "\n".join([*heading(sys.argv[1:] if argv is None else argv), *bench(args)]) + "\n"
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    where = ", ".join(cards) if cards else f"{os.cpu_count()} CPU cores, {platform.processor() or platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{where}; {versions}"
