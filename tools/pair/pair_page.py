"""One HTML page about a pairing: the differences as curves with their intervals, and the tables."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pair_spec import Pairing

from grpo_fn.lab import html_page as page
from grpo_fn.lab.html_page import escape_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))

import plots
from report import STYLE, table

if TYPE_CHECKING:
    from pair_report import Row


def report_page(
    asked: Pairing, rows: Sequence["Row"], tables: Sequence[tuple[str, Sequence[Mapping[str, str]]]], note: str
) -> str:
    """The whole page."""
    first = next(iter(asked.arms))
    shown = [(heading, html_table(cells)) for heading, cells in tables]
    return page.html_page(
        f"{', '.join(asked.arms)}: paired differences to {first}",
        [STYLE, curves(asked, rows, note), *(page.html_section(heading, "", made) for heading, made in shown)],
    )


def curves(asked: Pairing, rows: Sequence["Row"], note: str) -> str:
    """A figure for each metric: the difference of every arm to the first, in its interval."""
    tint = {arm: plots.colour(i) for i, arm in enumerate(list(asked.arms)[1:])}
    figures = []
    for metric in dict.fromkeys(row.metric for row in rows):
        lines = [
            line_of_arm(arm, tint[arm], [row for row in rows if (row.arm, row.metric) == (arm, metric)]) for arm in tint
        ]
        drawn = plots.plot(lines, label=f"paired differences of {metric}")
        figures.append(f"<figure><figcaption>{escape_text(metric)}</figcaption>{drawn}</figure>")
    plural = "s" if len(asked.seeds) > 1 else ""
    said = f"{len(asked.seeds)} seed{plural} ({escape_text(asked.seed_knob)}). {note}"
    return page.html_section("Differences", said, plots.legend(tint), f'<div class="plots">{"".join(figures)}</div>')


def line_of_arm(arm: str, colour: str, rows: Sequence["Row"]) -> plots.Line:
    """The curve of an arm."""
    return plots.Line(
        arm,
        colour,
        [row.step for row in rows],
        [row.paired.difference for row in rows],
        [row.paired.low for row in rows],
        [row.paired.high for row in rows],
    )


def html_table(cells: Sequence[Mapping[str, str]]) -> str:
    """The rows as a table of the report's kind."""
    head = [*dict.fromkeys(name for row in cells for name in row)]
    return table(head, [[escape_text(row.get(name, "")) for name in head] for row in cells])
