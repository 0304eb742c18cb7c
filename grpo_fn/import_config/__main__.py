"""Turn the configuration of another trainer into a gin file, and list what it could not carry.

grpo_fn import grpo_math_1B.yaml > run.gin                  NeMo-RL: the YAML of a GRPO run
grpo_fn import trl.json --world 8 --rows 7473 > run.gin     TRL: the fields of a GRPOConfig

A TRL file is JSON, YAML, or Python: a dict literal, or a call GRPOConfig(...) of literals. --world is the number of
processes and --rows that of training rows, which TRL's own file does not hold. What means something else here, what was
left out and which keys are unknown is written to stderr and into the gin file as comments.
docs/migrating.md says the same in words. Exit codes: 0 done, 2 bad input.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fn.command_line import CommandParser, exit_code
from grpo_fn.import_config.from_nemo_rl import from_nemo_rl
from grpo_fn.import_config.from_trl import from_trl
from grpo_fn.import_config.peer_file import read_with_defaults


def kind_of(config: Mapping[str, Any]) -> str:
    """nemo_rl or trl, by the keys. Raises ValueError when they are neither's."""
    if {"actor_rollout_ref", "algorithm"} & config.keys():  # before NeMo-RL's: verl has a distillation.*, too
        raise ValueError(
            "got a configuration of verl, expected NeMo-RL's or TRL's; docs/migrating.md has the knobs by hand"
        )
    if any(isinstance(config.get(name), Mapping) for name in ("grpo", "distillation")):
        return "nemo_rl"
    known = {"learning_rate", "num_generations", "per_device_train_batch_size", "loss_type", "max_completion_length"}
    known |= {"teacher_model_name_or_path", "lmbda"}
    if known & config.keys():
        return "trl"
    got = ", ".join(sorted(map(str, config))[:8])
    raise ValueError(f"got the keys {got}, expected `grpo` and `policy` (NeMo-RL) or fields of a GRPOConfig (TRL)")


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.import_config", __doc__)
    parser.add_argument("config", type=Path, metavar="FILE", help="configuration of the other trainer")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="TRL: processes of the original (default 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="training rows, if the file counts epochs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the gin file (default: standard output)")
    parser.add_argument(
        "--quiet", action="store_true", help="print errors alone; the comments of the file have the rest"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the gin file; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(write_gin_file, args), interrupted="interrupted")


def write_gin_file(args: argparse.Namespace) -> int:
    """Write the gin file. Raises ValueError or OSError for bad input."""
    if args.world < 1 or (args.rows is not None and args.rows < 1):
        raise ValueError(f"got --world {args.world} --rows {args.rows}, expected numbers from 1")
    if args.out is not None and args.out.exists():
        raise ValueError(f"--out: got {args.out}, which exists; expected a free name")
    config = read_with_defaults(args.config)
    trl = kind_of(config) == "trl"
    draft = from_trl(config, args.world, args.rows) if trl else from_nemo_rl(config, args.rows)
    text = draft.text(args.config.name)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    if not args.quiet:
        print(*draft.note_lines(), sep="\n", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
