"""A curve says its numbers, stays inside its picture, leaves gaps where there is no number, and is always valid XML."""

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.lab.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    axis_ticks,
    legend,
    stacked_bars,
    svg_plot,
    thin_line,
)

numbers = st.floats(width=64) | st.integers(-1000, 1000).map(float)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=9)


def drawn(svg: str) -> dict[str, list[ET.Element]]:
    """The picture's elements by tag."""
    root = ET.fromstring(svg)
    return {tag: list(root.iter(tag)) for tag in ("line", "polyline", "polygon", "circle", "title", "text")}


def steps(count: int) -> list[float]:
    return [float(i) for i in range(count)]


def points(element: ET.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in element.attrib["points"].split()]


@given(names, st.lists(numbers, min_size=1, max_size=40))
def test_every_finite_number_has_a_dot_inside_the_axes(name: str, values: list[float]) -> None:
    svg = svg_plot([Line(name, "#123456", steps(len(values)), values)], label=name)
    known = [(x, y) for x, y in zip(steps(len(values)), values, strict=True) if math.isfinite(y)]
    if not known:
        assert "not measured" in svg
        return
    found = drawn(svg)
    assert [title.text for title in found["title"]] == [f"{name}, step {x:.6g}: {y:.4g}" for x, y in known]
    for dot in found["circle"]:
        assert LEFT - 0.1 <= float(dot.attrib["cx"]) <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= float(dot.attrib["cy"]) <= HEIGHT - BOTTOM + 0.1
    assert sum(len(points(piece)) for piece in found["polyline"]) == len(known)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_a_larger_number_is_never_lower(values: list[float]) -> None:
    dots = drawn(svg_plot([Line("a", "#000", steps(len(values)), values)], label="a"))["circle"]
    places = sorted((y, -float(dot.attrib["cy"])) for y, dot in zip(values, dots, strict=True))
    heights = [height for _, height in places]
    assert all(after >= before - 0.11 for before, after in pairwise(heights))


def test_a_number_that_is_missing_leaves_a_gap_and_an_interval_is_an_area() -> None:
    y = [1.0, 2.0, math.nan, 3.0]
    found = drawn(svg_plot([Line("a", "#000", steps(4), y, [v - 1 for v in y], [v + 1 for v in y])], label="a"))
    assert [len(points(piece)) for piece in found["polyline"]] == [2, 1]
    assert [len(points(area)) for area in found["polygon"]] == [4, 2]
    first = points(found["polygon"][0])
    assert first[0][1] > points(found["polyline"][0])[0][1] > first[-1][1]  # pixels count from the top


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
def test_ticks_are_few_ordered_and_inside(a: float, b: float, whole: bool) -> None:
    low, high = min(a, b), max(a, b)
    found = axis_ticks(low, high, whole=whole)
    assert 1 <= len(found) <= 12
    assert found == sorted(found)
    slack = (high / 2 - low / 2) * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(("low", "high", "expected"), [(0.0, 1.0, 6), (0.0, 30.0, 4), (-5e-8, 1e-7, 4), (2.0, 2.0, 1)])
def test_ticks_are_round(low: float, high: float, expected: int) -> None:
    assert len(axis_ticks(low, high, whole=False)) == expected


@given(st.integers(POINTS + 1, 5 * POINTS))
def test_a_long_line_keeps_its_mean_and_few_points(count: int) -> None:
    line = thin_line(Line("a", "#000", steps(count), [float(i % 7) for i in range(count)]))
    assert len(line.x) == len(line.y) <= POINTS
    assert min(line.y) >= 0
    assert max(line.y) <= 6
    assert list(line.x) == sorted(line.x)


def test_names_are_text_and_bars_are_as_long_as_their_share() -> None:
    assert "<b>" not in legend({"<b>": "#000"})
    bar = stacked_bars(
        {"train": 3.0, "score": 1.0, "none": 0.0}, dict.fromkeys(("train", "score", "none"), "#000"), full=8.0
    )
    assert "width:37.50%" in bar
    assert "width:12.50%" in bar
    assert "none" not in bar
