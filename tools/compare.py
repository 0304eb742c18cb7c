"""Compare evaluations of several models on the same problems: accuracies, differences, and what flipped, as markdown.

python tools/compare.py A B [C ...]

A, B, ... are folders that `python -m grpo_fn.eval` wrote, run folders (their newest evaluation) or .jsonl files of
either. The others are compared with A, problem by problem. The differences come with an exact McNemar test and a paired
bootstrap interval; with several runs the p-values are not corrected for there being several. Run folders whose knobs
differ in the seed alone are one setting: settings that share two seeds or more are compared over those, too.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Key = tuple[str, str, int]  # prompt (or uid), answer, and which of those that are alike


class Run(NamedTuple):
    """One evaluation: its rows by problem, in the order of the file."""

    name: str
    rows: dict[Key, dict[str, Any]]


class Change(NamedTuple):
    """How a run differs from the first one, on the problems that all of them have and could score."""

    gained: list[Key]  # wrong in the first one, right in this one
    lost: list[Key]
    low: float  # of the interval of the difference
    high: float
    p: float


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    args = flags().parse_args(argv)
    try:
        print("\n".join(compared(args)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compared(args: argparse.Namespace) -> list[str]:
    """The whole comparison as lines of markdown."""
    if len(args.runs) < 2:
        raise ValueError(f"got {len(args.runs)} run, wanted two or more")
    if args.max_rows < 0:
        raise ValueError(f"--max_rows: got {args.max_rows}, wanted at least 0")
    runs = [read(path, args.match) for path in args.runs]
    keys = common(runs, args.intersection)
    verdicts = [{key: verdict(run, key, args.grader) for key in keys} for run in runs]
    scored = [key for key in keys if all(column[key] is not None for column in verdicts)]
    if not scored:
        raise ValueError(
            f"got {len(keys)} problems in common, none of which every run could score; wanted at least one"
        )
    base, *others = [{key: bool(column[key]) for key in scored} for column in verdicts]
    changes = [change(base, other) for other in others]
    lines = [
        f"{len(scored)} problems"
        + (
            f"; {len(keys) - len(scored)} more left out, which some run could not score"
            if len(scored) < len(keys)
            else ""
        ),
        "",
    ]
    lines += overview(runs, [base, *others], changes)
    lines += over_seeds(args.runs, [sum(column.values()) / len(column) for column in (base, *others)])
    for run, result in zip(runs[1:], changes, strict=True):
        lines += flipped(runs[0], run, result, args.max_rows)
    return lines


def read(path: Path, match: str) -> Run:
    """The newest evaluation there. Raises ValueError for a path without one and for rows that are none of ours."""
    from grpo_fn.shell.logging import rollout_store

    file = file_of(path)
    seen: Counter[tuple[str, str]] = Counter()
    rows: dict[Key, dict[str, Any]] = {}
    for number, row in enumerate(rollout_store.load_evaluation(file), start=1):
        if absent := [name for name in ("uid", "prompt", "answer", "scores", "text") if name not in row]:
            raise ValueError(f"{file}: got row {number} without {', '.join(absent)}, wanted rows of an evaluation")
        alike = (str(row["uid"]) if match == "uid" else row["prompt"], row["answer"])
        rows[*alike, seen[alike]] = row
        seen[alike] += 1
    if not rows:
        raise ValueError(f"{file}: got no rows, wanted those of an evaluation")
    return Run(str(path), rows)


def file_of(path: Path) -> Path:
    """samples.jsonl of an evaluation's folder, or the newest file of a run's."""
    from grpo_fn.shell.logging import rollout_store

    if path.is_file():
        return path
    if (path / "samples.jsonl").is_file():
        return path / "samples.jsonl"
    steps = rollout_store.evaluation_steps(path / "eval") if (path / "eval").is_dir() else []
    if not steps:
        raise ValueError(
            f"got {path}, wanted a folder with samples.jsonl, a run folder with evaluations, or a .jsonl file"
        )
    return path / "eval" / f"step_{steps[-1]}.jsonl"


def common(runs: Sequence[Run], some: bool) -> list[Key]:
    """The problems of every run, in the order of the first. Raises ValueError when a run has others, unless `some`."""
    keys = [key for key in runs[0].rows if all(key in run.rows for run in runs)]
    sizes = [len(run.rows) for run in runs]
    if not keys or (max(sizes) > len(keys) and not some):
        have = ", ".join(f"{size} in {run.name}" for size, run in zip(sizes, runs, strict=True))
        raise ValueError(
            f"got different problems: {have}, of which {len(keys)} are in all of them; wanted the same ones"
            + (", or --intersection to compare on those" if keys else ": is the prompt another one? (--match uid)")
        )
    return keys


def verdict(run: Run, key: Key, judge: str | None) -> bool | None:
    """Right, wrong, or None where it could not be scored. Raises ValueError for a judge that was not asked."""
    scores = run.rows[key]["scores"]
    if judge is not None and judge not in scores:
        raise ValueError(f"--grader: got {judge}, wanted one that {run.name} has: {', '.join(scores)}")
    value = scores[judge] if judge is not None else next(iter(scores.values()))
    return None if value is None else value >= 1.0


def change(base: dict[Key, bool], other: dict[Key, bool]) -> Change:
    """What became of every problem from one run to the other."""
    from grpo_fn.lab.paired import mcnemar, paired_bootstrap

    gained = [key for key in base if other[key] and not base[key]]
    lost = [key for key in base if base[key] and not other[key]]
    counts = len(gained), len(lost)
    return Change(gained, lost, *paired_bootstrap(*counts, len(base)), mcnemar(*counts))


def overview(runs: Sequence[Run], columns: Sequence[dict[Key, bool]], changes: Sequence[Change]) -> list[str]:
    """One line a run: accuracy, and how it differs from the first."""
    from grpo_fn.trainer.evaluation import wilson

    lines = ["| run | accuracy | 95 % | difference | 95 %, paired | gained | lost | p |", "|---" * 8 + "|"]
    for run, column, result in zip(runs, columns, [None, *changes], strict=True):
        n, right = len(column), sum(column.values())
        low, high = wilson(right, n)
        cells = [named(run), f"{right / n:.3f}", f"{low:.3f} to {high:.3f}"]
        if result is not None:
            gained, lost = len(result.gained), len(result.lost)
            cells += [f"{(gained - lost) / n:+.3f}", f"{result.low:+.3f} to {result.high:+.3f}"]
            cells += [str(gained), str(lost), f"{result.p:.3g}"]
        lines.append(f"| {' | '.join(cells + [''] * (8 - len(cells)))} |")
    return lines


def over_seeds(paths: Sequence[Path], accuracies: Sequence[float]) -> list[str]:
    """Settings that share seeds with the first one, compared over those; nothing where there are none."""
    from grpo_fn.lab.paired import paired_difference

    first, *others = settings(paths, accuracies).values()
    lines = []
    for other in others:
        shared = [seed for seed in first if seed in other]
        if len(shared) < 2:
            continue
        found = paired_difference([first[seed][1] for seed in shared], [other[seed][1] for seed in shared])
        worth = "" if math.isnan(found.worth) else f"{found.worth:.3g}"
        cells = [*(code(str(one[shared[0]][0])) for one in (first, other)), str(found.n), f"{found.first:.3f}"]
        cells += [f"{found.second:.3f}", f"{found.difference:+.3f}", f"{found.low:+.3f} to {found.high:+.3f}", worth]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    head = [
        "",
        "## Over shared seeds",
        "",
        "Student's 95 % interval of the paired differences; worth is how many unpaired",
    ]
    head += ["seeds a paired one is worth, (Var first + Var other) / Var difference.", ""]
    names = "| first setting, as in | other, as in | seeds | first | other | difference | 95 % | worth |"
    return [*head, names, "|---" * 8 + "|", *lines]


Seeds = tuple[object, ...]


def settings(paths: Sequence[Path], accuracies: Sequence[float]) -> dict[str, dict[Seeds, tuple[Path, float]]]:
    """Setting -> seeds -> run and accuracy; what is no run folder is a setting of its own, without a seed."""
    from grpo_fn.shell.checkpoint.run_dir import MARKER, SEED_KNOBS
    from grpo_fn.shell.logging.metrics_writer import read_hparams

    found: dict[str, dict[Seeds, tuple[Path, float]]] = {}
    for path, accuracy in zip(paths, accuracies, strict=True):
        knobs = read_hparams(path) if (path / MARKER).is_file() else {"path": str(path)}
        setting = repr(sorted((name, value) for name, value in knobs.items() if name not in SEED_KNOBS))
        seeds = tuple(knobs.get(name) for name in SEED_KNOBS)
        found.setdefault(setting, {})[seeds] = (path, accuracy)
    return found


def flipped(base: Run, other: Run, result: Change, show: int) -> list[str]:
    """The problems on which two runs disagree."""
    lines = [
        "",
        f"## {named(base)} to {named(other)}: {len(result.gained)} gained, {len(result.lost)} lost",
        "",
    ]
    flips = [("gained", key) for key in result.gained] + [("lost", key) for key in result.lost]
    if not flips[:show]:
        return lines[:-1]
    lines += ["| | uid | problem | truth | first | this |", "|---" * 6 + "|"]
    for what, key in flips[:show]:
        before, after = base.rows[key], other.rows[key]
        cells = [before["prompt"], before["answer"], said(before), said(after)]
        lines.append(f"| {what} | {before['uid']} | {' | '.join(map(code, cells))} |")
    if len(flips) > show:
        lines += ["", f"and {len(flips) - show} more (--max_rows {len(flips)})"]
    return lines


def named(run: Run) -> str:
    """The run's path, or the end of it: that is where paths differ."""
    return code(run.name if len(run.name) <= 60 else f"…{run.name[-59:]}")


def said(row: dict[str, Any]) -> str:
    """The answer that was marked, or the end of what was written."""
    return row.get("marked") or row["text"][-60:]


def code(text: str) -> str:
    """A code span that holds the text on one line and does nothing, in a table too; at most 80 characters of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = f"{line[:79]}…" if len(line) > 80 else line
    fence = "`" * (1 + max((len(run) for run in "".join(c if c == "`" else " " for c in line).split()), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}".replace("|", "\\|") if line else ""


if __name__ == "__main__":
    sys.exit(main())
