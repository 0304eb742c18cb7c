"""The test of an invariant: examples drawn by hypothesis, and claims that print the result and the expected value."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy
from torch import Tensor

UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # for what costs seconds each time that it fails
SHRUNK = (*UNSHRUNK, Phase.shrink)  # and not explained: that traces every line, which takes minutes here


def for_all(examples: SearchStrategy[Any], holds: Callable[[Any], None], *, phases: Sequence[Phase] = SHRUNK) -> None:
    """Call `holds` with examples, as many as the hypothesis profile asks for; what it raises shows the example.

    The example goes by the name of the function that defines `holds`. Where it holds when it is asked again with the
    same example, what it raised first is raised, and a note says so.
    """

    def proven(example: Any) -> None:
        holds(example)

    proven.__name__ = proven.__qualname__ = name_of(holds)
    expected = [phase for phase in settings().phases if phase in phases]
    # Time is no invariant here: the first call of a vmapped function alone takes longer than hypothesis's own deadline.
    patient = [*settings().suppress_health_check, HealthCheck.too_slow]
    once = settings(deadline=None, phases=expected, suppress_health_check=patient, report_multiple_bugs=False)
    try:
        once(given(example=examples)(proven))()
    except FlakyFailure as failure:
        first = failure.exceptions[0]
        first.add_note(failure.message)
        raise first from None


def holds_for(
    examples: SearchStrategy[Any] | Callable[..., SearchStrategy[Any]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make of `holds(f, example)` the check that it holds for all examples of a function f.

    The check takes f and whatever makes a strategy of `examples`, if that is a function.
    """

    def decorate(holds: Callable[..., None]) -> Callable[..., None]:
        @wraps(holds)
        def check(f: Any, *arguments: Any) -> None:
            for_all(examples(*arguments) if callable(examples) else examples, partial(holds, f))

        return check

    return decorate


def name_of(holds: Callable[[Any], None]) -> str:
    """The outermost function that it is defined in, its own where that is none."""
    function = holds.func if isinstance(holds, partial) else holds
    return getattr(function, "__qualname__", "holds").split(".")[0]


def simplest_example(examples: SearchStrategy[Any]) -> Any:
    """The example that hypothesis begins with."""
    once = settings(deadline=None, phases=[Phase.generate], max_examples=1, database=None)
    return find(examples, lambda example: True, settings=once)


def check_claim(holds: bool, what: str) -> None:
    """Check that a claim holds."""
    if not holds:
        raise AssertionError(what)


def assert_same(got: Tensor, expected: Tensor, what: str, *, tolerance: float) -> None:
    """Raises AssertionError, naming `what`, unless the tensors agree in shape, dtype and value; nan equals nan."""
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda detail: f"{what}: {detail}"
    )
