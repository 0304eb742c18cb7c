"""One page about one or several runs: curves over each other, a summary, what differs, warnings and samples.

python tools/report RUN [RUN ...] [--out report.html]

RUN is a run folder, finished or going on. The page is one HTML file without scripts that opens without a network.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plots
import report_runs
from report_runs import Run, series

from grpo_fn.core.display_text import markdown_cell
from grpo_fn.core.problem import Turn, transcript
from grpo_fn.lab import html_page as page
from grpo_fn.lab.html_page import escape_text
from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.checkpoint.run_dir import SEED_KNOBS
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
STYLE = """<style>
body { max-width: 78rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption span { font-weight: 400; color: var(--soft); }
svg { width: 100%; height: auto; } .legend, .none { font-size: 12px; color: var(--soft); }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
td:has(.long) { overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .long { max-height: 14rem; overflow-y: auto; min-width: 16rem; }
</style>"""
SHOWN = 1500  # characters of a prompt, a completion, or a turn or observation of an episode


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html")
    parser.add_argument(
        "--samples", type=int, default=4, metavar="K", help="shown of each run's newest step (default 4)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write; returns the exit code."""
    args = flags().parse_args(argv)
    try:
        if args.samples < 0:
            raise ValueError(f"--samples: got {args.samples}, wanted at least 0")
        names = report_runs.distinct_names(args.runs)
        runs = [report_runs.read_run(path, name, args.samples) for path, name in zip(args.runs, names, strict=True)]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.out, report(runs).encode("utf-8", "replace"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {args.out}")
    return 0


# -- the page


def report(runs: Sequence[Run]) -> str:
    """The whole page."""
    return page.html_page(
        "Report on " + ", ".join(run.name for run in runs),
        [STYLE, summary(runs), curves(runs), seconds(runs), differences(runs), warnings(runs), samples(runs)],
    )


def colours(runs: Sequence[Run]) -> dict[str, str]:
    """Each run's colour; those that differ in their seeds alone share one."""
    return {run.name: plots.colour(i) for i, those in enumerate(seed_groups(runs).values()) for run in those}


def summary(runs: Sequence[Run]) -> str:
    """A row for each run: how far it is and its results."""
    head = ["run", "state", "steps", "ranks", "seed", "held-out before", "after", "95 %", "best", "problems"]
    head += ["reward, first steps", "last steps", "hours"]
    rows = [
        [f"{plots.swatch(colours(runs)[run.name])} {escape_text(run.name)}", *map(escape_text, summary_cells(run))]
        for run in runs
    ]
    note = (
        "Accuracy is that of greedy answers to held-out problems, before training and at the newest evaluation, with "
        "its 95 % interval. The rewards are means over the first and the last tenth of the steps. Hours are of work."
    )
    return page.html_section("Summary", note, table(head, rows))


def summary_cells(run: Run) -> list[str]:
    """The figures of a run, as text; a dash for what is not known (yet)."""
    judged = series(run, "eval/accuracy")
    ends = [series(run, f"eval/accuracy_{end}")[-1:] for end in ("low", "high")]
    rewards = series(run, "reward/mean")
    tenth = math.ceil(len(rewards) / 10)
    problems, done = series(run, "eval/problems")[-1:], int(run.rows[-1]["step"]) if run.rows else 0
    ended = run.summary if run.summary is not None and run.summary.get("steps") == done else None
    asked = run.knobs.get("train.train.steps", "?")
    state = "going on" if run.working else "finished" if ended else f"stopped after step {done}"
    work = ended["wall_seconds"] if ended else math.fsum(value for _, value in series(run, "time/total"))
    return [
        state,
        f"{done} of {asked}",
        str(ended["ranks"]) if ended and "ranks" in ended else "-",
        str(run.knobs.get("train.train.seed", "-")),
        number(judged[:1], 3),
        number(judged[-1:] if len(judged) > 1 else [], 3),
        f"{ends[0][0][1]:.3f} to {ends[1][0][1]:.3f}" if all(ends) else "-",
        f"{max(y for _, y in judged):.3f} at step {max(judged, key=lambda p: p[1])[0]:.0f}" if judged else "-",
        number(problems, 0),
        f"{math.fsum(y for _, y in rewards[:tenth]) / tenth:.3f}" if rewards else "-",
        f"{math.fsum(y for _, y in rewards[-tenth:]) / tenth:.3f}" if rewards else "-",
        f"{work / 3600:.2f}",
    ]


def number(points: Sequence[tuple[float, float]], digits: int) -> str:
    """The value of the only point, or a dash."""
    return f"{points[0][1]:.{digits}f}" if points else "-"


def curves(runs: Sequence[Run]) -> str:
    """A figure for each metric, all runs in it."""
    sets, figures = seed_groups(runs), []
    tint = {name: plots.colour(i) for i, name in enumerate(sets)}
    for title, metric, note in shown_curves(runs):
        lines = [curve for name, those in sets.items() if (curve := group_line(name, those, metric, tint[name]))]
        drawn = plots.plot(lines, label=f"{title}: {metric}")
        caption = f"<figcaption>{escape_text(title)} <span>{escape_text(f'{metric}, {note}')}</span></figcaption>"
        figures.append(f"<figure>{caption}{drawn}</figure>")
    seeds = SEEDS_NOTE if len(sets) < len(runs) else ""
    note = f"The numbers are under the pointer. {seeds}Of more than {plots.POINTS} steps, neighbours are averaged."
    return page.html_section("Curves", note, plots.legend(tint), f'<div class="plots">{"".join(figures)}</div>')


def shown_curves(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """The curves of the page: `CURVES` and one for each part of the reward; KL where a run has a reference."""
    names = {name for run in runs for row in run.rows for name in row}
    parts = sorted(name for name in names if name.startswith("reward/") and name not in NOT_PARTS)
    referenced = any(y != 0 for run in runs for _, y in series(run, KL))
    curves = [CURVES[0], *((name.removeprefix("reward/"), name, "mean of this part of the reward") for name in parts)]
    return curves + [one for one in CURVES[1:] if one[1] != KL or referenced]


def seed_groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs whose knobs differ in the seed alone, under the name that the legend has for them."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        knobs = {name: value for name, value in run.knobs.items() if name not in SEED_KNOBS}
        found.setdefault(repr(sorted(knobs.items(), key=str)), []).append(run)
    return {
        those[0].name if len(those) == 1 else f"mean of {', '.join(run.name for run in those)}": those
        for those in found.values()
    }


def group_line(name: str, runs: Sequence[Run], metric: str, colour: str) -> plots.Line | None:
    """The curve of one run, or the mean over seeds with a band from the smallest to the largest.

    A step is drawn where every run has it.
    """
    if len(runs) == 1:
        return line(runs[0], metric, colour)
    there = [dict(series(run, metric)) for run in runs]
    steps = sorted(set.intersection(*(set(points) for points in there)))
    values = [[points[step] for points in there] for step in steps]
    means = [math.fsum(those) / len(those) for those in values]
    return plots.Line(name, colour, steps, means, [min(those) for those in values], [max(those) for those in values])


def line(run: Run, metric: str, colour: str) -> plots.Line:
    """The run's curve; a gap where a value is not finite, none where a step did not measure it."""
    rows = [row for row in run.rows if metric in row]
    ends = [[row.get(f"{metric}_{end}", math.nan) for row in rows] for end in ("low", "high")]
    there = any(math.isfinite(y) for y in ends[0])
    return plots.Line(
        run.name, colour, [row["step"] for row in rows], [row[metric] for row in rows], *(ends if there else ())
    )


def seconds(runs: Sequence[Run]) -> str:
    """Where the time of a step goes."""
    split = {run.name: phases(run) for run in runs}
    names = sorted(
        {name for parts in split.values() for name in parts}, key=lambda n: -max(p.get(n, 0) for p in split.values())
    )
    tint = {name: plots.colour(i) for i, name in enumerate(names)}
    full = max((sum(parts.values()) for parts in split.values()), default=0.0) or 1.0
    bars = [
        [
            escape_text(run),
            plots.stacked({n: parts.get(n, 0.0) for n in names}, tint, full=full),
            *(f"{parts.get(name, 0.0):.3g}" for name in names),
        ]
        for run, parts in split.items()
    ]
    head = ["run", "", *names]
    note = "Mean seconds a step, phase by phase; other is what no phase covers. Evaluation before training counts too."
    return page.html_section("Time", note, plots.legend(tint), table(head, bars, wide=1))


def phases(run: Run) -> dict[str, float]:
    """Seconds of each phase over all lines, divided by the steps."""
    steps = max(1, sum(row["step"] > 0 for row in run.rows))
    names = {name for row in run.rows for name in row if name.startswith("time/") and name != "time/total"}
    return {n.removeprefix("time/"): math.fsum(y for _, y in series(run, n)) / steps for n in sorted(names)}


def differences(runs: Sequence[Run]) -> str:
    """The knobs that are not alike in all runs; of one run, all of them."""
    names = sorted({name for run in runs for name in run.knobs})
    unlike = [name for name in names if len({repr(run.knobs.get(name)) for run in runs}) > 1]
    shown = unlike if len(runs) > 1 else names
    body = table(
        ["knob", *(run.name for run in runs)],
        [[escape_text(name), *(escape_text(str(run.knobs.get(name, "-"))) for run in runs)] for name in shown],
    )
    if len(runs) == 1:
        return page.html_section("Configuration", "", f"<details><summary>{len(names)} knobs</summary>{body}</details>")
    note = f"{len(unlike)} of {len(names)} knobs differ." if unlike else f"All {len(names)} knobs are alike."
    return page.html_section("Configuration", note, body if unlike else "")


def warnings(runs: Sequence[Run]) -> str:
    """What the rules of health have found."""
    listed = [
        f"<h3>{escape_text(run.name)}</h3>"
        f"<ul>{''.join(f'<li>{markdown_cell(text)}</li>' for text in run.warnings)}</ul>"
        for run in runs
        if run.warnings
    ]
    quiet = [run.name for run in runs if not run.warnings]
    note = f"From log.txt, the newest {report_runs.WARNINGS} of a run."
    note += f" None in {', '.join(quiet)}." if quiet else ""
    return page.html_section("Warnings", note, *listed)


def samples(runs: Sequence[Run]) -> str:
    """A few completions of each run's newest stored step."""
    parts = []
    for run in runs:
        rows = [
            [f'<div class="long">{markdown_cell(text)}</div>' for text in (shortened(row["prompt"]), written(row))]
            + [markdown_cell(shortened(str(row["answer"]))), *(signed(row[name]) for name in ("reward", "advantage"))]
            for row in run.samples
        ]
        if rows:
            parts.append(f"<h3>{escape_text(run.name)}, step {run.step}</h3>")
            parts.append(table(["prompt", "completion", "answer", "reward", "advantage"], rows))
    note = "Of the newest stored step, the samples with the largest and the smallest advantages."
    return page.html_section("Samples", note, *parts)


def written(row: Mapping[str, Any]) -> str:
    """What was written in a row: of an episode, every turn and every observation; each of them may be shortened."""
    turns = [Turn(**turn) for turn in row.get("turns", ())]
    cut = [turn._replace(text=shortened(turn.text), observation=shortened(turn.observation)) for turn in turns]
    return transcript(shortened(row["text"]), cut)


def shortened(text: str) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN} more characters)"


def signed(value: float | None) -> str:
    """A number with its sign, or a dash."""
    return "-" if value is None else f"{value:+.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: int | None = None) -> str:
    """Cells of HTML under a row of names; the column `wide` takes the width that is left."""
    widths = "".join(
        f"<col{' style=' + chr(34) + 'width:50%' + chr(34) if i == wide else ''}>" for i in range(len(head))
    )
    lines = ["".join(f"<th>{escape_text(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{value}</td>" for value in row) for row in rows]
    full = ' style="width:100%"' if wide is not None else ""
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table{full}><colgroup>{widths}</colgroup>\n{body}\n</table></div>'
