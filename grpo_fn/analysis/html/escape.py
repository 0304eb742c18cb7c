"""Text for a page, whatever it says, with all that cannot be seen drawn.

The drawing is in the page's style (`token_page.css`), so that what is copied from the page is the text.
"""

import re
import unicodedata

from markupsafe import Markup, escape

from grpo_fn.core.display_text import escape_control

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
