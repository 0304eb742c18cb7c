"""Make a small Qwen2 with random weights and a byte-level tokenizer, as an ordinary Hugging Face folder. No network.

python tools/make_tiny_model.py --random --out DIR

A run of run/arithmetic.gin keeps the warm-started model that it makes under models.TinyModel.cache.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # experiments/ is no part of what is installed
# 2048 positions hold the longest GSM8K question in bytes, and its answer.
SIZES = (
    ("vocabulary", 259, "entries of the embedding, 259 or more: 256 bytes and three special tokens"),
    ("hidden", 64, "width"),
    ("layers", 2, "layers"),
    ("positions", 2048, "longest sequence"),
)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make; must not exist")
    parser.add_argument("--random", action="store_true", required=True, help="the weights are random")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--chat_template", action="store_true", help="give the tokenizer Qwen2's turn format")
    for name, value, meaning in SIZES:
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} (default {value})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder; returns the exit code."""
    args = flags().parse_args(argv)
    from transformers.utils.logging import disable_progress_bar

    from experiments.tiny import models

    disable_progress_bar()
    try:
        if args.out.exists():
            raise ValueError(f"--out: got {args.out}, which exists; expected a free name")
        chosen = {name: getattr(args, name) for name, _, _ in SIZES}
        # Two heads: of 32 at the default width, the smallest that vLLM takes.
        sizes = models.Sizes(**chosen, heads=2, kv_heads=1, intermediate=2 * args.hidden)
        models.make_random(sizes, args.out, seed=args.seed, chat=args.chat_template)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
