"""Turn the configuration of another trainer into a gin file, and list what it could not carry.

python tools/import_config grpo_math_1B.yaml > run.gin                  NeMo-RL: the YAML of a GRPO run
python tools/import_config trl.json --world 8 --rows 7473 > run.gin     TRL: the fields of a GRPOConfig

A TRL file is JSON, YAML, or Python: a dict literal, or a call GRPOConfig(...) of literals. --world is the number of
processes and --rows that of training rows, which TRL's own file does not hold. What means something else here, what was
left out and which keys are unknown is written to stderr and into the gin file as comments.
docs/migrating/from_trl.md and docs/migrating/from_nemo_rl.md say the same in words. Exit codes: 0 done, 2 bad input.
"""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from import_draft import Draft
from import_nemo_rl import from_nemo_rl
from import_trl import from_trl
from nemo_rl_yaml import inherited


def read(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON, YAML or Python file. Raises ValueError naming what was got instead."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"got {path}, which cannot be read ({error}), wanted a configuration") from error
    config = parsed(text, path)
    if not isinstance(config, Mapping) or not config:
        raise ValueError(f"{path}: got {type(config).__name__}, wanted keys and values")
    return config


def parsed(text: str, path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".py":
            return python(text)
        try:
            import yaml
        except ImportError as error:
            raise ValueError(f"got {path} without PyYAML, wanted it (pip install pyyaml), or JSON") from error
        return yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{path}: got {error}, wanted JSON, YAML or Python literals") from error
    except Exception as error:  # YAML's own errors have no common ancestor but this
        raise ValueError(f"{path}: got {' '.join(str(error).split())[:200]}, wanted JSON or YAML") from error


def python(text: str) -> Any:
    """A dict literal, or the keywords of a call, alone or assigned to a name."""
    try:
        body = ast.parse(text).body
        value = next(node.value for node in reversed(body) if isinstance(node, ast.Expr | ast.Assign))
        if isinstance(value, ast.Call):
            return {word.arg: ast.literal_eval(word.value) for word in value.keywords}
        return ast.literal_eval(value)
    except (SyntaxError, StopIteration, RecursionError, TypeError) as error:
        raise ValueError(f"no literals ({error})") from error


def kind_of(config: Mapping[str, Any]) -> str:
    """nemo_rl or trl, by the keys. Raises ValueError when they are neither's."""
    if {"actor_rollout_ref", "algorithm"} & config.keys():  # before NeMo-RL's: verl has a distillation.*, too
        raise ValueError(
            "got a configuration of verl, wanted NeMo-RL's or TRL's; docs/migrating/from_verl.md has the knobs by hand"
        )
    if any(isinstance(config.get(name), Mapping) for name in ("grpo", "distillation")):
        return "nemo_rl"
    known = {"learning_rate", "num_generations", "per_device_train_batch_size", "loss_type", "max_completion_length"}
    known |= {"teacher_model_name_or_path", "lmbda"}
    if known & config.keys():
        return "trl"
    got = ", ".join(sorted(map(str, config))[:8])
    raise ValueError(f"got the keys {got}, wanted `grpo` and `policy` (NeMo-RL) or fields of a GRPOConfig (TRL)")


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--kind", choices=("nemo_rl", "trl"), help="whose it is (default: by its keys)")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="TRL: processes of the original (default 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="training rows, where the file counts epochs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the gin file (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the gin file; returns the exit code."""
    args = flags().parse_args(argv)
    try:
        if args.world < 1 or (args.rows is not None and args.rows < 1):
            raise ValueError(f"got --world {args.world} --rows {args.rows}, wanted numbers from 1")
        if args.out is not None and args.out.exists():
            raise ValueError(f"--out: got {args.out}, which exists; wanted a free name")
        config = inherited(args.config, read)
        kind = args.kind or kind_of(config)
        made: dict[str, Callable[[], Draft]] = {
            "nemo_rl": lambda: from_nemo_rl(config, args.rows),
            "trl": lambda: from_trl(config, args.world, args.rows),
        }
        draft = made[kind]()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = draft.text(args.config.name)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text, encoding="utf-8")
    print(*draft.listed(), sep="\n", file=sys.stderr)
    return 0
