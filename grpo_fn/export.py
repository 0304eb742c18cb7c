"""A checkpoint as an ordinary model folder: config, weights and tokenizer, as transformers and vLLM open them.

grpo_fn export RUN --out DIR                      of a run's newest checkpoint
grpo_fn export RUN/checkpoints/step_20 --out DIR  of a checkpoint, whatever number of ranks wrote it and how
grpo_fn export RUN --out DIR --adapter            of a run with LoRA: the adapters alone, as a PEFT folder

Adapters are merged into the weights of the model that the run started from, in that model's dtype; weights that were
trained whole are written as they were trained, in float32. Everything happens in one process on the CPU, in memory.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.export", __doc__)
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="run folder, or checkpoint in one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist yet")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, not merged")
    parser.add_quiet_flag("the folder is what the command makes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Find, check, write; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(export_checkpoint, args), interrupted="interrupted", quiet=args.quiet)


def export_checkpoint(args: argparse.Namespace) -> int:
    """Write the folder. Raises ValueError or OSError for bad input."""
    if args.out.exists():
        raise ValueError(f"--out: got {args.out}, which exists; expected a free name")
    from transformers.utils.logging import disable_progress_bar

    from grpo_fn.trainer.model_source import export_adapter, export_whole, locate, run_of

    disable_progress_bar()
    if run_of(args.source) is None:
        raise ValueError(f"got {args.source}, expected a run folder or a checkpoint in one")
    located = locate(args.source, warn=partial(print, file=sys.stderr), exported=False)
    (export_adapter if args.adapter else export_whole)(located, args.out)
    print(f"{located.path} written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
