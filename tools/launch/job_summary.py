"""Writes job_<id>_<restart>.json into a run folder: what a job of a batch system was, how it ended and how far it came.

Without torch. The figures are of metrics.jsonl: steps, seconds a step, tokens a second, the last reward, the best
held-out accuracy. job_summary.txt in --job_dir says the same in lines. Where the run never came to make its folder (bad
input), the summary lies beside it: <run folder>.job_<id>_<restart>.json.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from grpo_fn.core.json_lines import step_lines  # noqa: E402
from grpo_fn.shell.atomic_io import write_bytes, write_json  # noqa: E402


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--job_dir", type=Path, required=True, help="folder of the job's output and job_summary.txt")
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
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    try:
        head, changes = git(["git", "rev-parse", "HEAD"]), git(["git", "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if changes.stdout else "")


def training_figures(run_dir: Path) -> dict[str, Any]:
    """How far a run has come, and how fast, by its metrics; empty if it has logged nothing.

    Seconds a step and steps an hour are means over all steps, tokens a second and reward are the last ones. Raises
    ValueError for a broken line.
    """
    rows = [line.row for line in step_lines(run_dir / "metrics.jsonl", torn_end=True)]
    if not rows:
        return {}
    figures = {"steps": rows[-1]["step"]}
    if seconds := [row["time/total"] for row in rows if row["step"] > 0 and "time/total" in row]:
        mean = sum(seconds) / len(seconds)
        figures |= {"seconds_a_step": round(mean, 3), "steps_an_hour": round(3600 / mean, 1)}
    for name, metric in (("tokens_a_second", "generation/tokens_per_second"), ("reward", "reward/mean")):
        figures |= {name: rows[-1][metric]} if metric in rows[-1] else {}
    measured = [(row["eval/accuracy"], row["step"]) for row in rows if "eval/accuracy" in row]
    if measured:
        figures["best_accuracy"], figures["best_step"] = max(measured, key=lambda pair: pair[0])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Write the summary; returns the exit code."""
    args = flags().parse_args(argv)
    try:
        training = training_figures(args.run_dir)
    except ValueError as error:  # the record of the job is written all the same
        training = {"error": str(error)}
    now = int(time.time())
    name = f"job_{args.job_id}_{args.restart}.json"
    inside = (args.run_dir / "run.json").exists()  # the trainer refuses a folder with files and without this one
    path = args.run_dir / name if inside else args.run_dir.with_name(f"{args.run_dir.name}.{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "job_id": args.job_id,
        "job_name": args.job_name,
        "nodes": args.nodes,
        "start": datetime.fromtimestamp(args.start, UTC).isoformat(),
        "end": datetime.fromtimestamp(now, UTC).isoformat(),
        "seconds": now - args.start,
        "exit_code": args.exit_code,
        "restarts": args.restart,
        "requeued": args.requeued == "yes",
        "command": args.command,
        "git_commit": commit(),
        "training": training,
    }
    write_json(path, summary)
    flat = {**summary, **summary.pop("training")}
    lines = [f"{name:<16}{' '.join(value) if isinstance(value, list) else value}" for name, value in flat.items()]
    args.job_dir.mkdir(parents=True, exist_ok=True)
    write_bytes(args.job_dir / "job_summary.txt", "".join(f"{line}\n" for line in lines).encode())
    print(f"exit code {args.exit_code}; {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
