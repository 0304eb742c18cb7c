"""Pages that open anywhere and show text as text, whatever it says."""

from html.parser import HTMLParser

import hypothesis.strategies as st
from hypothesis import given

from grpo_fn.core.display_text import CONTROL, escape_control
from grpo_fn.lab import html_page as page

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Reads a page back: its text, its tags, and whether each that opens is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=12)
numbers = st.floats(-2, 2)


@given(texts, st.lists(st.tuples(texts, numbers), min_size=1, max_size=4), st.data())
def test_what_is_written_is_what_is_read_and_nothing_acts(title, rows, data):
    names, values = [name for name, _ in rows], [x for _, x in rows]
    square = data.draw(
        st.lists(st.lists(numbers, min_size=len(names), max_size=len(names)), min_size=len(names), max_size=len(names))
    )
    sampled = data.draw(st.lists(st.one_of(st.none(), numbers), min_size=len(names), max_size=len(names)))
    parts = [
        page.matrix(names, square),
        page.bars(names, values, digits=3),
        page.colored_tokens(names, sampled, unit=1.0),
    ]
    reader = Reader(page.html_page(title, [page.html_section(title, "said <b>", *parts)]))
    assert reader.open == []
    assert set(reader.tags) <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "table",
        "tr",
        "th",
        "td",
        "span",
        "div",
    }
    whole = "".join(reader.texts)
    assert all(escape_control(name) in whole for name in [title, *names])
    assert "said <b>" in whole
    assert not CONTROL.search(whole)
