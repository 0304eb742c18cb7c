"""A token sampler, called on a few logits before anything expensive starts, and the words for a function that fails."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_fn.core.partials import function_and_knobs


def try_token_sampler(token_sampler: Callable[..., Any], temperature: float) -> None:
    """Raise ValueError unless the token sampler draws a token and its log-prob for every row.

    Args:
        token_sampler: (logits `[B, V]`, u `[B]`, *, temperature) -> (token `[B]`, logp `[B]`).
        temperature: that of the sampling.
    """
    logits, u = torch.linspace(-1, 1, 20).view(4, 5), torch.tensor([0.1, 0.4, 0.6, 0.9])
    names = [*own_functions(token_sampler)]
    users = [name for name in names if not name.startswith("grpo_fn.")]
    try:
        draws = token_sampler(logits, u, temperature=temperature)
        if isinstance(draws, tuple) and len(draws) == 2:
            fault = wrong_tensor(draws[0], (4,), torch.long) or wrong_tensor(draws[1], (4,), torch.float32)
        else:
            fault = shown_type(draws)
    except Exception as error:
        if isinstance(error, ValueError) and not users:
            raise  # grpo_fn's own say what they got and expected
        fault = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if fault is not None:
        raise ValueError(
            f"sections.Sampling.token_sampler: got {fault} from {', '.join(users or names[:1])} on a toy step, wanted "
            "(token [B] of integers, logp [B] in nats) for (logits [B, V], u [B])"
        )


def wrong_tensor(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """What is wrong with a tensor that is to have this shape and kind of numbers, and to be finite; None if nothing."""
    if not isinstance(found, Tensor):
        return shown_type(found)
    kinds = (found.dtype is torch.bool, found.is_floating_point())
    if kinds != (dtype is torch.bool, dtype.is_floating_point):
        return f"a tensor of {str(found.dtype).removeprefix('torch.')}"
    if tuple(found.shape) != shape:
        return f"a tensor of shape {list(found.shape)}"
    return None if found.isfinite().all() else "a tensor with numbers that are not finite"


def shown_type(found: Any) -> str:
    """The type of what was returned, and its length where it is a tuple."""
    return f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple) else "")


def own_functions(value: Any) -> Iterator[str]:
    """The functions in a knob's value, at any depth, as module.name; those of a user come without ours."""
    if callable(value):
        function, knobs = function_and_knobs(value)
        yield f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
        value = [*knobs.values()]
    for item in value if isinstance(value, list | tuple) else ():
        yield from own_functions(item)
