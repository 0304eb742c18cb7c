"""Make a small Qwen2 with random weights and a byte-level tokenizer, as an ordinary Hugging Face folder. No network.

grpo_fn tiny-model --out DIR
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code

# 2048 positions hold the longest GSM8K question in bytes, and its answer.
SIZES = (
    ("vocabulary", 259, "entries of the embedding, 259 or more: 256 bytes and three special tokens"),
    ("hidden", 64, "width"),
    ("layers", 2, "layers"),
    ("positions", 2048, "longest sequence"),
)


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.tiny_model", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--chat_template", action="store_true", help="give the tokenizer Qwen2's turn format")
    for name, value, meaning in SIZES:
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} (default {value})")
    parser.add_quiet_flag("the folder is what the command makes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(write_tiny_model, args), interrupted="interrupted", quiet=args.quiet)


def write_tiny_model(args: argparse.Namespace) -> int:
    """Make the folder. Raises ValueError or OSError for bad input."""
    if args.out.exists():
        raise ValueError(f"--out: got {args.out}, which exists; expected a free name")
    from transformers.utils.logging import disable_progress_bar

    from grpo_fn.shell.model import tiny

    disable_progress_bar()
    chosen = {name: getattr(args, name) for name, _, _ in SIZES}
    # Two heads: of 32 at the default width, the smallest that vLLM takes.
    sizes = tiny.Qwen2Sizes(**chosen, heads=2, kv_heads=1, intermediate=2 * args.hidden)
    tiny.make_random(sizes, args.out, seed=args.seed, chat=args.chat_template)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
