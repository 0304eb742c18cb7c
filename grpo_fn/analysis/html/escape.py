"""Text for a page, whatever it says: escaped, and with all that cannot be seen drawn.

The drawing is in the page's style (`signal_style`), so that what is copied from the page is the text.
"""

import re
import unicodedata
from html import escape

SPACES = re.compile(r"( {2,}| (?=\n|\Z))")
SHAPELESS = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")  # Unicode categories


def plain(text: str) -> str:
    """Text or the value of an attribute, escaped; what has no place in a file becomes U+FFFD."""
    return escape("".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") else c for c in text))


def visible(text: str) -> str:
    """Escaped text in which everything unseen is drawn: line breaks, tabs, spaces in a row or at the end, controls.

    What has no shape is in the page as its name alone: raw, it could end the file or turn the writing direction.
    """
    return "".join(
        '<i class="s"> </i>' * len(part) if k % 2 else "".join(map(drawn, part))
        for k, part in enumerate(SPACES.split(text))
    )


def drawn(c: str) -> str:
    """One character."""
    match c:
        case "\n":
            return '<i class="n"></i>\n'
        case "\t":
            return '<i class="tab"></i>\t'
        case " ":
            return c
    if unicodedata.category(c) in SHAPELESS:
        return f'<i class="c" data-c="{control(c)}"></i>'
    return escape(c)


def control(c: str) -> str:
    """A name for a character that has no shape."""
    code = ord(c)
    return chr(0x2400 + code) if code < 0x20 else f"U+{code:04X}"
