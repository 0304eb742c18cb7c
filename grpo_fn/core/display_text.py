"""Text that a model or a data file wrote, made safe to show on a terminal or a page."""

import re

# Controls other than tab and line feed, and the marks that turn the writing direction: text can hide behind both.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    """The text with control characters and direction marks as escapes; anything else is left as it is."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
