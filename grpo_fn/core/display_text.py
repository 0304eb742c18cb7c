"""Text that a model or a data file wrote, made safe to show on a terminal or a page."""

import re

# Controls other than tab and line feed, and the marks that turn the writing direction: text can hide behind both.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Everything markdown or HTML could act on: ASCII punctuation. Letters, digits and other scripts are left readable.
ACTIVE = re.compile(r"[!-/:-@\[-`{-~]")
BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
UNPRINTABLE = re.compile(rf"{CONTROL.pattern}|[\ud800-\udfff\ufeff\ufffe\uffff]")


def escape_control(text: str) -> str:
    """The text with control characters and direction marks as escapes; anything else is left as it is."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def markdown_cell(text: str) -> str:
    """A table cell that renders as `text`, up to white space: no markup, no HTML, no link, no image, no table bar.

    Line breaks become <br>, control characters and lone surrogates U+FFFD.
    """
    lines = (UNPRINTABLE.sub("\ufffd", line) for line in BREAKS.split(text))
    return "<br>".join(ACTIVE.sub(lambda match: f"&#{ord(match[0])};", line) for line in lines)
