"""python -m grpo_fn.doctor: flags only. As in `run`, nothing in here can be bound by gin, and imports wait."""

import argparse
import json
import sys
from collections.abc import Sequence

from grpo_fn.command_line import EXIT_INTERRUPTED, add_gin_flags, add_version_flag

CODES = """\
exit codes:
  0  all well (an extra that nothing asks for may be absent)
  1  works, with warnings: something is untested, scarce or slow
  2  something wanted is missing, broken, or outside the range that grpo_fn allows; or bad flags
  130  interrupted
"""


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m grpo_fn.doctor",
        description="Look at this machine: versions against the tested ones, devices and their links, memory and "
        "limits, and whether a model folder opens in both engines. Says what to change. Changes nothing.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", metavar="FOLDER", help="a Hugging Face model folder to open")
    add_gin_flags(
        parser,
        files="gin file of a run, as for grpo_fn.run: what it asks for (vLLM, flash-attn, ...) must be here; "
        "repeatable",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="seconds that each part may take before it counts as hanging (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for scripts, instead of the table")
    add_version_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print the findings, and return the exit code."""
    args = flags().parse_args(argv)
    if not args.timeout > 0:
        flags().error(f"--timeout {args.timeout:g}: wanted a number of seconds above 0")
    if args.gin_param and not args.gin_file:
        flags().error("--gin_param: wanted --gin_file with it")
    from grpo_fn.doctor import examine, report

    question = examine.Question(
        model=args.model, gin_files=args.gin_file, gin_params=args.gin_param, deadline=args.timeout
    )
    try:
        found = examine.examine(question)
        print(json.dumps(report.findings_as_json(found)) if args.json else report.findings_table(found))
        return report.findings_exit_code(found)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
