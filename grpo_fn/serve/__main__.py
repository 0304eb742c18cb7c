"""python -m grpo_fn.serve --model M: flags only. As in `run`, nothing in here can be bound by gin, and imports wait."""

import argparse
import sys
from collections.abc import Sequence

from grpo_fn.command_line import add_gin_flags, add_version_flag, exit_code

OF_NO_RUN = "engine/serve.gin"  # the configuration of a model that belongs to no run


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m grpo_fn.serve",
        description="Serve a model with the local sampler behind an OpenAI-compatible endpoint: the tokens are those "
        "that python -m grpo_fn.eval samples for the same prompt, seed and knobs.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="a Hugging Face folder or hub name, a run folder, or DIR/checkpoints/step_N of one",
    )
    add_gin_flags(
        parser,
        files="gin file, of a training run or from gin/; repeat it to lay one over another (default: the configuration "
        f"of the run that M belongs to, or {OF_NO_RUN})",
    )
    parser.add_argument("--name", metavar="NAME", help="model name of requests (default: the last part of M)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen at; anyone who reaches it may ask (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--max_rows", type=int, default=64, metavar="N", help="completions decoded at once (default: %(default)s)"
    )
    parser.add_argument(
        "--max_tokens",
        type=int,
        metavar="N",
        help="most tokens of a completion (default: sections.Sampling.max_new_tokens)",
    )
    parser.add_argument(
        "--max_waiting",
        type=int,
        default=4096,
        metavar="N",
        help="completions and texts that may wait; more get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for a request, waiting included; then it gets status 504 (default: %(default)s)",
    )
    add_version_flag(parser)
    return parser


def serve_files(model: str) -> list[str]:
    """The gin files of a model where none is named: those of its run, or the one for a model of no run."""
    from grpo_fn.trainer.model_source import run_of

    run = run_of(model)
    return [OF_NO_RUN if run is None else str(run / "config.gin")]


def main(argv: Sequence[str] | None = None) -> int:
    """Load and serve; returns the exit code: 0 after SIGINT or SIGTERM, 2 and one message for bad input."""
    args = flags().parse_args(argv)
    return exit_code(lambda: launch_server(args), interrupted="interrupted before it served")


def launch_server(args: argparse.Namespace) -> int:
    """The server's exit code. Raises ValueError or OSError for bad input."""
    from grpo_fn.config import load_config

    files = args.gin_file or serve_files(args.model)
    kwargs = load_config(files, args.gin_param, taker="grpo_fn.serve.service.serve").kwargs()
    from grpo_fn.serve.service import ServeRequest, serve

    asked = {name: getattr(args, name) for name in ServeRequest._fields}
    return serve(ServeRequest(**asked), **kwargs)


if __name__ == "__main__":
    sys.exit(main())
