"""Results of a sweep: the tables over its seeds, as text, CSV and TensorBoard's HPARAMS tab."""

import ast
import csv
import io
import json
import math
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sweep_runner import INTERRUPTED, STOPPED, UNHEALTHY, exit_file, folder, output
from sweep_spec import Trial

from grpo_fn.core.display_text import escape_control
from grpo_fn.core.json_lines import metrics_by_step

PAIRED = (
    "to first: paired difference to the first line over the seeds of both, with Student's 95 % interval; worth: how "
    "many unpaired seeds a paired one is worth (the ratio of variances). The first line was chosen by these numbers."
)
SEEDS = ("SEED", "train.train.seed")  # what a setting is repeated over


class Outcome(NamedTuple):
    """What a trial says of itself."""

    trial: Trial
    state: str  # "done", "unfinished", "unhealthy" (ended by a rule of health) or "failed"
    value: float  # of the metric, at the end of a done trial


class Setting(NamedTuple):
    """A setting over its seeds."""

    values: dict[str, str]
    by_seed: dict[tuple[str, ...], float]  # the values of SEEDS -> the score of the trial that is done
    missing: int

    @property
    def scores(self) -> list[float]:
        return [*self.by_seed.values()]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan


def outcome(out: Path, one: Trial, metric: str) -> Outcome:
    """What a trial's folder says: the metric's last value, if the run is done."""
    where = folder(out, one)
    if not (where / "summary.json").exists():
        code = exit_file(out, one)
        ended = int(code.read_text()) if code.exists() else STOPPED
        return Outcome(
            one, {UNHEALTHY: "unhealthy"}.get(ended, "unfinished" if ended in INTERRUPTED else "failed"), math.nan
        )
    rows = metrics_by_step(where, torn_end=False).values()
    values = [row[metric] for row in rows if row.get(metric) is not None]
    return Outcome(one, "done", float(values[-1]) if values else math.nan)


def settings(outcomes: Sequence[Outcome], lowest: bool) -> list[Setting]:
    """Trials that differ in their seeds alone, put together; the best mean first, those without any value last."""
    by_values: dict[str, list[Outcome]] = {}
    for one in outcomes:
        key = json.dumps({k: v for k, v in one.trial.values.items() if k not in SEEDS}, sort_keys=True)
        by_values.setdefault(key, []).append(one)
    found = []
    for key, group in by_values.items():
        scores = {seeds_of(one): one.value for one in group if math.isfinite(one.value)}
        found.append(Setting(json.loads(key), scores, len(group) - len(scores)))
    sign = 1 if lowest else -1
    return sorted(found, key=lambda one: sign * one.mean if one.scores else math.inf)


def seeds_of(one: Outcome) -> tuple[str, ...]:
    """The values of SEEDS in a trial, "" for one that it does not bind."""
    return tuple(one.trial.values.get(name, "") for name in SEEDS)


def report(out: Path, outcomes: Sequence[Outcome], metric: str, lowest: bool) -> str:
    """Write the tables and what TensorBoard shows; returns the table in markdown."""
    from grpo_fn.shell.atomic_io import write_bytes

    found = settings(outcomes, lowest)
    rows = [{**figures(one), **against_best(found[0], one)} for one in found]
    each = [{"trial": one.trial.name, **one.trial.values, "state": one.state, metric: one.value} for one in outcomes]
    unfinished = [one for one in outcomes if one.state != "done"]
    said = [f"{metric} at the end, {'lowest' if lowest else 'highest'} mean first", "", table_markdown(rows)]
    if any("pairs" in row for row in rows):
        said += ["", PAIRED]
    said += ["", *(f"{one.state}: {one.trial.name}, see {output(out, one.trial)}" for one in unfinished)]
    text = "\n".join(said).rstrip() + "\n"
    write_bytes(out / "table.md", text.encode())
    write_bytes(out / "table.csv", comma_separated(rows).encode())
    write_bytes(out / "trials.csv", comma_separated(each).encode())
    hparams(out / "tensorboard", outcomes, metric)
    return plain(rows, said[0], said[4:])


def figures(one: Setting) -> dict[str, Any]:
    """A line of the table. std is that of a sample (n - 1)."""
    scores = one.scores
    return {
        **one.values,
        "n": len(scores),
        "mean": f"{one.mean:.4g}" if scores else "",
        "std": f"{statistics.stdev(scores):.3g}" if len(scores) > 1 else "",
        "min": f"{min(scores):.4g}" if scores else "",
        "max": f"{max(scores):.4g}" if scores else "",
        "missing": one.missing,
    }


def against_best(best: Setting, one: Setting) -> dict[str, Any]:
    """The paired difference to the first line, over the seeds that both have; nothing of fewer than two."""
    from grpo_fn.lab.paired import paired_difference

    shared = [] if one is best else [seed for seed in best.by_seed if seed in one.by_seed]
    if len(shared) < 2:
        return {}
    found = paired_difference([best.by_seed[seed] for seed in shared], [one.by_seed[seed] for seed in shared])
    return {
        "pairs": found.n,
        "to first": f"{found.difference:+.4g}",
        "95 %": f"{found.low:+.3g} to {found.high:+.3g}",
        "worth": "" if math.isnan(found.worth) else f"{found.worth:.3g}",
    }


def table_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a markdown table that reads well unrendered, too: no character entities.

    A cell that holds more than a number is code, which no markup acts in; its bars are escaped.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[markdown_cell(str(row.get(name, ""))) for name in columns] for row in rows]
    shown = [[markdown_cell(name) for name in columns], ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def markdown_cell(text: str) -> str:
    """A text as a cell of a markdown table: as it is where it is a plain word or number, else as code."""
    text = escape_control(text.encode("utf-8", "replace").decode()).replace("\n", "\\n")
    if re.fullmatch(r"[\w.+-]*", text) and "__" not in text:
        return text
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[0] == "`" or text[-1] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", "\\|")


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV, columns in order of first appearance."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plain(rows: Sequence[Mapping[str, Any]], head: str, rest: Sequence[str]) -> str:
    """The table for a terminal."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([head, "", *shown, *(["", *rest] if rest else [])])


def hparams(board: Path, outcomes: Sequence[Outcome], metric: str) -> None:
    """One entry a finished trial in TensorBoard's HPARAMS tab; what an earlier report wrote there goes."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(board, ignore_errors=True)
    done = [one for one in outcomes if one.state == "done"]
    if not done:
        return
    with SummaryWriter(str(board)) as writer:
        for one in done:
            values = {name: value_of(text) for name, text in one.trial.values.items()}
            writer.add_hparams(values, {f"final/{metric}": one.value}, run_name=one.trial.name)


def value_of(text: str) -> float | str | bool:
    """A number or a truth value where the text is one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text
