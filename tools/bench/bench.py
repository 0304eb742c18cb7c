"""Benches on this machine: ratios of one run are what counts; absolute figures are of the machine and the hour.

    python tools/bench trl [--scale arithmetic,small] [--out experiments/bench/trl.md]
    python tools/bench growth [--completions 64,128,...] [--lengths 32,64,...]
    python tools/bench samplers --model MODEL
    python tools/bench rewards --data DIR

Each prints a page of markdown, or writes it with --out as well. `--help` after the name lists the flags of each.
"""

import argparse
import importlib
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo_fn.command_line import exit_code

T = TypeVar("T")

# Module and function, which are loaded when it is their turn, and what is measured.
BENCHES = {
    "trl": ("bench_trl:trl", "completions a second and peak memory against TRL's GRPOTrainer, program against program"),
    "growth": ("bench_growth:growth", "time per token of a step at growing numbers and lengths of completions"),
    "samplers": ("bench_samplers:samplers", "tokens a CPU second of the local sampler with each token sampler"),
    "rewards": ("bench_rewards:rewards", "verifications a second on published answers, beside plain math-verify"),
}


def flags() -> argparse.ArgumentParser:
    """The command line. Flags stand here, so that --help and usage errors do not wait for torch."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = parser.add_subparsers(dest="what", required=True)
    of = {}
    for name, (_, about) in BENCHES.items():
        of[name] = named.add_parser(name, allow_abbrev=False, description=about, help=about)
        of[name].add_argument("--out", type=Path, metavar="FILE", help="write the page there as well")
    for name, steps in (("trl", 10), ("growth", 3)):
        add = of[name].add_argument
        add("--steps", type=int, default=steps, help=f"measured steps of each, in all (default {steps})")
        add("--warm_up", type=int, default=2, help="steps before them, in every start (default 2)")
        add("--rounds", type=int, default=2, help="starts of each, in turn (default 2)")
        add("--threads", type=int, default=2, help="of each (default 2)")
        add("--timeout", type=float, default=3600.0, metavar="S", help="seconds for one start (default 3600)")
    of["trl"].add_argument("--scale", default="arithmetic,small", metavar="NAME,...", help="of bench_work.SCALES")
    of["trl"].add_argument("--trl_python", type=Path, metavar="PATH", help="with TRL (default: .venv-trl, made)")
    add = of["growth"].add_argument
    add("--scale", default="growth", metavar="NAME", help="of bench_work.SCALES (default growth)")
    add("--completions", default="64,128,256,512,1024", metavar="N,...", help="of the shortest length")
    add("--lengths", default="32,64,128,256", metavar="T,...", help="of the fewest completions")
    add = of["samplers"].add_argument
    add("--model", required=True, metavar="MODEL", help="a Hugging Face folder")
    add("--prompts", type=int, default=24, metavar="P", help="default 24")
    add("--group_size", type=int, default=16, metavar="G", help="default 16")
    add("--new_tokens", type=int, default=32, metavar="T", help="at most (default 32)")
    add("--repeats", type=int, default=7, metavar="R", help="default 7")
    add = of["rewards"].add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="with gsm8k/ and math/")
    add("--rows", type=int, default=1000, metavar="N", help="problems of each test set (default 1000)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the page and write it; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(partial(measure, flags().parse_args(argv), argv), interrupted="interrupted")


def measure(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the bench. Raises ValueError for flags that do not fit."""
    module, _, function = BENCHES[args.what][0].partition(":")
    bench: Callable[[argparse.Namespace], Iterable[str]] = getattr(importlib.import_module(module), function)
    page = "\n".join([f"`python tools/bench {shlex.join(argv)}`", "", machine(), "", *bench(args)]).rstrip() + "\n"
    print(page, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page)
    return 0


def machine() -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    where = ", ".join(cards) if cards else f"{os.cpu_count()} CPU cores, {platform.processor() or platform.machine()}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{where}; {versions}"


def in_turn(sides: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Every side's results; each round does all of them, so that what else the machine does meets each."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            results[name].append(side(number))
            print(f"{name}, {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return results


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
