"""Numbers as a picture of coloured squares, for TensorBoard; apart from the pages, which need no torch."""

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor

from grpo_fn.analysis.html.page import diverging_color


def heat_map(values: Float[Tensor, "H W"], *, cell: int) -> Float[Tensor, "3 h w"]:
    """The numbers as squares of `cell` pixels on their colours, for a picture; channels from 0 to 1."""
    pixels = torch.tensor([[diverging_color(x) for x in row] for row in values.tolist()]) / 255
    return repeat(pixels, "h w c -> c (h i) (w j)", i=cell, j=cell)
