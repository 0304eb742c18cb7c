"""A token sampler of a user's own that does not fit is named with got and expected before anything is loaded."""

from collections.abc import Callable

import pytest
import torch

from grpo_fn.core import sampling
from grpo_fn.trainer.checks import try_out


def tokens_alone(logits, u, *, temperature):
    return logits.argmax(-1)


def as_floats(logits, u, *, temperature):
    return u, u


@pytest.mark.parametrize(
    ("token_sampler", "got"),
    [(tokens_alone, "a Tensor"), (as_floats, "a tensor of float32"), (torch.add, "TypeError: ")],
)
def test_a_token_sampler_that_does_not_fit_is_named(token_sampler: Callable, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^sections\.Sampling\.token_sampler: got {got}"):
        try_out.try_token_sampler(token_sampler, 0.7)
    try_out.try_token_sampler(sampling.categorical, 0.7)
