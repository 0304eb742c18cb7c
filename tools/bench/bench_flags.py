"""The flags of `tools/bench`, apart from the benches, so that --help and usage errors do not wait for torch."""

import argparse
from pathlib import Path

TRL_PYTHON = ".venv-trl"  # beside the project, made when --trl_python names none
TRL_SCALES = (
    "tiny",
    "arithmetic",
    "calculator_tiny",
    "calculator",
    "calculator_described",
    "calculator_card",
    "small",
)  # of bench_work
GROWTH_SIZES = ("tiny", "usual")  # of bench_growth.SIZES
RANK_SIZES = ("tiny", "small", "0.5b")  # of bench_rank.SIZES


def add_trl_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `trl`."""
    parser.add_argument("--scale", default="arithmetic,small", metavar="NAME,...", help=f"of {', '.join(TRL_SCALES)}")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each side, in all (default 10)")
    parser.add_argument("--warm_up", type=int, default=2, help="steps before them, in every start (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each side, in turn (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (default 2)")
    parser.add_argument("--trl_python", type=Path, metavar="PATH", help=f"with TRL in it (default: {TRL_PYTHON}, made)")
    parser.add_argument("--trl_generation", choices=["regular", "continuous"], default="regular")
    parser.add_argument("--trl_rows", type=int, default=0, metavar="N", help="a micro-batch of TRL's (default: all)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one start (default 3600)")


def add_growth_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `growth`."""
    parser.add_argument("--completions", default="64,128,256,512,1024", metavar="N,...", help="of the shortest length")
    parser.add_argument("--lengths", default="32,64,128,256", metavar="T,...", help="of the fewest completions")
    parser.add_argument("--size", choices=GROWTH_SIZES, default="usual")
    parser.add_argument("--steps", type=int, default=3, help="measured steps a point, after one to warm up (default 3)")


def add_turn_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `turns`."""
    parser.add_argument("--turns", default="1,2,4,8", metavar="N,...", help="of an episode (default 1,2,4,8)")
    parser.add_argument("--episodes", type=int, default=64, help="of a step, a multiple of 8 (default 64)")
    parser.add_argument("--size", choices=GROWTH_SIZES, default="usual")
    parser.add_argument("--steps", type=int, default=3, help="measured steps a point, after one to warm up (default 3)")


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `scaling` and `checkpoint`."""
    parser.add_argument("--ranks", default=None, metavar="N,...", help="numbers of ranks (default: 1,2; checkpoint: 1)")
    parser.add_argument("--scale", default="scale/no_shard.gin", metavar="FILE", help="laid over base.gin")
    parser.add_argument("--size", choices=RANK_SIZES, default="small")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one to warm up (default 5)")
