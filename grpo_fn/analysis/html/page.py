"""Self-contained HTML: one file, no script, no network. Numbers as colours, with the numbers still there to read."""

from collections.abc import Sequence

import torch
from einops import repeat
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor

from grpo_fn.analysis.html.templates import source, template

BLUE, ORANGE = (59, 110, 168), (214, 120, 70)


def html_page(title: str, sections: Sequence[str]) -> str:
    """The whole page; the sections are HTML."""
    return template("document.html.j2").render(
        title=title, style=source("page.css"), sections=[Markup(part) for part in sections]
    )


def html_section(title: str, note: str, *parts: str) -> str:
    """A heading, a paragraph that says how to read what follows, and that, which is HTML."""
    return PIECES.section(title, note, [Markup(part) for part in parts])


def diverging_color(x: float) -> tuple[int, int, int]:
    """Red, green and blue of a number: -1 orange, 0 white, 1 blue; beyond it stays."""
    share = min(1.0, abs(x))
    red, green, blue = (round(255 + share * (c - 255)) for c in (BLUE if x > 0 else ORANGE))
    return red, green, blue


def colour(x: float) -> str:
    """`diverging_color` for a style sheet."""
    return "rgb({}, {}, {})".format(*diverging_color(x))


def heat_map(values: Float[Tensor, "H W"], *, cell: int) -> Float[Tensor, "3 h w"]:
    """The numbers as squares of `cell` pixels on their colours, for a picture; channels from 0 to 1."""
    pixels = torch.tensor([[diverging_color(x) for x in row] for row in values.tolist()]) / 255
    return repeat(pixels, "h w c -> c (h i) (w j)", i=cell, j=cell)


def matrix(names: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """A square of numbers in [-1, 1] on their colours."""
    return PIECES.matrix(names, values)


def bars(names: Sequence[str], values: Sequence[float], *, digits: int) -> str:
    """A bar and its number for each name; the longest fills the width, negative ones have another colour."""
    return PIECES.bars(names, values, max(map(abs, values), default=0.0) or 1.0, digits)


def colored_tokens(texts: Sequence[str], values: Sequence[float | None], *, unit: float) -> str:
    """Tokens on the colour of value / unit, their numbers under the pointer; those without a value are the prompt."""
    return PIECES.tokens(texts, values, unit)


PIECES = template("pieces.html.j2").make_module({"colour": colour})
