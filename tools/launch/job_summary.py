"""Writes job_<id>_<restart>.json into a run folder: what a job of a batch system was, and how it ended.

Without torch, and without a word about the job's own figures: those are in metrics.jsonl and summary.json. Where the
run never came to make its folder (bad input), the summary lies beside it: <run folder>.job_<id>_<restart>.json.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from grpo_fn.shell.atomic_io import write_json  # noqa: E402


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--job_id", required=True)
    parser.add_argument("--job_name", required=True)
    parser.add_argument("--restart", type=int, required=True, help="how often the job has been queued again")
    parser.add_argument("--nodes", nargs="+", required=True)
    parser.add_argument("--start", type=int, required=True, help="seconds since 1970")
    parser.add_argument("--exit_code", type=int, required=True)
    parser.add_argument("--requeued", choices=("yes", "no"), required=True)
    parser.add_argument("--command", nargs=argparse.REMAINDER, required=True, help="last: module and arguments")
    return parser


def commit() -> str | None:
    """The repository's commit, `+changes` when the working tree differs from it; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Write the summary; returns the exit code."""
    args = flags().parse_args(argv)
    now = int(time.time())
    name = f"job_{args.job_id}_{args.restart}.json"
    inside = (args.run_dir / "run.json").exists()  # the trainer refuses a folder with files and without this one
    path = args.run_dir / name if inside else args.run_dir.with_name(f"{args.run_dir.name}.{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "job_id": args.job_id,
        "job_name": args.job_name,
        "nodes": args.nodes,
        "start": _text(args.start),
        "end": _text(now),
        "seconds": now - args.start,
        "exit_code": args.exit_code,
        "restarts": args.restart,
        "requeued": args.requeued == "yes",
        "command": args.command,
        "git_commit": commit(),
    }
    write_json(path, summary)
    print(f"exit code {args.exit_code}; {path}", file=sys.stderr)
    return 0


def _text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
