"""One colour language: colours stand in colors.css alone, every page begins with it, and what it names can be read."""

import re
from pathlib import Path

import pytest
from signal_steps import looked_at, step

from grpo_fn.lab import html_page as page
from grpo_fn.lab import token_page
from grpo_fn.lab.html_page import source

ROOT = Path(__file__).resolve().parents[2]
COLORS = ROOT / "grpo_fn" / "lab" / "html" / "colors.css"
LITERAL = re.compile(
    r"(?<![&\w])#[0-9a-fA-F]{3,8}\b|\b(?:rgba?|hsla?|oklch)\((?!var|\{)|:\s*(?:red|blue|orange|green|gr[ae]y)\s*[;\"'}]"
)
PAGES = [
    *(ROOT / "grpo_fn" / "lab").glob("*.py"),
    *(ROOT / "grpo_fn" / "lab" / "html").iterdir(),
]


def literals(text: str) -> list[str]:
    return LITERAL.findall(text)


def themes() -> list[dict[str, str]]:
    """The names and values of the light theme, and of the dark one."""
    light, dark = COLORS.read_text().split("@media")
    found = [dict(re.findall(r"--([\w-]+):\s*([^;]+);", part)) for part in (light, dark)]
    return [found[0], {**found[0], **found[1]}]


def luminance(value: str) -> float:
    """Relative luminance of WCAG 2.1."""
    if value.startswith("#"):
        digits = value[1:] if len(value) == 7 else "".join(2 * c for c in value[1:])
        parts = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
    else:
        parts = [int(x) for x in value.split()]
    r, g, b = (x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_no_page_has_colours_of_its_own() -> None:
    found = {
        path.name: literals(path.read_text())
        for path in PAGES
        if path.suffix in (".py", ".css", ".j2", ".js") and path != COLORS
    }
    assert {name: those for name, those in found.items() if those} == {}


@pytest.mark.parametrize(
    "text", ["color: #fff;", 'fill="#d67846"', "rgb(1, 2, 3)", "background: red;", "color:orange'"]
)
def test_a_colour_elsewhere_is_found(text: str) -> None:
    assert literals(text)


def test_every_page_includes_the_colours() -> None:
    shown = looked_at(*step(["a"], [["b", "c"]]))
    for html in (page.html_page("t", []), token_page.token_page(shown, title="t", note="n")):
        assert source("colors.css") in html


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_lines_stand_out_from_what_they_lie_on(theme: int) -> None:
    values = themes()[theme]
    series = [name for name in values if name.startswith("series-")]
    assert len(series) == 8
    for under in ("page", "card"):
        assert contrast(values["ink"], values[under]) >= 7
        assert contrast(values["soft"], values[under]) >= 4.5
        for name in ("up", "down", "accent", *series):
            assert contrast(values[name], values[under]) >= 3, (name, under)
