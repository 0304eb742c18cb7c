"""Text for a terminal or a page: what a model or a data file wrote, made safe, and the name that was meant."""

import difflib
import re
from collections.abc import Iterable

# Controls other than tab and line feed, and the marks that turn the writing direction: text can hide behind both.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Everything markdown or HTML could act on: ASCII punctuation. Letters, digits and other scripts are left readable.
ACTIVE = re.compile(r"[!-/:-@\[-`{-~]")
BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
UNPRINTABLE = re.compile(rf"{CONTROL.pattern}|[\ud800-\udfff\ufeff\ufffe\uffff]")


def escape_control(text: str) -> str:
    """The text with control characters and direction marks as escapes; anything else is left as it is."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def short_line(text: str, most: int) -> str:
    """At most so many characters of the text on one line, its beginning and its end; `most` counts before escapes."""
    half = (most - 5) // 2
    shown = text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
    return escape_control(shown).replace("\n", r"\n")


def markdown_cell(text: str) -> str:
    """A table cell that renders as `text`, up to white space: no markup, no HTML, no link, no image, no table bar.

    Line breaks become <br>, control characters and lone surrogates U+FFFD.
    """
    lines = (UNPRINTABLE.sub("\ufffd", line) for line in BREAKS.split(text))
    return "<br>".join(ACTIVE.sub(lambda match: f"&#{ord(match[0])};", line) for line in lines)


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """`; did you mean X?`, ignoring case, or nothing when no choice is near.

    Of a file the name counts, not the folder nor the suffix: `run/nothing.gin` is not near `run/math.gin`.
    """
    stems: dict[str, list[str]] = {}
    for choice in sorted({*choices} - {name}):
        stems.setdefault(_stem(choice), []).append(choice)
    (near,) = difflib.get_close_matches(_stem(name), stems, n=1) or [None]
    if near is None:
        return ""
    return f"; did you mean {max(stems[near], key=lambda choice: difflib.SequenceMatcher(None, name, choice).ratio())}?"


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".gin").lower()
