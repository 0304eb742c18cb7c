"""The head's Triton kernels, in Triton's interpreter on the CPU, are torch's operations; which are used is said."""

import warnings
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from test_logprob_head import dense, inputs, near, pulled
from torch.func import vjp

from grpo_fn.shell.model import logprob_model
from grpo_fn.shell.model.logprob_model import (
    TRIAL_ERROR,
    ChunkStats,
    PlainKernels,
    choose_head_kernels,
    kernels_for,
    linear_logp,
    linear_scores,
    trial_error,
    why_no_triton,
)

triton = pytest.importorskip("triton", reason="Triton's interpreter is not here: pip install triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("Triton compiles for a card here, and does not interpret", allow_module_level=True)

from interpreted_triton import patch_scalars  # noqa: E402

from grpo_fn.shell.model import head_triton  # noqa: E402

patch_scalars()

HALVES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # a unit of the last place, of numbers from 1 to 2
SHAPES = (st.integers(0, 5), st.integers(2, 70), st.integers(0, 99))
TEMPERATURES = st.sampled_from([1.0, 0.7, 2.5])
few = settings(max_examples=20)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of 16 logits: rows have several, and a part of one."""
    monkeypatch.setattr(head_triton, "BLOCK", 16)


def chunk(n: int, v: int, seed: int):
    """Logits of some size, targets, signals."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, v, generator=g) * 6
    return z, torch.randint(0, v, (n,), generator=g), *torch.randn(2, n, generator=g)


def both(z, target, temperature):
    """(kernels, logits as they leave them, statistics) of Triton's and of torch's."""
    for kernels in (head_triton.TritonKernels(), PlainKernels()):
        mine = z.clone()
        yield kernels, mine, kernels.reduce(mine, target, temperature=temperature, spare=kernels.spare(mine))


@given(*SHAPES, TEMPERATURES)
@few
def test_statistics_are_those_of_torchs_operations(n, v, seed, tau):
    z, target, *_ = chunk(n, v, seed)
    (kernels, left, got), (*_, expected) = both(z, target, tau)
    near(got, expected, 2e-6)
    assert torch.equal(left, z)
    assert torch.equal(kernels.logp(z, target, temperature=tau, spare=kernels.spare(z)), got.logp)
    right = (z.double() / tau).log_softmax(-1)
    near([got.entropy.double()], [-(right.exp() * right).sum(-1)], 5e-6)


@given(*SHAPES, TEMPERATURES, st.sampled_from([torch.float32, *HALVES]), st.booleans(), st.booleans())
@few
def test_the_gradient_is_that_of_torchs_operations(n, v, seed, tau, dtype, entropy, fresh):
    z, target, dlogp, dentropy = chunk(n, v, seed)
    found = []
    for kernels, left, stats in both(z, target, tau):
        at = (z.clone() if fresh else left, target, dlogp, dentropy if entropy else None, stats)
        found.append(kernels.slope(*at, temperature=tau, fresh=fresh, dtype=dtype))
    got, expected = found
    assert got.dtype is expected.dtype is dtype
    # The interpreter cuts halves off where a card rounds them: a unit of the last place.
    allowed = 2e-6 + HALVES.get(dtype, 0.0) * expected.float().abs()
    assert bool(((got.float() - expected.float()).abs() <= allowed).all())


@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 4), st.integers(1, 200), TEMPERATURES, st.integers(0, 99))
@few
def test_a_head_of_these_kernels_is_the_dense_one(n, v, d, elements, tau, seed):
    hidden, weight, target, dlogp, dentropy = inputs(n, v, d, torch.float32, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob_model, "kernels_for", lambda hidden: head_triton.TritonKernels())
        head = partial(linear_scores, target=target, temperature=tau, elements=elements)
        got = pulled(lambda h, w: head(h, w), hidden, weight, dlogp, dentropy)
        alone = linear_logp(hidden, weight, target, temperature=tau, elements=elements)
    expected = pulled(lambda h, w: dense(h, w, target, tau), hidden, weight, dlogp, dentropy)
    near(got[0], expected[0], 2e-6)
    near(got[1], expected[1], 2e-6)
    assert torch.equal(alone, got[0][0])


def test_functorch_has_torchs_operations_in_both_directions(monkeypatch):
    hidden, weight, target, *signals = inputs(6, 37, 3, torch.float32)
    fast = logprob_model.KernelChoice(head_triton.TritonKernels(), "")
    monkeypatch.setattr(logprob_model, "choose_head_kernels", lambda device: fast)
    head = partial(linear_scores, target=target, temperature=0.7, elements=2 * 37)
    out, pull = vjp(lambda h, w: head(h, w), hidden, weight)
    expected, expected_pull = vjp(lambda h, w: dense(h, w, target, 0.7), hidden, weight)
    near(out, expected, 2e-6)
    near(pull((*signals,)), expected_pull((*signals,)), 2e-6)


# -- which are used


def test_tensors_of_64_bits_and_wrapped_ones_have_torchs_operations(monkeypatch):
    fast = head_triton.TritonKernels()
    monkeypatch.setattr(logprob_model, "choose_head_kernels", lambda device: logprob_model.KernelChoice(fast, ""))
    assert kernels_for(torch.zeros(1)) is fast
    assert isinstance(kernels_for(torch.zeros(1, dtype=torch.float64)), PlainKernels)
    assert isinstance(kernels_for(torch.nn.Parameter(torch.zeros(1))), PlainKernels)


class OffKernels(PlainKernels):
    """Torch's operations with entropies that are a hundredth off."""

    def reduce(self, *args, **kwargs) -> ChunkStats:
        found = super().reduce(*args, **kwargs)
        return found._replace(entropy=found.entropy + 0.01)


class NanKernels(PlainKernels):
    """Torch's operations without a result."""

    def slope(self, *args, **kwargs):
        return super().slope(*args, **kwargs) * torch.nan


def test_the_trial_sees_wrong_numbers_and_none_and_lets_these_kernels_through(monkeypatch):
    monkeypatch.setattr(head_triton, "BLOCK", 4096)
    assert trial_error(head_triton.TritonKernels(), torch.device("cpu")) < TRIAL_ERROR / 10
    assert trial_error(OffKernels(), torch.device("cpu")) == pytest.approx(0.01, rel=0.01)
    assert trial_error(NanKernels(), torch.device("cpu")) == float("inf")
    assert trial_error(PlainKernels(), torch.device("cpu")) == 0.0


def no_driver():
    raise RuntimeError("no driver\nat all")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kernels": OffKernels}, "in a trial they were 0.01 off"),
        ({"kernels": no_driver}, "RuntimeError, no driver"),
        ({"env": "1"}, "TORCH_COMPILE_DISABLE is 1"),
    ],
)
def test_why_a_card_has_torchs_operations_is_said_by_name_and_warned_of_once(monkeypatch, changed, reason):
    monkeypatch.setattr(logprob_model.os, "environ", {"TORCH_COMPILE_DISABLE": changed.get("env", "0")})
    monkeypatch.setattr(head_triton, "TritonKernels", changed.get("kernels", PlainKernels))
    monkeypatch.setattr(logprob_model, "trial_error", lambda kernels, device: trial_error(kernels, torch.device("cpu")))
    card = torch.device("cuda", 5)
    assert why_no_triton(card) == reason
    choose_head_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match=reason):
        choice = choose_head_kernels(card)
    assert isinstance(choice.kernels, PlainKernels)
    assert choice.text == f"torch's operations ({reason})"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_head_kernels(card) is choice
    choose_head_kernels.cache_clear()


def test_a_card_on_which_the_trial_is_right_has_tritons(monkeypatch):
    monkeypatch.setattr(logprob_model.os, "environ", {})
    monkeypatch.setattr(logprob_model, "trial_error", lambda kernels, device: 1e-6)
    choose_head_kernels.cache_clear()
    choice = choose_head_kernels(torch.device("cuda", 6))
    assert isinstance(choice.kernels, head_triton.TritonKernels)
    assert choice.text == "Triton's kernels"
    choose_head_kernels.cache_clear()
