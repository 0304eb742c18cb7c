"""What the runs of a pairing show: differences to the first arm by step with intervals over the seeds, in all forms."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pair_page import report_page
from pair_spec import Pairing, trial, trials
from sweep_runner import folder, output
from sweep_table import plain, table_markdown

from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.lab.paired import PairedDifference, paired_difference
from grpo_fn.shell.atomic_io import to_json, write_bytes
from grpo_fn.shell.logging import rollout_store

SHOWN = 8  # steps in a table for people
INTERVALS = (
    "Differences are means over the seeds that both arms have finished, with Student's 95 % interval of the paired "
    "differences. Worth is (Var first + Var arm) / Var difference: how many unpaired seeds of each arm one pair is as "
    "good as, with its 95 % interval for normal values; equal: no seed differs; inf: all seeds differ alike."
)
SAMPLED = (
    "Of the samples of both arms in a step, the share with the same problem, number and tokens; mean over the seeds."
)


class Row(NamedTuple):
    """An arm against the first one, by one metric at one step."""

    arm: str
    metric: str
    step: int
    paired: PairedDifference


class Found(NamedTuple):
    """All that the finished runs say."""

    rows: list[Row]
    sampled: dict[tuple[str, int], float]  # (arm, step) -> share of samples that are those of the first arm
    missing: int  # runs that are not finished


def measured(out: Path, asked: Pairing, metrics: Sequence[str]) -> Found:
    """Every arm against the first, by step. Raises ValueError where there is nothing to compare."""
    done = {
        (arm, seed): metrics_by_step(where, torn_end=False)
        for arm in asked.arms
        for seed in asked.seeds
        if ((where := folder(out, trial(arm, seed))) / "summary.json").exists()
    }
    missing = len(trials(asked)) - len(done)
    first, *others = asked.arms
    if not any((first, seed) in done and (arm, seed) in done for arm in others for seed in asked.seeds):
        raise ValueError(
            f"got {len(done)} finished runs of {len(trials(asked))}, none of which is the partner of one of {first}; "
            f"the others are in {out / 'trials'}, each with what it printed in NAME.out"
        )
    rows = [row for metric in metrics for arm in others for row in arm_rows(asked, done, arm, metric)]
    if absent := [metric for metric in metrics if metric not in {row.metric for row in rows}]:
        raise ValueError(f"--metric: got {', '.join(absent)}, which no finished pair of runs has, wanted a metric")
    sampled = {key: share for arm in others for key, share in same_samples(out, asked, done, arm)}
    return Found(rows, sampled, missing)


def arm_rows(
    asked: Pairing, done: Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]], arm: str, metric: str
) -> list[Row]:
    """An arm against the first one at every step that some seed has in both."""
    first = next(iter(asked.arms))
    pairs: dict[int, list[tuple[float, float]]] = {}
    for seed in asked.seeds:
        mine, theirs = done.get((first, seed), {}), done.get((arm, seed), {})
        for step in sorted(mine.keys() & theirs.keys()):
            values = mine[step].get(metric), theirs[step].get(metric)
            if None not in values:  # null is what was not finite
                pairs.setdefault(step, []).append(values)
    return [Row(arm, metric, step, paired_difference(*zip(*pairs[step], strict=True))) for step in sorted(pairs)]


def same_samples(
    out: Path, asked: Pairing, done: Mapping[tuple[str, str], Any], arm: str
) -> list[tuple[tuple[str, int], float]]:
    """By step, the share of samples that are alike in both, of the seeds whose rollouts are kept in both."""
    first, shares = next(iter(asked.arms)), {}
    for seed in asked.seeds:
        if (first, seed) not in done or (arm, seed) not in done:
            continue
        roots = [folder(out, trial(name, seed)) / "rollouts" for name in (first, arm)]
        kept = [{*rollout_store.rollout_steps(root)} if root.is_dir() else set() for root in roots]
        for step in sorted(kept[0] & kept[1]):
            mine, theirs = (samples(root / f"step_{step:06d}.jsonl.gz") for root in roots)
            same = sum(theirs.get(key) == tokens for key, tokens in mine.items())
            shares.setdefault(step, []).append(same / max(len(mine), len(theirs)))
    return [((arm, step), math.fsum(values) / len(values)) for step, values in sorted(shares.items())]


def samples(path: Path) -> dict[tuple[int, int], list[int]]:
    """(problem, sample) -> the tokens of prompt and completion, of a step's file."""
    return {(row["uid"], row["g"]): row["tokens"] for row in rollout_store.load_rollouts(path)}


# -- in every form


def reported(out: Path, asked: Pairing, found: Found) -> str:
    """Write paired.jsonl, table.md and report.html; returns what a terminal shows."""
    first, *_ = asked.arms
    lines = [to_json(line_of(asked, row)) + "\n" for row in found.rows]
    lines += [
        to_json({"arm": arm, "metric": "same_samples", "step": step, "share": share}) + "\n"
        for (arm, step), share in found.sampled.items()
    ]
    write_bytes(out / "paired.jsonl", "".join(lines).encode())
    parts = [(heading, cells) for heading, cells in tables(asked, found) if cells]
    text = "\n\n".join(f"## {heading}\n\n{table_markdown(cells)}" for heading, cells in parts)
    head = f"# {', '.join(asked.arms)}: paired differences to {first}\n\n{INTERVALS}"
    rest = unfinished(out, asked)
    end = "\n\n" + "\n".join(f"- not finished: {line}" for line in rest) if rest else ""
    write_bytes(out / "table.md", f"{head}\n\n{text}{end}\n".encode())
    write_bytes(out / "report.html", report_page(asked, found.rows, parts, INTERVALS).encode("utf-8", "replace"))
    shown = [plain(cells, heading, []) for heading, cells in parts]
    left = ["\n".join(f"not finished: {line}" for line in rest)] if rest else []
    return "\n\n".join([*shown, *left, f"written to {out / 'report.html'}"])


def line_of(asked: Pairing, row: Row) -> dict[str, Any]:
    """A row as a line of paired.jsonl; null where a number is not finite."""
    figures = {name: value if math.isfinite(value) else None for name, value in row.paired._asdict().items()}
    return {"arm": row.arm, "to": next(iter(asked.arms)), "metric": row.metric, "step": row.step, **figures}


def tables(asked: Pairing, found: Found) -> list[tuple[str, list[dict[str, str]]]]:
    """Heading and rows of each table: for every metric the last step, and the worth by step; then equal samples."""
    made = []
    for metric in dict.fromkeys(row.metric for row in found.rows):
        mine = [row for row in found.rows if row.metric == metric]
        last = {row.arm: row for row in mine}
        made.append((f"{metric} at the last step", [last_cells(row) for row in last.values()]))
        if len({row.step for row in mine}) > 1:
            made.append((f"{metric}: difference by step", by_step(mine, difference_cell)))
            made.append((f"{metric}: worth by step", by_step(mine, lambda row: worth(row.paired))))
    shares = {arm: {s: v for (name, s), v in found.sampled.items() if name == arm} for arm in asked.arms}
    steps = shown_steps({step for _, step in found.sampled})
    cells = [
        {"arm": arm, **{f"step {step}": number(share.get(step, math.nan)) for step in steps}}
        for arm, share in shares.items()
        if share
    ]
    return [*made, (f"same samples by step. {SAMPLED}", cells)]


def last_cells(row: Row) -> dict[str, str]:
    """An arm's line of the table of the last step."""
    p = row.paired
    return {
        "arm": row.arm,
        "step": str(row.step),
        "seeds": str(p.n),
        "first": number(p.first),
        "this": number(p.second),
        "difference": f"{p.difference:+.3g}",
        "95 %": f"{p.low:+.3g} to {p.high:+.3g}" if p.n > 1 else "-",
        "worth": worth(p),
        "worth, 95 %": f"{p.worth_low:.3g} to {p.worth_high:.3g}" if math.isfinite(p.worth) else "-",
    }


def by_step(rows: Sequence[Row], cell: Any) -> list[dict[str, str]]:
    """A line for each arm, a column for each of some steps."""
    steps = shown_steps({row.step for row in rows})
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(row.arm, {"arm": row.arm, **{f"step {step}": "-" for step in steps}})
        if row.step in steps:
            lines[row.arm][f"step {row.step}"] = cell(row)
    return [*lines.values()]


def shown_steps(steps: set[int]) -> list[int]:
    """At most SHOWN of the steps, evenly, the first and the last among them."""
    every = sorted(steps)
    if len(every) <= SHOWN:
        return every
    return [every[round(i * (len(every) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def difference_cell(row: Row) -> str:
    """The difference, with half the width of its interval."""
    p = row.paired
    return f"{p.difference:+.3g} ± {p.high - p.difference:.2g}" if p.n > 1 else f"{p.difference:+.3g}"


def worth(p: PairedDifference) -> str:
    """The worth as a cell: `equal` where no seed differs."""
    if p.n > 1 and p.difference == p.low == p.high == 0:
        return "equal"
    return number(p.worth)


def number(x: float) -> str:
    """Three digits; a dash for what is not known."""
    return "-" if math.isnan(x) else f"{x:.3g}"


def unfinished(out: Path, asked: Pairing) -> list[str]:
    """The runs that are not finished, and where they say why."""
    left = [one for one in trials(asked) if not (folder(out, one) / "summary.json").exists()]
    begun = [one for one in left if output(out, one).exists()]
    rest = [f"{len(left) - len(begun)} runs that have not begun"] if len(begun) < len(left) else []
    return [*(f"{one.name}, see {output(out, one)}" for one in begun), *rest]
