"""Compare evaluations of several models on the same problems: accuracies, differences, and what flipped, as markdown.

grpo_fn compare A B [C ...]

A, B, ... are folders that `python -m grpo_fn.eval` wrote, run folders (their newest evaluation) or .jsonl files of
either. The others are compared with A, problem by problem. The differences come with an exact McNemar test and a paired
bootstrap interval; with several runs the p-values are not corrected for there being several. Run folders whose knobs
differ in the seed alone are one setting: settings that share two seeds or more are compared over those, too.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.command_line import CommandParser, exit_code
from grpo_fn.lab.paired import mcnemar, paired_bootstrap, paired_cells, paired_difference
from grpo_fn.lab.trials import code_span, table_markdown

Key = tuple[str, str, int]  # prompt (or uid), answer, and which of those that are alike
Seeds = tuple[object, ...]  # the values of SEED_KNOBS


class ComparedRun(NamedTuple):
    """One evaluation: its rows by problem, in the order of the file."""

    name: str
    rows: dict[Key, dict[str, Any]]


class Flips(NamedTuple):
    """The difference of a run from the first one, on the problems that all runs have and could score."""

    gained: list[Key]  # wrong in the first one, right in this one
    lost: list[Key]
    low: float  # of the interval of the difference
    high: float
    p: float


def flags() -> CommandParser:
    """The command line."""
    parser = CommandParser("grpo_fn.lab.compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="two or more; the first is the baseline")
    parser.add_argument("--grader", metavar="NAME", help="whose score of 1 means right (default: the deciding grader)")
    parser.add_argument(
        "--match",
        choices=("prompt", "uid"),
        default="prompt",
        help="what makes two problems the same, besides the answer (default prompt)",
    )
    parser.add_argument("--intersection", action="store_true", help="compare on the problems that all runs have")
    parser.add_argument(
        "--max_rows", type=int, default=20, metavar="N", help="flipped problems listed a run (default 20)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    return exit_code(partial(compare, flags().parse_args(argv)), interrupted="interrupted")


def compare(args: argparse.Namespace) -> int:
    """Print the comparison as markdown. Raises ValueError or OSError for bad input."""
    if len(args.runs) < 2:
        raise ValueError(f"got {len(args.runs)} run, expected two or more")
    if args.max_rows < 0:
        raise ValueError(f"--max_rows: got {args.max_rows}, expected at least 0")
    runs = [read_evaluation(path, args.match) for path in args.runs]
    keys = common_problems(runs, args.intersection)
    verdicts = [{key: is_right(run, key, args.grader) for key in keys} for run in runs]
    scored = [key for key in keys if all(column[key] is not None for column in verdicts)]
    if not scored:
        raise ValueError(
            f"got {len(keys)} problems in common, none of which every run could score; expected at least one"
        )
    base, *others = [{key: bool(column[key]) for key in scored} for column in verdicts]
    flips = [count_flips(base, other) for other in others]
    absent = len(keys) - len(scored)
    left_out = f"; {absent} more left out, which some run could not score" if absent else ""
    sections = [f"{len(scored)} problems{left_out}", accuracy_table(runs, [base, *others], flips)]
    sections += seed_sections(args.runs, [sum(column.values()) / len(column) for column in (base, *others)])
    for run, changed in zip(runs[1:], flips, strict=True):
        sections += flip_sections(runs[0], run, changed, args.max_rows)
    print("\n\n".join(sections))
    return 0


def read_evaluation(path: Path, match: str) -> ComparedRun:
    """The newest evaluation there. Raises ValueError for a path without one and for rows that are none of ours."""
    from grpo_fn.shell.logging import rollout_store  # it loads torch

    file = path if path.is_file() else path / "samples.jsonl"  # of an evaluation's folder; or the newest of a run's
    if not file.is_file():
        steps = rollout_store.evaluation_steps(path / "eval")
        if not steps:
            raise ValueError(
                f"got {path}, expected a folder with samples.jsonl, a run folder with evaluations, or a .jsonl file"
            )
        file = path / "eval" / f"step_{steps[-1]}.jsonl"
    counts: Counter[tuple[str, str]] = Counter()
    rows: dict[Key, dict[str, Any]] = {}
    for number, row in enumerate(rollout_store.load_rows(file), start=1):
        if absent := [name for name in ("uid", "prompt", "answer", "scores", "text") if name not in row]:
            raise ValueError(f"{file}: got row {number} without {', '.join(absent)}, expected rows of an evaluation")
        alike = (str(row["uid"]) if match == "uid" else row["prompt"], row["answer"])
        rows[*alike, counts[alike]] = row
        counts[alike] += 1
    if not rows:
        raise ValueError(f"{file}: got no rows, expected those of an evaluation")
    return ComparedRun(str(path), rows)


def common_problems(runs: Sequence[ComparedRun], some: bool) -> list[Key]:
    """The problems of every run, in the order of the first. Raises ValueError when a run has others, unless `some`."""
    keys = [key for key in runs[0].rows if all(key in run.rows for run in runs)]
    sizes = [len(run.rows) for run in runs]
    if not keys or (max(sizes) > len(keys) and not some):
        have = ", ".join(f"{size} in {run.name}" for size, run in zip(sizes, runs, strict=True))
        raise ValueError(
            f"got different problems: {have}, of which {len(keys)} are in all of them; expected the same ones"
            + (", or --intersection to compare on those" if keys else ": is the prompt another one? (--match uid)")
        )
    return keys


def is_right(run: ComparedRun, key: Key, grader: str | None) -> bool | None:
    """Right, wrong, or None where it could not be scored. Raises ValueError for a grader that has no score there."""
    scores = run.rows[key]["scores"]
    if grader is not None and grader not in scores:
        raise ValueError(f"--grader: got {grader}, expected one that {run.name} has: {', '.join(scores)}")
    value = scores[grader] if grader is not None else next(iter(scores.values()))
    return None if value is None else value >= 1.0


def count_flips(base: dict[Key, bool], other: dict[Key, bool]) -> Flips:
    """The change of every problem from one run to the other."""
    gained = [key for key in base if other[key] and not base[key]]
    lost = [key for key in base if base[key] and not other[key]]
    counts = len(gained), len(lost)
    return Flips(gained, lost, *paired_bootstrap(*counts, len(base)), mcnemar(*counts))


def accuracy_table(runs: Sequence[ComparedRun], columns: Sequence[dict[Key, bool]], flips: Sequence[Flips]) -> str:
    """One line a run: accuracy, and how it differs from the first."""
    from grpo_fn.trainer.evaluation import wilson  # it loads torch

    rows = []
    for run, column, changed in zip(runs, columns, [None, *flips], strict=True):
        n, right = len(column), sum(column.values())
        low, high = wilson(right, n)
        row = {"run": run_label(run), "accuracy": f"{right / n:.3f}", "95 %": f"{low:.3f} to {high:.3f}"}
        if changed is not None:
            gained, lost = len(changed.gained), len(changed.lost)
            row |= {"difference": f"{(gained - lost) / n:+.3f}"}
            row |= {"95 %, paired": f"{changed.low:+.3f} to {changed.high:+.3f}"}
            row |= {"gained": str(gained), "lost": str(lost), "p": f"{changed.p:.3g}"}
        rows.append(row)
    return table_markdown(rows)


def seed_sections(paths: Sequence[Path], accuracies: Sequence[float]) -> list[str]:
    """Settings that share seeds with the first one, compared over those; nothing where there are none."""
    first, *others = runs_by_setting(paths, accuracies).values()
    rows = []
    for other in others:
        shared = [seed for seed in first if seed in other]
        if len(shared) < 2:
            continue
        paired = paired_difference([first[seed][1] for seed in shared], [other[seed][1] for seed in shared])
        names = (one_line(str(setting[shared[0]][0])) for setting in (first, other))
        rows.append({**dict(zip(("first setting, as in", "this, as in"), names, strict=True)), **paired_cells(paired)})
    note = (
        "Student's 95 % interval of the paired differences; worth is how many unpaired\n"
        "seeds a paired one is worth, (Var first + Var this) / Var difference."
    )
    return ["## Over shared seeds", note, table_markdown(rows)] if rows else []


def runs_by_setting(paths: Sequence[Path], accuracies: Sequence[float]) -> dict[str, dict[Seeds, tuple[Path, float]]]:
    """Setting -> seeds -> run and accuracy; what is no run folder is its own setting, without a seed."""
    from grpo_fn.shell.checkpoint.run_dir import MARKER, SEED_KNOBS
    from grpo_fn.shell.logging.metrics_writer import read_hparams

    settings: dict[str, dict[Seeds, tuple[Path, float]]] = {}
    for path, accuracy in zip(paths, accuracies, strict=True):
        knobs = read_hparams(path) if (path / MARKER).is_file() else {"path": str(path)}
        seeds = tuple(knobs.get(name) for name in SEED_KNOBS)
        setting = repr(sorted((name, value) for name, value in knobs.items() if name not in SEED_KNOBS))
        settings.setdefault(setting, {})[seeds] = (path, accuracy)
    return settings


def flip_sections(base: ComparedRun, other: ComparedRun, changed: Flips, count: int) -> list[str]:
    """The problems on which two runs disagree, `count` of them."""
    flips = [("gained", key) for key in changed.gained] + [("lost", key) for key in changed.lost]
    gained, lost = len(changed.gained), len(changed.lost)
    head = f"## {code_span(run_label(base))} to {code_span(run_label(other))}: {gained} gained, {lost} lost"
    rows = []
    for what, key in flips[:count]:
        before, after = base.rows[key], other.rows[key]
        texts = {"problem": before["prompt"], "truth": before["answer"], "first": answer_text(before)}
        texts["this"] = answer_text(after)
        rows.append({"": what, "uid": before["uid"], **{name: one_line(text) for name, text in texts.items()}})
    if not rows:
        return [head]
    more = [f"and {len(flips) - count} more (--max_rows {len(flips)})"] if len(flips) > count else []
    return [head, table_markdown(rows), *more]


def run_label(run: ComparedRun) -> str:
    """The run's path, or the end of it: that is where paths differ."""
    return one_line(run.name if len(run.name) <= 60 else f"…{run.name[-59:]}")


def answer_text(row: dict[str, Any]) -> str:
    """The answer that was marked, or the end of what was written."""
    return row.get("marked") or row["text"][-60:]


def one_line(text: str) -> str:
    """The printable text on one line, at most 80 characters of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f"{line[:79]}…" if len(line) > 80 else line


if __name__ == "__main__":
    sys.exit(main())
