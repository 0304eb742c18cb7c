"""Make a small Qwen2 with its own tokenizer, as an ordinary Hugging Face folder. No network.

python tools/make_tiny_model.py --out DIR            the warm-started model of gin/run/arithmetic.gin
python tools/make_tiny_model.py --out DIR --random   random weights and a byte-level tokenizer, for trying a pipeline
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of the warm start's data (default 0)")
    warm = parser.add_argument_group("warm-started (without --random)")
    warm.add_argument(
        "--gin_file",
        default="run/arithmetic.gin",
        metavar="FILE",
        help="run file that holds the recipe as its MODEL (default run/arithmetic.gin)",
    )
    warm.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help="binding on top of it")
    rand = parser.add_argument_group("random (--random)")
    rand.add_argument("--random", action="store_true", help="random weights; every byte is a token")
    rand.add_argument("--chat_template", action="store_true", help="give the tokenizer Qwen2's turn format")
    for name, value, what in SIZES:
        rand.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default {value})")
    return parser


# Heads of 32: the smallest that vLLM takes. 2048 positions hold the longest GSM8K question in bytes, and its answer.
SIZES = (
    ("vocabulary", 259, "entries of the embedding, 259 or more: 256 bytes and three special tokens"),
    ("hidden", 64, "width"),
    ("layers", 2, "layers"),
    ("heads", 2, "attention heads"),
    ("kv_heads", 1, "key and value heads"),
    ("intermediate", 128, "width of the MLP"),
    ("positions", 2048, "longest sequence"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder; returns the exit code."""
    args = flags().parse_args(argv)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        if args.out.exists():
            raise ValueError(f"--out: got {args.out}, which exists; wanted a free name")
        if args.random:
            make_random(args)
        else:
            make_warm(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


def make_random(args: argparse.Namespace) -> None:
    """Random weights and a byte-level tokenizer."""
    from grpo_fn.shell.model import tiny_model

    shape = tiny_model.Shape(**{name: getattr(args, name) for name, _, _ in SIZES})
    tiny_model.make_random(shape, args.out, seed=args.seed, chat=args.chat_template)


def make_warm(args: argparse.Namespace) -> None:
    """The run file's recipe: made, or taken from its cache."""
    if args.chat_template:
        raise ValueError("--chat_template: got it without --random, wanted both or neither")
    from grpo_fn.config import load_config
    from grpo_fn.shell.model.tiny_model import Recipe

    recipe = load_config([args.gin_file], [*args.gin_param, f"SEED={args.seed}"]).kwargs()["model"]
    if not isinstance(recipe, Recipe):
        raise ValueError(f"--gin_file: got {args.gin_file} with the model {recipe!r}, wanted a recipe of a tiny model")
    shutil.copytree(recipe.folder(), args.out)


if __name__ == "__main__":
    sys.exit(main())
