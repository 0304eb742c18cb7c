"""The hypothesis profile in force with a few things changed, for checks that draw their examples inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import settings


@contextmanager
def profile(**changes: Any) -> Iterator[None]:
    """Within it, hypothesis's defaults are those of the current profile but for these."""
    before = settings.get_current_profile_name()
    settings.register_profile("changed", parent=settings.default, **changes)
    settings.load_profile("changed")
    try:
        yield
    finally:
        settings.load_profile(before)


def quarter() -> int:
    """A quarter of the examples, for what is checked of many functions at many settings."""
    return max(5, settings.default.max_examples // 4)
