"""One page about one or several runs: a summary, the knobs that differ, warnings and samples.

grpo_fn report RUN [RUN ...] [--out report.html]

RUN is a run folder, finished or running. The page is one HTML file without scripts that opens without a network; curves
are in TensorBoard.
"""

import argparse
import fcntl
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.command_line import CommandParser, exit_code
from grpo_fn.core.display_text import markdown_cell
from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.core.problem import Turn, transcript
from grpo_fn.lab.html_page import escape_text, html_page, html_section, html_table
from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.checkpoint.run_dir import LOCK, MARKER
from grpo_fn.trainer import health

WARNINGS = 50  # of a run, the newest
SAMPLES = 4  # shown of a run's newest step
SHOWN = 1500  # characters of a prompt, a completion, or a turn or observation of an episode
STYLE = """<style>
body { max-width: 78rem; }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
td:has(.long) { overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .long { max-height: 14rem; overflow-y: auto; min-width: 16rem; }
</style>"""


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.lab.report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    parser.add_quiet_flag("--out has the page")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write; returns the exit code."""
    args = flags().parse_args(argv)
    return exit_code(partial(write_report, args), interrupted="interrupted", quiet=args.quiet)


def write_report(args: argparse.Namespace) -> int:
    """Read, write. Raises ValueError or OSError for bad input."""
    runs = [read_run(path, name) for path, name in zip(args.runs, distinct_names(args.runs), strict=True)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sections = [summary_section(runs), knob_section(runs), warning_section(runs), sample_section(runs)]
    page = html_page("Report on " + ", ".join(run.name for run in runs), [STYLE, *sections])
    write_bytes(args.out, page.encode("utf-8", "replace"))
    print(f"written to {args.out}")
    return 0


# -- run folders, as far as each has come


class ReportedRun(NamedTuple):
    """The content of a run folder, finished or not."""

    name: str
    rows: list[dict[str, float]]  # metrics.jsonl: NaN where it has null
    knobs: dict[str, int | float | str]
    summary: dict[str, Any] | None
    running: bool  # whether a process works in it
    warnings: list[str]  # the newest lines of log.txt that warn, with their time
    step: int | None  # whose samples these are
    samples: list[dict[str, Any]]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to distinguish them. Raises ValueError for one given twice."""
    whole = [path.resolve() for path in paths]
    if len({*whole}) < len(whole):
        raise ValueError(f"got {len(whole)} runs of which some are the same, expected each once")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len({*names}) == len(names):
            break
    return names


def read_run(path: Path, name: str) -> ReportedRun:
    """All there is in the folder. Raises ValueError for one that is no run's."""
    summary = path / "summary.json"
    if not (path / MARKER).is_file():
        raise ValueError(f"got {path} without {MARKER}, expected a run folder")
    log = path / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    step, rows = newest_samples(path / "rollouts")
    return ReportedRun(
        name=name,
        rows=metric_lines(path),
        knobs=json.loads((path / "run.json").read_bytes()).get("hparams", {}),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
        running=is_locked(path / LOCK),
        # `2026-01-31 12:00:00 health, kl_high: ...`, a rule that has ended the run, or a first step without a reward
        warnings=[line for line in lines if re.match(r"\S+ \S+ (health, |ended by |no sample of )", line)][-WARNINGS:],
        step=step,
        samples=extreme_samples(rows),
    )


def metric_lines(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl. A last line that is not whole is being written; another one raises ValueError."""
    return [health.history_line(step, row) for step, row in metrics_by_step(run_dir, torn_end=True).items()]


def is_locked(lock: Path) -> bool:
    """Whether a process works in the run's folder."""
    if not lock.is_file():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def newest_samples(root: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """The newest step whose samples are there, and its rows; the run may be deleting older ones."""
    from grpo_fn.shell.logging import rollout_store  # it loads torch

    for step in reversed(rollout_store.rollout_steps(root)):
        try:
            return step, rollout_store.load_rows(root / f"step_{step:06d}.jsonl.gz")
        except FileNotFoundError:
            continue
    return None, []


def extreme_samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the largest and the smallest advantages, half and half."""
    ranked = sorted(rows, key=lambda row: math.inf if row["advantage"] is None else -row["advantage"])
    return ranked[: SAMPLES // 2] + ranked[-(SAMPLES // 2) :] if len(ranked) > SAMPLES else ranked


def finite_points(run: ReportedRun, metric: str) -> list[tuple[float, float]]:
    """(step, value) of the finite values."""
    return [(row["step"], row[metric]) for row in run.rows if math.isfinite(row.get(metric, math.nan))]


# -- the page


def summary_section(runs: Sequence[ReportedRun]) -> str:
    """A row for each run: how far it is and its results."""
    rows = [{"run": run.name, **summary_cells(run)} for run in runs]
    note = (
        "Accuracy is that of greedy answers to held-out problems, before training and at the newest evaluation, with "
        "its 95 % interval. The rewards are means over the first and the last tenth of the steps. Hours are of work."
    )
    return html_section("Summary", note, html_table([*rows[0]], [[*map(escape_text, row.values())] for row in rows]))


def summary_cells(run: ReportedRun) -> dict[str, str]:
    """The figures of a run, as text; a dash for what is not known (yet)."""
    accuracies = finite_points(run, "eval/accuracy")
    ends = [finite_points(run, f"eval/accuracy_{end}")[-1:] for end in ("low", "high")]
    rewards = finite_points(run, "reward/mean")
    tenth = math.ceil(len(rewards) / 10)
    problems, done = finite_points(run, "eval/problems")[-1:], int(run.rows[-1]["step"]) if run.rows else 0
    ended = run.summary if run.summary is not None and run.summary.get("steps") == done else None
    state = "running" if run.running else "finished" if ended else f"stopped after step {done}"
    work = ended["wall_seconds"] if ended else math.fsum(value for _, value in finite_points(run, "time/total"))
    best = max(accuracies, key=lambda point: point[1], default=None)
    return {
        "state": state,
        "steps": f"{done} of {run.knobs.get('train.train.steps', '?')}",
        "ranks": str(ended["ranks"]) if ended and "ranks" in ended else "-",
        "seed": str(run.knobs.get("train.train.seed", "-")),
        "held-out before": digits_or_dash(accuracies[:1], 3),
        "after": digits_or_dash(accuracies[-1:] if len(accuracies) > 1 else [], 3),
        "95 %": f"{ends[0][0][1]:.3f} to {ends[1][0][1]:.3f}" if all(ends) else "-",
        "best": f"{best[1]:.3f} at step {best[0]:.0f}" if best else "-",
        "problems": digits_or_dash(problems, 0),
        "reward, first steps": f"{math.fsum(y for _, y in rewards[:tenth]) / tenth:.3f}" if rewards else "-",
        "last steps": f"{math.fsum(y for _, y in rewards[-tenth:]) / tenth:.3f}" if rewards else "-",
        "hours": f"{work / 3600:.2f}",
    }


def digits_or_dash(points: Sequence[tuple[float, float]], digits: int) -> str:
    """The value of the only point, or a dash."""
    return f"{points[0][1]:.{digits}f}" if points else "-"


def knob_section(runs: Sequence[ReportedRun]) -> str:
    """The knobs that are not alike in all runs; of one run, all of them."""
    names = sorted({name for run in runs for name in run.knobs})
    unlike = [name for name in names if len({repr(run.knobs.get(name)) for run in runs}) > 1]
    shown = unlike if len(runs) > 1 else names
    body = html_table(
        ["knob", *(run.name for run in runs)],
        [[escape_text(name), *(escape_text(str(run.knobs.get(name, "-"))) for run in runs)] for name in shown],
    )
    if len(runs) == 1:
        return html_section("Configuration", "", f"<details><summary>{len(names)} knobs</summary>{body}</details>")
    note = f"{len(unlike)} of {len(names)} knobs differ." if unlike else f"All {len(names)} knobs are alike."
    return html_section("Configuration", note, body if unlike else "")


def warning_section(runs: Sequence[ReportedRun]) -> str:
    """The findings of the health rules."""
    listed = [
        f"<h3>{escape_text(run.name)}</h3>"
        f"<ul>{''.join(f'<li>{markdown_cell(text)}</li>' for text in run.warnings)}</ul>"
        for run in runs
        if run.warnings
    ]
    quiet = [run.name for run in runs if not run.warnings]
    note = f"From log.txt, the newest {WARNINGS} of a run."
    note += f" None in {', '.join(quiet)}." if quiet else ""
    return html_section("Warnings", note, *listed)


def sample_section(runs: Sequence[ReportedRun]) -> str:
    """A few completions of each run's newest stored step."""
    parts = []
    for run in runs:
        rows = [
            [f'<div class="long">{markdown_cell(text)}</div>' for text in (shorten(row["prompt"]), written_text(row))]
            + [
                markdown_cell(shorten(str(row["answer"]))),
                *("-" if row[name] is None else f"{row[name]:+.3f}" for name in ("reward", "advantage")),
            ]
            for row in run.samples
        ]
        if rows:
            parts.append(f"<h3>{escape_text(run.name)}, step {run.step}</h3>")
            parts.append(html_table(["prompt", "completion", "answer", "reward", "advantage"], rows))
    note = "Of the newest stored step, the samples with the largest and the smallest advantages."
    return html_section("Samples", note, *parts)


def written_text(row: Mapping[str, Any]) -> str:
    """The text of a row: of an episode, every turn and observation; each may be shortened."""
    turns = [Turn(**turn) for turn in row.get("turns", ())]
    cut = [turn._replace(text=shorten(turn.text), observation=shorten(turn.observation)) for turn in turns]
    return transcript(shorten(row["text"]), cut)


def shorten(text: str) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN} more characters)"


if __name__ == "__main__":
    sys.exit(main())
