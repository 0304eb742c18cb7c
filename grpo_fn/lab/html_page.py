"""Self-contained HTML: one file, no script, no network. Numbers as colours, with the numbers still there to read."""

import re
import unicodedata
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from grpo_fn.core.display_text import escape_control

FILES = PackageLoader("grpo_fn.lab", "html")
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


def html_page(title: str, sections: Sequence[str]) -> str:
    """The whole page; the sections are HTML."""
    return template("document.html.j2").render(
        title=title, colors=source("colors.css"), style=source("page.css"), sections=[Markup(part) for part in sections]
    )


def html_section(title: str, note: str, *parts: str) -> str:
    """A heading, a paragraph that says how to read what follows, and that, which is HTML."""
    return PIECES.section(title, note, [Markup(part) for part in parts])


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells of HTML under a row of names."""
    lines = ["".join(f"<th>{escape_text(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{value}</td>" for value in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'


def push_attributes(x: float, classes: str) -> Markup:
    """The class and style that lay an element on the colour of a number in [-1, 1]: blue above 0, red below."""
    side = "u" if x > 0 else "d" if x < 0 else ""
    return Markup(' class="{}" style="--s:{}"').format(f"{classes}{side}".strip(), f"{min(1.0, abs(x)):.3g}")


PIECES = template("pieces.html.j2").make_module({"push": push_attributes})
matrix = PIECES.matrix  # (names, values): a square of numbers in [-1, 1] on their colours
# (texts, values, unit): sampled tokens on the colour of dlogp / unit: blue below 0, pushed up, red above
colored_tokens = PIECES.tokens


# -- text, with all that cannot be seen drawn


UNSEEN = re.compile(r" {2,}| (?=\n|\Z)|[^ ]")  # all but the space between words
SHAPELESS = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")  # Unicode categories
DRAWN = {"\n": '<i class="n"></i>\n', "\t": '<i class="tab"></i>\t'}


def printable(text: str) -> str:
    """The text; what has no place in a file becomes U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def escape_text(text: str) -> str:
    """Escaped text, control characters and direction marks as in a log."""
    return str(escape(escape_control(text)))


def escape_visibly(text: str) -> Markup:
    """Escaped text in which everything unseen is drawn: line breaks, tabs, spaces in a row or at the end, controls.

    What has no shape is in the page as its name alone: raw, it could end the file or turn the writing direction.
    """
    return Markup(UNSEEN.sub(lambda match: visible_character(match[0]), text))


def visible_character(part: str) -> str:
    """One character, or spaces in a row."""
    if part in DRAWN or part[0] == " ":
        return DRAWN.get(part, '<i class="s"> </i>' * len(part))
    return f'<i class="c" data-c="{control(part)}"></i>' if unicodedata.category(part) in SHAPELESS else escape(part)


def control(c: str) -> str:
    """A name for a character that has no shape."""
    code = ord(c)
    return chr(0x2400 + code) if code < 0x20 else f"U+{code:04X}"
