"""One page about one or several runs: curves over each other, a summary, what differs, warnings and samples.

python tools/report RUN [RUN ...] [--out report.html]

RUN is a run folder, finished or going on. The page is one HTML file without scripts that opens without a network.
"""

import argparse
import fcntl
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plots

from grpo_fn.analysis import health
from grpo_fn.analysis.html import page
from grpo_fn.analysis.html.escape import escape_text
from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.shell.atomic_io import write_bytes
from grpo_fn.shell.checkpoint.run_dir import LOCK, MARKER
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.logging.metrics_writer import markdown_cell
from grpo_fn.shell.logging.tensorboard_layout import read_hparams

CURVES = [  # title, metric, and what is good to know while looking at it
    ("Reward", "reward/mean", "mean of the scorable samples of a step"),
    ("Held-out accuracy", "eval/accuracy", "greedy answers, with the 95 % interval"),
    ("KL to the reference", "loss/kl", "nats a token"),
    ("Entropy", "loss/entropy", "nats a token"),
    ("Length", "generation/length_mean", "sampled tokens a completion"),
    ("Log-prob gap", "loss/logprob_diff_mean", "trainer against sampler, nats; only rounding should be left"),
    ("Gradient norm", "loss/grad_norm", "before clipping"),
    ("Groups without signal", "advantage/zero_variance_groups", "share of groups with equal rewards only"),
    ("Step time", "time/total", "seconds"),
]
STYLE = """<style>
body { max-width: 78rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption span { font-weight: 400; color: var(--soft); }
svg { width: 100%; height: auto; } .legend, .none { font-size: 12px; color: var(--soft); }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .said { max-height: 14rem; overflow-y: auto; min-width: 16rem; }
</style>"""
SHOWN = 1500  # characters of a prompt or a completion
WARNINGS = 50  # of a run, the newest


class Run(NamedTuple):
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
        names = named(args.runs)
        runs = [read(path, name, args.samples) for path, name in zip(args.runs, names, strict=True)]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(args.out, report(runs).encode("utf-8", "replace"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {args.out}")
    return 0


# -- reading


def named(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart. Raises ValueError for one given twice."""
    whole = [path.resolve() for path in paths]
    if len({*whole}) < len(whole):
        raise ValueError(f"got {len(whole)} runs of which some are the same, wanted each once")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len({*names}) == len(names):
            break
    return names


def read(path: Path, name: str, samples: int) -> Run:
    """All there is in the folder. Raises ValueError for one that is no run's."""
    summary = path / "summary.json"
    if not (path / MARKER).is_file():
        raise ValueError(f"got {path} without {MARKER}, wanted a run folder")
    step, rows = newest(path / "rollouts")
    return Run(
        name=name,
        path=path,
        rows=metrics(path),
        knobs=read_hparams(path),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
        working=held(path / LOCK),
        warnings=warned(path / "log.txt"),
        step=step,
        samples=telling(rows, samples),
    )


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl. A last line that is not whole is being written; another one raises ValueError."""
    return [health.history_line(step, row) for step, row in metrics_by_step(run_dir, torn_end=True).items()]


def held(lock: Path) -> bool:
    """Whether a process works in the run's folder."""
    if not lock.is_file():
        return False
    with open(lock, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def warned(log: Path) -> list[str]:
    """The newest lines of log.txt that warn, with their time."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return [line for line in lines if warns(line)][-WARNINGS:]


def warns(line: str) -> bool:
    """Whether a rule of health speaks here: `2026-01-31 12:00:00 health, kl_high: ...`, or has ended the run."""
    return re.match(r"\S+ \S+ (health, |ended by )", line) is not None


def newest(root: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """The newest step whose samples are there, and its rows; the run may be deleting older ones."""
    for step in reversed(rollout_store.rollout_steps(root) if root.is_dir() else []):
        try:
            return step, rollout_store.load_rollouts(root / f"step_{step:06d}.jsonl.gz")
        except FileNotFoundError:
            continue
    return None, []


def telling(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows with the largest and the smallest advantages, half and half."""
    ranked = sorted(rows, key=lambda row: math.inf if row["advantage"] is None else -row["advantage"])
    low = min(count // 2, len(ranked) // 2)
    return ranked[: count - low] + ranked[len(ranked) - low :] if len(ranked) > count else ranked


# -- the page


def report(runs: Sequence[Run]) -> str:
    """The whole page."""
    return page.html_page(
        "Report on " + ", ".join(run.name for run in runs),
        [STYLE, summary(runs), curves(runs), seconds(runs), differences(runs), warnings(runs), samples(runs)],
    )


def colours(runs: Sequence[Run]) -> dict[str, str]:
    """Each run's colour."""
    return {run.name: plots.colour(i) for i, run in enumerate(runs)}


def summary(runs: Sequence[Run]) -> str:
    """A row for each run: how far it is and what came of it."""
    head = ["run", "state", "steps", "ranks", "seed", "held-out before", "after", "95 %", "best", "problems"]
    head += ["reward, first steps", "last steps", "hours"]
    rows = [
        [f"{plots.swatch(colours(runs)[run.name])} {escape_text(run.name)}", *map(escape_text, told(run))]
        for run in runs
    ]
    said = (
        "Accuracy is that of greedy answers to held-out problems, before training and at the newest evaluation, with "
        "its 95 % interval. The rewards are means over the first and the last tenth of the steps. Hours are of work."
    )
    return page.html_section("Summary", said, table(head, rows))


def told(run: Run) -> list[str]:
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


def series(run: Run, metric: str) -> list[tuple[float, float]]:
    """(step, value) of the finite values."""
    return [(row["step"], row[metric]) for row in run.rows if math.isfinite(row.get(metric, math.nan))]


def curves(runs: Sequence[Run]) -> str:
    """A figure for each metric, all runs in it."""
    figures = []
    for title, metric, said in CURVES:
        drawn = plots.plot([line(run, metric, colours(runs)[run.name]) for run in runs], label=f"{title}: {metric}")
        caption = f"<figcaption>{escape_text(title)} <span>{escape_text(f'{metric}, {said}')}</span></figcaption>"
        figures.append(f"<figure>{caption}{drawn}</figure>")
    said = f"The numbers are under the pointer. Of more than {plots.POINTS} steps, neighbours are averaged."
    return page.html_section(
        "Curves", said, plots.legend(colours(runs)), f'<div class="plots">{"".join(figures)}</div>'
    )


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
    said = "Mean seconds a step, phase by phase; other is what no phase covers. Evaluation before training counts too."
    return page.html_section("Time", said, plots.legend(tint), table(head, bars, wide=1))


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
    said = f"{len(unlike)} of {len(names)} knobs differ." if unlike else f"All {len(names)} knobs are alike."
    return page.html_section("Configuration", said, body if unlike else "")


def warnings(runs: Sequence[Run]) -> str:
    """What the rules of health have said."""
    listed = [
        f"<h3>{escape_text(run.name)}</h3>"
        f"<ul>{''.join(f'<li>{markdown_cell(text)}</li>' for text in run.warnings)}</ul>"
        for run in runs
        if run.warnings
    ]
    quiet = [run.name for run in runs if not run.warnings]
    said = f"From log.txt, the newest {WARNINGS} of a run." + (f" None in {', '.join(quiet)}." if quiet else "")
    return page.html_section("Warnings", said, *listed)


def samples(runs: Sequence[Run]) -> str:
    """A few completions of each run's newest stored step."""
    parts = []
    for run in runs:
        rows = [
            [f'<div class="said">{shown(row[name])}</div>' for name in ("prompt", "text")]
            + [shown(str(row["answer"])), *(signed(row[name]) for name in ("reward", "advantage"))]
            for row in run.samples
        ]
        if rows:
            parts.append(f"<h3>{escape_text(run.name)}, step {run.step}</h3>")
            parts.append(table(["prompt", "completion", "answer", "reward", "advantage"], rows))
    said = "Of the newest stored step, the samples with the largest and the smallest advantages."
    return page.html_section("Samples", said, *parts)


def shown(text: str) -> str:
    """What a model wrote, which shows and does nothing."""
    return markdown_cell(text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN} more characters)")


def signed(value: float | None) -> str:
    """A number with its sign, or a dash."""
    return "-" if value is None else f"{value:+.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: int | None = None) -> str:
    """Cells of HTML under a row of names; the column `wide` takes the room that is left."""
    widths = "".join(
        f"<col{' style=' + chr(34) + 'width:50%' + chr(34) if i == wide else ''}>" for i in range(len(head))
    )
    lines = ["".join(f"<th>{escape_text(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{value}</td>" for value in row) for row in rows]
    full = ' style="width:100%"' if wide is not None else ""
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table{full}><colgroup>{widths}</colgroup>\n{body}\n</table></div>'
