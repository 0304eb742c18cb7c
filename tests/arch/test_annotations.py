"""What the annotations of the package say is held against every call that a test makes."""

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo_fn.config.resolve import comma_list
from grpo_fn.core import masked


def test_a_call_with_a_wrong_argument_is_refused_whether_arrays_are_among_them_or_not():
    with pytest.raises(TypeError, match="names"):
        comma_list(3)
    with pytest.raises(TypeCheckError, match="mask"):
        masked.mean(torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool), dim=1)
