"""Self-contained HTML: one file, no script, no network. Numbers as colours, with the numbers still there to read."""

from collections.abc import Sequence
from html import escape

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor

BLUE, ORANGE = (59, 110, 168), (214, 120, 70)

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { max-width: 50rem; }
table { border-collapse: collapse; font-size: 12px; } td, th { padding: .2rem .45rem; text-align: right; }
th { font-weight: 600; white-space: nowrap; } td.name { text-align: left; }
.bar { display: inline-block; height: .8em; background: #3b6ea8; vertical-align: middle; }
.bar.negative { background: #b5502f; }
.tokens { font: 12px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens span { padding: .1em 0; border-radius: 2px; } .prompt { color: #7a828c; }
"""


def document(title: str, sections: Sequence[str]) -> str:
    """The whole page."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", *sections])
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def section(title: str, said: str, *parts: str) -> str:
    """A heading, a paragraph that says how to read what follows, and that."""
    return "\n".join([f"<h2>{escape(title)}</h2>", f"<p>{escape(said)}</p>", *parts])


def mixed(x: float) -> tuple[int, int, int]:
    """Red, green and blue of a number: -1 orange, 0 white, 1 blue; beyond it stays."""
    share = min(1.0, abs(x))
    red, green, blue = (round(255 + share * (c - 255)) for c in (BLUE if x > 0 else ORANGE))
    return red, green, blue


def colour(x: float) -> str:
    """`mixed` for a style sheet."""
    return "rgb({}, {}, {})".format(*mixed(x))


def heat(values: Float[Tensor, "H W"], *, cell: int) -> Float[Tensor, "3 h w"]:
    """The numbers as squares of `cell` pixels on their colours, for a picture; channels from 0 to 1."""
    pixels = torch.tensor([[mixed(x) for x in row] for row in values.tolist()]) / 255
    return repeat(pixels, "h w c -> c (h i) (w j)", i=cell, j=cell)


def ink(x: float) -> str:
    """A colour of text that can be read on `colour(x)`."""
    return "#fff" if x > 0.75 else "#1b1f24"


def matrix(names: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """A square of numbers in [-1, 1] on their colours."""
    head = "<tr><th></th>" + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>"
    rows = [
        f"<tr><th>{escape(name)}</th>"
        + "".join(f'<td style="background:{colour(x)};color:{ink(x)}">{x:.2f}</td>' for x in row)
        + "</tr>"
        for name, row in zip(names, values, strict=True)
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def bars(names: Sequence[str], values: Sequence[float], *, digits: int) -> str:
    """A bar and its number for each name; the longest fills the width, negative ones have another colour."""
    longest = max([abs(x) for x in values], default=0.0) or 1.0
    rows = [
        f'<tr><td class="name">{escape(name)}</td><td>{x:.{digits}f}</td><td class="name">'
        f'<span class="bar{" negative" * (x < 0)}" style="width:{round(400 * abs(x) / longest)}px"></span></td></tr>'
        for name, x in zip(names, values, strict=True)
    ]
    return f"<table>{''.join(rows)}</table>"


def tokens(texts: Sequence[str], values: Sequence[float | None], *, unit: float) -> str:
    """Tokens on the colour of value / unit, their numbers under the pointer; those without a value are the prompt."""
    spans = [
        f'<span class="prompt">{escape(text)}</span>'
        if x is None
        else f'<span style="background:{colour(x / unit if unit else 0.0)}" title="{x:.4g}">{escape(text)}</span>'
        for text, x in zip(texts, values, strict=True)
    ]
    return f'<div class="tokens">{"".join(spans)}</div>'
