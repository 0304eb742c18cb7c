"""What the annotations of the package say is held against every call that a test makes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from shape_checks import names_an_array
from torch import Tensor

from grpo_fn.config.resolve import comma_list
from grpo_fn.core import masked

Row = Float[Tensor, "t"]


def test_a_call_with_a_wrong_argument_is_refused_whether_arrays_are_among_them_or_not():
    with pytest.raises(TypeError, match="names"):
        comma_list(3)
    with pytest.raises(TypeCheckError, match="mask"):
        masked.mean(torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool), dim=1)


@pytest.mark.parametrize("annotation", [Row, Row | None, list[dict[str, Row]], Callable[[int, Row], None], "X"])
def test_an_array_is_found_wherever_it_is_in_an_annotation(annotation):
    assert names_an_array(annotation)


@pytest.mark.parametrize("annotation", [int, None, Tensor, Sequence[str], Callable[..., Tensor], dict[str, list[int]]])
def test_an_annotation_without_a_shape_is_no_array(annotation):
    assert not names_an_array(annotation)
