"""python -m grpo_fn.eval --model M: flags only. As in `run`, nothing in here can be bound by gin, and imports wait."""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from grpo_fn.command_line import CommandParser, exit_code, free_folder


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.eval", "Measure a model on the held-out problems that gin files name.")
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="a Hugging Face folder or hub name, a run folder, or DIR/checkpoints/step_N of one",
    )
    parser.add_gin_flags(
        files="gin file, of a training run or from gin/eval; repeat it to lay one over another (default: the "
        "configuration of the run that M belongs to)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results (default: evals/<model>-<time>)"
    )
    parser.add_quiet_flag("the folder of the results has them")
    return parser


def default_out(model: str, now: datetime) -> Path:
    """evals/<model>-<time>, a checkpoint by its run's name as well; -2, -3, ... where that is taken."""
    path = Path(model).resolve()
    name = f"{path.parent.parent.name}-{path.name}" if path.parent.name == "checkpoints" else path.name
    return free_folder(Path("evals") / f"{name}-{now:%Y%m%d-%H%M%S}")


def main(argv: Sequence[str] | None = None) -> int:
    """Load, check, launch; returns the exit code. Bad input is 2 and one message; anything else keeps its traceback."""
    args = flags().parse_args(argv)
    return exit_code(
        lambda: launch_evaluation(args), interrupted="interrupted; no results were written", quiet=args.quiet
    )


def launch_evaluation(args: argparse.Namespace) -> int:
    """The evaluation's exit code. Raises ValueError or OSError for bad input."""
    from grpo_fn.config import load_config

    files = args.gin_file
    if not files:
        from grpo_fn.trainer.model_source import run_of

        if (run := run_of(args.model)) is None:
            raise ValueError(
                f"--gin_file: got none, and {args.model} is no run folder and no checkpoint of one; expected a file"
            )
        files = [str(run / "config.gin")]
    config = load_config(files, args.gin_param, taker="grpo_fn.eval.measure.measure", check_paths=True)
    kwargs = config.kwargs()
    from grpo_fn.eval import measure

    out = args.out or default_out(args.model, datetime.now())
    return measure.measure(measure.EvalRequest(config, args.model, out), **kwargs)


if __name__ == "__main__":
    sys.exit(main())
