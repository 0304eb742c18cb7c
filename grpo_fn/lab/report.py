"""One page about one or several runs: curves over each other, a summary, what differs, warnings and samples.

python -m grpo_fn.lab.report RUN [RUN ...] [--out report.html]

RUN is a run folder, finished or going on. The page is one HTML file without scripts that opens without a network.
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

from grpo_fn.command_line import exit_code
from grpo_fn.core.display_text import markdown_cell
from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.core.problem import Turn, transcript
from grpo_fn.lab import plots
from grpo_fn.lab.html_page import REPORT_STYLE, escape_text, html_page, html_section, html_table
from grpo_fn.lab.trials import setting_key
from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.checkpoint.run_dir import LOCK, MARKER
from grpo_fn.trainer import health

KL = "loss/kl"
SEEDS_NOTE = "Runs that differ in their seeds alone are their mean, in a band from the smallest to the largest. "
NOT_PARTS = {
    *(f"reward/{name}" for name in ("mean", "min", "max", "std", "correct_rate", "invalid")),
    *(f"reward/{name}" for name in health.LOST_TO),
}
CURVES = [  # title, metric, and what is good to know while looking at it
    ("Reward", "reward/mean", "mean of the scorable samples of a step"),
    ("Held-out accuracy", "eval/accuracy", "greedy answers, with the 95 % interval"),
    ("KL to the reference", KL, "nats a token"),
    ("Entropy", "loss/entropy", "nats a token"),
    ("Length", "generation/length_mean", "sampled tokens a completion"),
    ("Truncated", "generation/truncated", "share of completions cut off at the limit of tokens"),
    ("Clipped low", "loss/clip_low", "share of tokens whose gradient the lower bound removes"),
    ("Clipped high", "loss/clip_high", "share of tokens whose gradient the upper bound removes"),
    ("Log-prob gap", "loss/logprob_diff_mean", "trainer against sampler, nats; only rounding should be left"),
    ("Gradient norm", "loss/grad_norm", "before clipping"),
    ("Groups without signal", "advantage/zero_variance_groups", "share of groups with equal rewards only"),
    ("Step time", "time/total", "seconds"),
]
WARNINGS = 50  # of a run, the newest
SAMPLES = 4  # shown of a run's newest step
SHOWN = 1500  # characters of a prompt, a completion, or a turn or observation of an episode


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m grpo_fn.lab.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write; returns the exit code."""
    return exit_code(partial(write_report, flags().parse_args(argv)), interrupted="interrupted")


def write_report(args: argparse.Namespace) -> int:
    """Read, write. Raises ValueError or OSError for bad input."""
    runs = [read_run(path, name) for path, name in zip(args.runs, distinct_names(args.runs), strict=True)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(args.out, report_page(runs).encode("utf-8", "replace"))
    print(f"written to {args.out}")
    return 0


# -- run folders, as far as each has come


class ReportedRun(NamedTuple):
    """What a run folder holds, as far as it has come."""

    name: str
    path: Path
    rows: list[dict[str, float]]  # metrics.jsonl: NaN where it has null
    knobs: dict[str, int | float | str]
    summary: dict[str, Any] | None
    working: bool  # whether a process is in it
    warnings: list[str]
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
    step, rows = newest_samples(path / "rollouts")
    return ReportedRun(
        name=name,
        path=path,
        rows=metric_lines(path),
        knobs=json.loads((path / "run.json").read_bytes()).get("hparams", {}),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
        working=is_locked(path / LOCK),
        warnings=warning_lines(path / "log.txt"),
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


def warning_lines(log: Path) -> list[str]:
    """The newest lines of log.txt that warn, with their time."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    # `2026-01-31 12:00:00 health, kl_high: ...`, or a rule that has ended the run
    return [line for line in lines if re.match(r"\S+ \S+ (health, |ended by )", line)][-WARNINGS:]


def newest_samples(root: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """The newest step whose samples are there, and its rows; the run may be deleting older ones."""
    from grpo_fn.shell.logging import rollout_store  # it loads torch

    for step in reversed(rollout_store.rollout_steps(root) if root.is_dir() else []):
        try:
            return step, rollout_store.load_rollouts(root / f"step_{step:06d}.jsonl.gz")
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


def report_page(runs: Sequence[ReportedRun]) -> str:
    """The whole page."""
    return html_page(
        "Report on " + ", ".join(run.name for run in runs),
        [
            REPORT_STYLE,
            summary_section(runs),
            curve_section(runs),
            time_section(runs),
            knob_section(runs),
            warning_section(runs),
            sample_section(runs),
        ],
    )


def run_colors(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Each run's colour; those that differ in their seeds alone share one."""
    return {run.name: plots.series_color(i) for i, those in enumerate(seed_groups(runs).values()) for run in those}


def summary_section(runs: Sequence[ReportedRun]) -> str:
    """A row for each run: how far it is and its results."""
    head = ["run", "state", "steps", "ranks", "seed", "held-out before", "after", "95 %", "best", "problems"]
    head += ["reward, first steps", "last steps", "hours"]
    rows = [
        [f"{plots.swatch(run_colors(runs)[run.name])} {escape_text(run.name)}", *map(escape_text, summary_cells(run))]
        for run in runs
    ]
    note = (
        "Accuracy is that of greedy answers to held-out problems, before training and at the newest evaluation, with "
        "its 95 % interval. The rewards are means over the first and the last tenth of the steps. Hours are of work."
    )
    return html_section("Summary", note, html_table(head, rows))


def summary_cells(run: ReportedRun) -> list[str]:
    """The figures of a run, as text; a dash for what is not known (yet)."""
    judged = finite_points(run, "eval/accuracy")
    ends = [finite_points(run, f"eval/accuracy_{end}")[-1:] for end in ("low", "high")]
    rewards = finite_points(run, "reward/mean")
    tenth = math.ceil(len(rewards) / 10)
    problems, done = finite_points(run, "eval/problems")[-1:], int(run.rows[-1]["step"]) if run.rows else 0
    ended = run.summary if run.summary is not None and run.summary.get("steps") == done else None
    asked = run.knobs.get("train.train.steps", "?")
    state = "going on" if run.working else "finished" if ended else f"stopped after step {done}"
    work = ended["wall_seconds"] if ended else math.fsum(value for _, value in finite_points(run, "time/total"))
    return [
        state,
        f"{done} of {asked}",
        str(ended["ranks"]) if ended and "ranks" in ended else "-",
        str(run.knobs.get("train.train.seed", "-")),
        digits_or_dash(judged[:1], 3),
        digits_or_dash(judged[-1:] if len(judged) > 1 else [], 3),
        f"{ends[0][0][1]:.3f} to {ends[1][0][1]:.3f}" if all(ends) else "-",
        f"{max(y for _, y in judged):.3f} at step {max(judged, key=lambda p: p[1])[0]:.0f}" if judged else "-",
        digits_or_dash(problems, 0),
        f"{math.fsum(y for _, y in rewards[:tenth]) / tenth:.3f}" if rewards else "-",
        f"{math.fsum(y for _, y in rewards[-tenth:]) / tenth:.3f}" if rewards else "-",
        f"{work / 3600:.2f}",
    ]


def digits_or_dash(points: Sequence[tuple[float, float]], digits: int) -> str:
    """The value of the only point, or a dash."""
    return f"{points[0][1]:.{digits}f}" if points else "-"


def curve_section(runs: Sequence[ReportedRun]) -> str:
    """A figure for each metric, all runs in it."""
    sets, figures = seed_groups(runs), []
    tint = {name: plots.series_color(i) for i, name in enumerate(sets)}
    for title, metric, note in shown_curves(runs):
        lines = [curve for name, those in sets.items() if (curve := group_line(name, those, metric, tint[name]))]
        caption = f"{escape_text(title)} <span>{escape_text(f'{metric}, {note}')}</span>"
        figures.append(plots.html_figure(lines, caption, label=f"{title}: {metric}"))
    seeds = SEEDS_NOTE if len(sets) < len(runs) else ""
    note = f"The numbers are under the pointer. {seeds}Of more than {plots.POINTS} steps, neighbours are averaged."
    return html_section("Curves", note, plots.legend(tint), f'<div class="plots">{"".join(figures)}</div>')


def shown_curves(runs: Sequence[ReportedRun]) -> list[tuple[str, str, str]]:
    """The curves of the page: `CURVES` and one for each part of the reward; KL where a run has a reference."""
    names = {name for run in runs for row in run.rows for name in row}
    parts = sorted(name for name in names if name.startswith("reward/") and name not in NOT_PARTS)
    referenced = any(y != 0 for run in runs for _, y in finite_points(run, KL))
    curves = [CURVES[0], *((name.removeprefix("reward/"), name, "mean of this part of the reward") for name in parts)]
    return curves + [one for one in CURVES[1:] if one[1] != KL or referenced]


def seed_groups(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Runs whose knobs differ in the seed alone, under the name that the legend has for them."""
    found: dict[str, list[ReportedRun]] = {}
    for run in runs:
        found.setdefault(setting_key(run.knobs), []).append(run)
    return {
        those[0].name if len(those) == 1 else f"mean of {', '.join(run.name for run in those)}": those
        for those in found.values()
    }


def group_line(name: str, runs: Sequence[ReportedRun], metric: str, colour: str) -> plots.Line | None:
    """The curve of one run, or the mean over seeds with a band from the smallest to the largest.

    A step is drawn where every run has it.
    """
    if len(runs) == 1:
        return metric_line(runs[0], metric, colour)
    there = [dict(finite_points(run, metric)) for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in there)))
    values = [[points[step] for points in there] for step in steps]
    means = [math.fsum(those) / len(those) for those in values]
    return plots.Line(name, colour, steps, means, [min(those) for those in values], [max(those) for those in values])


def metric_line(run: ReportedRun, metric: str, colour: str) -> plots.Line:
    """The run's curve; a gap where a value is not finite, none where a step did not measure it."""
    rows = [row for row in run.rows if metric in row]
    ends = [[row.get(f"{metric}_{end}", math.nan) for row in rows] for end in ("low", "high")]
    there = any(math.isfinite(y) for y in ends[0])
    return plots.Line(
        run.name, colour, [row["step"] for row in rows], [row[metric] for row in rows], *(ends if there else ())
    )


def time_section(runs: Sequence[ReportedRun]) -> str:
    """Where the time of a step goes."""
    split = {run.name: phase_seconds(run) for run in runs}
    names = sorted(
        {name for parts in split.values() for name in parts}, key=lambda n: -max(p.get(n, 0) for p in split.values())
    )
    tint = {name: plots.series_color(i) for i, name in enumerate(names)}
    full = max((sum(parts.values()) for parts in split.values()), default=0.0) or 1.0
    bars = [
        [
            escape_text(run),
            plots.stacked_bars({n: parts.get(n, 0.0) for n in names}, tint, full=full),
            *(f"{parts.get(name, 0.0):.3g}" for name in names),
        ]
        for run, parts in split.items()
    ]
    head = ["run", "", *names]
    note = "Mean seconds a step, phase by phase; other is what no phase covers. Evaluation before training counts too."
    return html_section("Time", note, plots.legend(tint), html_table(head, bars, wide=1))


def phase_seconds(run: ReportedRun) -> dict[str, float]:
    """Seconds of each phase over all lines, divided by the steps."""
    steps = max(1, sum(row["step"] > 0 for row in run.rows))
    names = {name for row in run.rows for name in row if name.startswith("time/") and name != "time/total"}
    return {n.removeprefix("time/"): math.fsum(y for _, y in finite_points(run, n)) / steps for n in sorted(names)}


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
    """What the rules of health have found."""
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
                *(signed_or_dash(row[name]) for name in ("reward", "advantage")),
            ]
            for row in run.samples
        ]
        if rows:
            parts.append(f"<h3>{escape_text(run.name)}, step {run.step}</h3>")
            parts.append(html_table(["prompt", "completion", "answer", "reward", "advantage"], rows))
    note = "Of the newest stored step, the samples with the largest and the smallest advantages."
    return html_section("Samples", note, *parts)


def written_text(row: Mapping[str, Any]) -> str:
    """What was written in a row: of an episode, every turn and every observation; each of them may be shortened."""
    turns = [Turn(**turn) for turn in row.get("turns", ())]
    cut = [turn._replace(text=shorten(turn.text), observation=shorten(turn.observation)) for turn in turns]
    return transcript(shorten(row["text"]), cut)


def shorten(text: str) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN} more characters)"


def signed_or_dash(value: float | None) -> str:
    """A number with its sign, or a dash."""
    return "-" if value is None else f"{value:+.3f}"


if __name__ == "__main__":
    sys.exit(main())
