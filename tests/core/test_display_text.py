"""Text that something else wrote drives no terminal and turns no writing direction; everything else of it stays."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from grpo_fn import command_line
from grpo_fn.core.display_text import CONTROL, escape_control


@given(st.text())
def test_controls_are_escapes_and_the_rest_is_as_it_was(text: str) -> None:
    shown = escape_control(text)
    assert all(c in "\t\n" or unicodedata.category(c) != "Cc" for c in shown)
    assert not any(unicodedata.bidirectional(c) in BIDI for c in shown)
    assert escape_control(shown) == shown
    assert (shown == text) == (CONTROL.search(text) is None)


BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def test_the_error_of_a_command_is_shown_so(capsys) -> None:
    def fail() -> int:
        raise ValueError("got \x1b[31m\u202e, expected text")

    assert command_line.exit_code(fail, interrupted="") == command_line.EXIT_BAD_INPUT
    assert capsys.readouterr().err == "error: got \\x1b[31m\\u202e, expected text\n"
