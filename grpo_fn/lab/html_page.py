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


REPORT_STYLE = """<style>
body { max-width: 78rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption span { font-weight: 400; color: var(--soft); }
svg { width: 100%; height: auto; } .legend, .none { font-size: 12px; color: var(--soft); }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
td:has(.long) { overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .long { max-height: 14rem; overflow-y: auto; min-width: 16rem; }
</style>"""


def html_page(title: str, sections: Sequence[str]) -> str:
    """The whole page; the sections are HTML."""
    return template("document.html.j2").render(
        title=title, colors=source("colors.css"), style=source("page.css"), sections=[Markup(part) for part in sections]
    )


def html_section(title: str, note: str, *parts: str) -> str:
    """A heading, a paragraph that says how to read what follows, and that, which is HTML."""
    return PIECES.section(title, note, [Markup(part) for part in parts])


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wide: int | None = None) -> str:
    """Cells of HTML under a row of names; the column `wide` takes the width that is left."""
    widths = "".join(
        f"<col{' style=' + chr(34) + 'width:50%' + chr(34) if i == wide else ''}>" for i in range(len(head))
    )
    lines = ["".join(f"<th>{escape_text(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{value}</td>" for value in row) for row in rows]
    full = ' style="width:100%"' if wide is not None else ""
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table{full}><colgroup>{widths}</colgroup>\n{body}\n</table></div>'


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
