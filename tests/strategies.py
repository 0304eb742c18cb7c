"""Small shared hypothesis strategies. Every tensor is drawn element by element, so that failures shrink."""

import hypothesis.strategies as st
import torch
from torch import Tensor

Shape = int | tuple[int, ...]


def finite(bound: float = 100.0) -> st.SearchStrategy[float]:
    """Numbers in [-bound, bound] that float32 can hold too, so a test may cast and lose nothing."""
    return st.floats(-bound, bound, width=32)


def tensors(shape: Shape, elements: st.SearchStrategy | None = None) -> st.SearchStrategy[Tensor]:
    """float64 tensors of one shape; finite elements unless told otherwise."""
    filled = _filled(shape, finite() if elements is None else elements)
    return filled.map(lambda x: x.to(torch.float64))


def masks(shape: Shape) -> st.SearchStrategy[Tensor]:
    """bool tensors of one shape; all False and all True come up often enough to matter."""
    constant = st.sampled_from([False, True]).map(lambda b: torch.full(_sizes(shape), b))
    return st.one_of(_filled(shape, st.booleans()).map(lambda x: x.to(torch.bool)), constant)


def groups(elements: st.SearchStrategy | None = None) -> st.SearchStrategy[Tensor]:
    """float64 rewards [G] with G in 1..8; constant groups among them."""
    number = finite() if elements is None else elements
    sizes = st.integers(1, 8)
    mixed = sizes.flatmap(lambda g: tensors(g, number))
    constant = st.builds(lambda g, r: torch.full((g,), r, dtype=torch.float64), sizes, number)
    return st.one_of(mixed, constant)


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _filled(shape: Shape, elements: st.SearchStrategy) -> st.SearchStrategy[Tensor]:
    sizes = _sizes(shape)
    count = torch.Size(sizes).numel()

    def as_tensor(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).reshape(sizes)  # by default torch would round to float32

    return st.lists(elements, min_size=count, max_size=count).map(as_tensor)
