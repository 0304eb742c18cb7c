"""Small tensors: numbers, masks and groups of rewards, drawn element by element, so that failures shrink."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

Shape = int | tuple  # of integers; beartype would look at one drawn with `random`, which hypothesis warns of
Draw = Callable[..., Any]  # hypothesis's own type for it cannot be checked at run time
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"), 3e38)  # and one that float32 can just hold


@lru_cache(maxsize=1024)
def finite(bound: float = 100.0) -> st.SearchStrategy[float]:
    """Numbers in [-bound, bound] that float32 can hold too, so a test may cast and lose nothing."""
    return st.floats(-bound, bound, width=32)


@lru_cache(maxsize=1024)
def tensors(shape: Shape, elements: st.SearchStrategy | None = None) -> st.SearchStrategy[Tensor]:
    """float64 tensors of one shape; finite elements unless told otherwise."""
    filled = _filled(shape, finite() if elements is None else elements)
    return filled.map(lambda x: x.to(torch.float64))


@lru_cache(maxsize=1024)
def masks(shape: Shape) -> st.SearchStrategy[Tensor]:
    """bool tensors of one shape; all False and all True come up often enough to matter, the latter more often."""
    constant = st.sampled_from([False, True, True, True]).map(lambda b: torch.full(_sizes(shape), b))
    return st.one_of(_filled(shape, st.booleans()).map(lambda x: x.to(torch.bool)), constant)


@st.composite
def groups(
    draw: Draw, rewards: st.SearchStrategy[float] | None = None, *, least: int = 1, most: int = 8
) -> tuple[Tensor, Tensor]:
    """float64 rewards [G], valid [G], anything at all where invalid.

    Groups of one or of two different rewards come up, and groups in which nobody is valid.
    """
    number = finite() if rewards is None else rewards
    valid = draw(masks(draw(st.integers(least, most))))
    few = st.lists(number, min_size=1, max_size=2).map(st.sampled_from)
    one = draw(st.one_of(st.just(number), few))
    drawn = [draw(one if v else st.one_of(number, st.sampled_from(NO_NUMBERS))) for v in valid.tolist()]
    return torch.tensor(drawn, dtype=torch.float64), valid


def _sizes(shape: Shape) -> torch.Size:
    return torch.Size((shape,) if isinstance(shape, int) else shape)


def _filled(shape: Shape, elements: st.SearchStrategy) -> st.SearchStrategy[Tensor]:
    sizes = _sizes(shape)
    count = sizes.numel()
    return st.lists(elements, min_size=count, max_size=count).map(partial(_as_tensor, sizes))


def _as_tensor(sizes: torch.Size, values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(sizes)  # by default torch would round to float32
