"""Self-contained HTML: one file, no script, no network. Numbers as colours, with the numbers still there to read."""

import re
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from grpo_fn.core.display_text import escape_control

FILES = PackageLoader("grpo_fn.analysis", "html")


ENVIRONMENT = Environment(
    loader=FILES,
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    finalize=lambda value: escape_control(value) if type(value) is str else value,  # not Markup, and no numbers
)


def template(name: str) -> Template:
    """The template of that file."""
    return ENVIRONMENT.get_template(name)


def source(name: str) -> Markup:
    """The file as it is, for a <style> or <script>."""
    return Markup(FILES.get_source(ENVIRONMENT, name)[0])


def _theme_color(name: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour of `colors.css`, in the light theme."""
    found = re.search(rf"--{name}: (\d+) (\d+) (\d+)", source("colors.css"))
    if found is None:
        raise ValueError(f"got colors.css without --{name}, wanted it as three numbers")
    red, green, blue = map(int, found.groups())
    return red, green, blue


UP, DOWN = _theme_color("up"), _theme_color("down")


def html_page(title: str, sections: Sequence[str]) -> str:
    """The whole page; the sections are HTML."""
    return template("document.html.j2").render(
        title=title, colors=source("colors.css"), style=source("page.css"), sections=[Markup(part) for part in sections]
    )


def html_section(title: str, note: str, *parts: str) -> str:
    """A heading, a paragraph that says how to read what follows, and that, which is HTML."""
    return PIECES.section(title, note, [Markup(part) for part in parts])


def diverging_color(x: float) -> tuple[int, int, int]:
    """Red, green and blue of a number: -1 red, 0 white, 1 blue; beyond it stays."""
    share = min(1.0, abs(x))
    red, green, blue = (round(255 + share * (c - 255)) for c in (UP if x > 0 else DOWN))
    return red, green, blue


def push_attributes(x: float, classes: str) -> Markup:
    """The class and style that lay an element on the colour of a number in [-1, 1]: blue above 0, red below."""
    side = "u" if x > 0 else "d" if x < 0 else ""
    return Markup(' class="{}" style="--s:{}"').format(f"{classes}{side}".strip(), f"{min(1.0, abs(x)):.3g}")


def matrix(names: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """A square of numbers in [-1, 1] on their colours."""
    return PIECES.matrix(names, values)


def bars(names: Sequence[str], values: Sequence[float], *, digits: int) -> str:
    """A bar and its number for each name; the longest fills the width, negative ones have another colour."""
    return PIECES.bars(names, values, max(map(abs, values), default=0.0) or 1.0, digits)


def colored_tokens(texts: Sequence[str], values: Sequence[float | None], *, unit: float) -> str:
    """Sampled tokens on the colour of dlogp / unit: blue below 0, which pushes the token up, red above."""
    return PIECES.tokens(texts, values, unit)


PIECES = template("pieces.html.j2").make_module({"push": push_attributes})
