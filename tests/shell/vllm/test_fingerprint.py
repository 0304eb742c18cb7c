"""A fingerprint distinguishes weights, and does not depend on how they are laid out."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from grpo_fn.shell.vllm import fingerprint as module
from grpo_fn.shell.vllm.fingerprint import NOTHING, Fingerprint, weight_fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def weights(draw) -> Tensor:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(rows, columns, generator=generator).to(draw(st.sampled_from(DTYPES)))


@given(x=weights(), cut=st.integers(0, 6), padding=st.integers(0, 5), seed=st.integers(0, 99))
def test_layout_does_not_matter(x, cut, padding, seed):
    whole = weight_fingerprint(x)
    assert weight_fingerprint(x[:cut]) + weight_fingerprint(x[cut:]) == whole
    assert weight_fingerprint(x.T) == weight_fingerprint(x.reshape(-1)) == whole
    assert weight_fingerprint(torch.cat([x, x.new_zeros(padding, x.shape[1])])) == whole
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))
    assert weight_fingerprint(x.reshape(-1)[order]) == whole


@given(x=weights(), place=st.integers(0, 35))
def test_a_changed_bit_changes_the_fingerprint(x, place):
    other = x.clone().reshape(-1)
    bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    bits[place % x.numel()] ^= 1
    assert weight_fingerprint(other) != weight_fingerprint(x)


@given(x=weights(), step=st.floats(1e-3, 1.0))
def test_a_step_moved_from_one_element_to_another_changes_the_fingerprint(x, step):
    """The sum alone would not notice: the squares do."""
    first, second = x.reshape(-1)[0], x.reshape(-1)[-1]
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    moved = x.clone().reshape(-1)
    bits = moved.view(ints)
    if x.numel() > 1 and int(first.view(ints)) - int(second.view(ints)) not in (-1, 1):
        bits[0] += 1
        bits[-1] -= 1
        assert weight_fingerprint(moved).first == weight_fingerprint(x).first
        if int(first.view(ints)) + 1 != int(second.view(ints)):
            assert weight_fingerprint(moved) != weight_fingerprint(x)


@given(x=weights(), at_once=st.integers(1, 7))
def test_a_large_tensor_is_read_in_pieces(x, at_once):
    whole = weight_fingerprint(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "AT_ONCE", at_once)
        assert weight_fingerprint(x) == whole


@given(a=st.integers(-(2**63), 2**63 - 1), b=st.integers(-(2**63), 2**63 - 1))
def test_sums_wrap_around_and_nothing_adds_nothing(a, b):
    both = Fingerprint(a, b) + Fingerprint(b, a)
    assert both.first == both.second
    assert (both.first - a - b) % 2**64 == 0
    assert -(2**63) <= both.first < 2**63
    assert Fingerprint(a, b) + NOTHING == Fingerprint(a, b)
    assert len(str(both)) == 33


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_zero_counts_for_nothing_whatever_its_sign(dtype):
    assert (
        weight_fingerprint(torch.zeros(3, 4, dtype=dtype)) == weight_fingerprint(torch.zeros(0, dtype=dtype)) == NOTHING
    )
    assert weight_fingerprint((-torch.zeros(3, 4)).to(dtype)) == NOTHING
