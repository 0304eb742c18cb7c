"""Pages open anywhere, show any text as text, and have the colours of one file, which can be read in both themes."""

import re
from html.parser import HTMLParser
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from signal_steps import looked_at, step

from grpo_fn.core.display_text import CONTROL, escape_control
from grpo_fn.lab import html_page as page
from grpo_fn.lab import token_page

LAB = Path(page.__file__).parent
COLORS = LAB / "html" / "colors.css"
LITERAL = re.compile(
    r"(?<![&\w])#[0-9a-fA-F]{3,8}\b|\b(?:rgba?|hsla?|oklch)\((?!var|\{)|:\s*(?:red|blue|orange|green|gr[ae]y)\s*[;\"'}]"
)


class Reader(HTMLParser):
    """Reads a page back: its text, its tags, and whether each that opens is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href", "action", "data") for name, _ in attrs)
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=12)
numbers = st.floats(-2, 2)
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td", "span", "div"}


@given(texts, st.lists(texts, min_size=1, max_size=4), st.data())
def test_text_is_shown_as_it_was_written_and_nothing_in_it_acts(title, names, data):
    row = st.lists(numbers, min_size=len(names), max_size=len(names))
    square = data.draw(st.lists(row, min_size=len(names), max_size=len(names)))
    sampled = data.draw(st.lists(st.none() | numbers, min_size=len(names), max_size=len(names)))
    parts = [page.matrix(names, square), page.colored_tokens(names, sampled, unit=1.0)]
    parts += [page.html_table(names, [[page.escape_text(name) for name in names]])]
    reader = Reader(page.html_page(title, [page.html_section(title, "a note <b>", *parts)]))
    assert reader.open == []
    assert reader.tags <= TAGS
    whole = "".join(reader.texts)
    assert all(escape_control(name) in whole for name in [title, *names])
    assert "a note <b>" in whole
    assert not CONTROL.search(whole)


def test_no_page_has_colours_of_its_own_and_every_page_has_those_of_the_file():
    assert LITERAL.search(COLORS.read_text())
    for path in [*LAB.glob("*.py"), *(LAB / "html").iterdir()]:
        assert path == COLORS or not LITERAL.search(path.read_text()), path
    shown = looked_at(*step(["a"], [["b", "c"]]))
    for html in (page.html_page("t", []), token_page.token_page(shown, title="t", note="n")):
        assert page.source("colors.css") in html


def luminance(value: str) -> float:
    """Relative luminance of WCAG 2.1."""
    if value.startswith("#"):
        digits = value[1:] if len(value) == 7 else "".join(2 * c for c in value[1:])
        parts = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
    else:
        parts = [int(x) for x in value.split()]
    r, g, b = (x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_stand_out_from_what_they_lie_on(theme):
    light, dark = (dict(re.findall(r"--([\w-]+):\s*([^;]+);", x)) for x in COLORS.read_text().split("@media"))
    values = light if theme == "light" else {**light, **dark}
    for under in ("page", "card"):
        for name, least in (("ink", 7), ("soft", 4.5), ("up", 3), ("down", 3), ("accent", 3)):
            low, high = sorted(luminance(values[x]) for x in (name, under))
            assert (high + 0.05) / (low + 0.05) >= least, (name, under)
