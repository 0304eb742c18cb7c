"""Make a small Qwen2 with its own tokenizer, as an ordinary Hugging Face folder. No network.

python tools/make_tiny_model.py --out DIR            the warm-started model of gin/run/arithmetic.gin
python tools/make_tiny_model.py --out DIR --random   random weights and a byte-level tokenizer, for trying a pipeline
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # experiments/ is no part of what is installed


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
        help="run file whose MODEL is the recipe (default run/arithmetic.gin)",
    )
    warm.add_argument("--gin_param", action="append", default=[], metavar="NAME=VALUE", help="binding on top of it")
    rand = parser.add_argument_group("random (--random)")
    rand.add_argument("--random", action="store_true", help="random weights; every byte is a token")
    rand.add_argument("--chat_template", action="store_true", help="give the tokenizer Qwen2's turn format")
    for name, value, meaning in SIZES:
        rand.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} (default {value})")
    return parser


# 2048 positions hold the longest GSM8K question in bytes, and its answer.
SIZES = (
    ("vocabulary", 259, "entries of the embedding, 259 or more: 256 bytes and three special tokens"),
    ("hidden", 64, "width"),
    ("layers", 2, "layers"),
    ("positions", 2048, "longest sequence"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder; returns the exit code."""
    args = flags().parse_args(argv)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        if args.out.exists():
            raise ValueError(f"--out: got {args.out}, which exists; expected a free name")
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
    from experiments.tiny import models

    chosen = {name: getattr(args, name) for name, _, _ in SIZES}
    # Two heads: of 32 at the default width, the smallest that vLLM takes.
    sizes = models.Sizes(**chosen, heads=2, kv_heads=1, intermediate=2 * args.hidden)
    models.make_random(sizes, args.out, seed=args.seed, chat=args.chat_template)


def make_warm(args: argparse.Namespace) -> None:
    """The run file's recipe: made, or taken from its cache."""
    if args.chat_template:
        raise ValueError("--chat_template: got it without --random, expected both or neither")
    from experiments.tiny.models import TinyModel
    from grpo_fn.config import load_config

    recipe = load_config([args.gin_file], [*args.gin_param, f"SEED={args.seed}"]).kwargs()["model"]
    if not isinstance(recipe, TinyModel):
        raise ValueError(f"--gin_file: got {args.gin_file} with the model {recipe!r}, expected a TinyModel")
    shutil.copytree(recipe.folder(), args.out)


if __name__ == "__main__":
    sys.exit(main())
