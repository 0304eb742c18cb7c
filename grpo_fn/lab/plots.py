"""Curves as SVG for a page without scripts: some lines over the same axes, each number under the pointer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from grpo_fn.lab.html_page import escape_text

COLOURS = tuple(f"var(--series-{i})" for i in range(8))  # of colors.css
WIDTH, HEIGHT = 560.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 12.0, 26.0
POINTS = 300  # of one line; more are averaged
Point = tuple[float, float]


class Line(NamedTuple):
    """A curve. What is not finite leaves a gap; `low` and `high` are the ends of an interval around `y`, or empty."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def series_color(i: int) -> str:
    """The colour of the i-th of several things."""
    return COLOURS[i % len(COLOURS)]


def svg_plot(lines: Sequence[Line], *, label: str) -> str:
    """The lines over common axes; where none has a number, that is said. `label` is what a screen reader says."""
    lines = [thin_line(line) for line in lines]
    x = [x for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    y = [y for line in lines for y in (*line.y, *line.low, *line.high) if math.isfinite(y)]
    if not x:
        return '<p class="none">not measured</p>'
    across, up = axis_ticks(min(x), max(x), whole=True), axis_ticks(min(y), max(y), whole=False)
    place = Place(Span(min(x), max(x)), Span(min(*up, *y), max(*up, *y)))
    drawn = [*svg_axes(place, across, up), *(part for line in lines for part in svg_curve(line, place))]
    inside = "\n".join(drawn)
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape_text(label)}">{inside}</svg>'


def html_figure(lines: Sequence[Line], caption: str, *, label: str) -> str:
    """A plot under its caption, which is HTML."""
    return f"<figure><figcaption>{caption}</figcaption>{svg_plot(lines, label=label)}</figure>"


def legend(names: Mapping[str, str]) -> str:
    """The colour of each name."""
    return f'<p class="legend">{" ".join(f"{swatch(c)} {escape_text(name)}" for name, c in names.items())}</p>'


def swatch(color: str) -> str:
    """A small square of the colour."""
    return f'<span style="display:inline-block;width:.8em;height:.8em;background:{color}"></span>'


def stacked_bars(parts: Mapping[str, float], colours: Mapping[str, str], *, full: float) -> str:
    """Non-negative parts end to end, a width of 1 for `full`; their numbers under the pointer."""
    shown = [(name, value) for name, value in parts.items() if value > 0]
    spans = [
        f'<span style="display:inline-block;height:1em;width:{100 * value / full:.2f}%;background:{colours[name]}" '
        f'title="{escape_text(name)}: {value:.3g}"></span>'
        for name, value in shown
    ]
    return f'<div style="white-space:nowrap;line-height:1;font-size:0.9rem">{"".join(spans)}</div>'


class Span(NamedTuple):
    """The numbers that an axis reaches over."""

    low: float
    high: float


class Place(NamedTuple):
    """Where numbers lie on the picture."""

    x: Span
    y: Span

    def __call__(self, x: float, y: float) -> Point:
        """Pixels from the left and from the top."""
        across, up = share_of_span(x, self.x), share_of_span(y, self.y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def share_of_span(x: float, span: Span) -> float:
    """How far x is along the span, from 0 to 1; the middle where that has no length."""
    half = span.high / 2 - span.low / 2  # of two large numbers of opposite sign the difference may overflow
    return (x / 2 - span.low / 2) / half if half > 0 else 0.5


def axis_ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """About five round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]; one for an empty range."""
    width = high - low
    if not 0 < width < math.inf or width / 5 < math.ulp(max(abs(low), abs(high))):
        return [low, high] if low < high else [low]
    unit = 10.0 ** math.floor(math.log10(width / 5))
    step = next((unit * k for k in (1, 2, 5, 10) if unit and unit * k >= width / 5), 0.0)
    step = max(step, 1.0) if whole else step
    if not step:  # too small for a power of ten
        return [low, high]
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low, high]


def svg_axes(place: Place, across: Sequence[float], up: Sequence[float]) -> Iterator[str]:
    """A line across for every tick of y, and the numbers."""
    for y in up:
        left, at = place(place.x.low, y)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" style="stroke:var(--line)"/>'
        yield svg_text(LEFT - 6, at + 4, f"{y:.4g}", "end")
    for x in across:
        left, _ = place(x, place.y.low)
        yield svg_text(left, HEIGHT - 8, f"{x:.6g}", "middle")


def svg_text(x: float, y: float, words: str, anchor: str) -> str:
    """Small grey words."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" style="fill:var(--soft)">{words}</text>'
    )


def svg_curve(line: Line, place: Place) -> Iterator[str]:
    """The interval, the line in pieces without gaps, and a dot with its number for every point."""
    if line.low:
        for piece in finite_runs(line.x, line.low, line.high):
            around = [place(x, low) for x, low, _ in piece] + [place(x, high) for x, _, high in reversed(piece)]
            yield f'<polygon points="{svg_points(around)}" style="fill:{line.color}" fill-opacity="0.18"/>'
    for piece in finite_runs(line.x, line.y):
        points = svg_points([place(*p) for p in piece])
        yield f'<polyline points="{points}" fill="none" style="stroke:{line.color}" stroke-width="1.5"/>'
        for x, y in piece:
            left, top = place(x, y)
            said = escape_text(f"{line.name}, step {x:.6g}: {y:.4g}")
            at = f'cx="{left:.1f}" cy="{top:.1f}" r="2" style="fill:{line.color}"'
            yield f"<circle {at}><title>{said}</title></circle>"


def finite_runs(*columns: Sequence[float]) -> list[list[tuple[float, ...]]]:
    """The points of which all numbers are finite, as runs of neighbours."""
    points = zip(*columns, strict=True)
    return [list(run) for finite, run in groupby(points, lambda p: all(map(math.isfinite, p))) if finite]


def svg_points(points: Sequence[Point]) -> str:
    """Points as SVG writes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def thin_line(line: Line) -> Line:
    """The line with neighbours averaged so that at most POINTS are left."""
    size = math.ceil(len(line.x) / POINTS)
    if size <= 1:
        return line
    return line._replace(**{name: average_neighbours(getattr(line, name), size) for name in ("x", "y", "low", "high")})


def average_neighbours(values: Sequence[float], size: int) -> list[float]:
    """Means of the finite ones among every `size` values; NaN where there are none."""
    parts = [[v for v in values[i : i + size] if math.isfinite(v)] for i in range(0, len(values), size)]
    return [math.fsum(v / len(part) for v in part) if part else math.nan for part in parts]
