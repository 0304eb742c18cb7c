"""The chunked head is the dense one: value and gradient, whatever the chunk size, and never a whole [N, V]."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS
from hypothesis import given
from policies import local
from torch import Tensor
from torch.func import grad, jacrev, vjp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fn.core.batch import given_batch
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model import logprob_model
from grpo_fn.shell.model.logprob_model import (
    CPU_CHUNK,
    HeadInput,
    chunk_elements,
    dense_energy,
    dense_scores,
    linear_energy,
    linear_logp,
    linear_scores,
    relative_entropies,
)

TEMPERATURES = st.sampled_from([1.0, 0.7, 2.5])


def inputs(n: int, v: int, d: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """hidden [N, D], weight [V, D], target [N] and cotangents for logp and entropy."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(k, d, generator=g, dtype=torch.float64).to(dtype) for k in (n, v))
    wide = torch.promote_types(dtype, torch.float32)
    cotangents = (torch.randn(n, generator=g, dtype=torch.float64).to(wide) for _ in range(2))
    return hidden, weight, torch.randint(0, v, (n,), generator=g), *cotangents


def dense(hidden, weight, target, temperature):
    return dense_scores(hidden @ weight.T, target, temperature=temperature)


def chunked(hidden, weight, target, temperature, elements=64):
    return linear_scores(hidden, weight, target, temperature=temperature, elements=elements)


def pulled(f, hidden, weight, dlogp, dentropy):
    """Values and gradients of f(hidden, weight) -> (logp, entropy); a cotangent of None is left out."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = f(hidden, weight)
    pairs = [(y, c) for y, c in zip(out, (dlogp, dentropy), strict=True) if c is not None]
    grads = torch.autograd.grad([y for y, _ in pairs], [hidden, weight], [c for _, c in pairs])
    return [y.detach() for y in out], list(grads)


def near(got, expected, tolerance):
    """Agreement relative to the largest entry of what is expected, or to 1: inputs and cotangents are of that size."""
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        scale = max(1.0, float(y.abs().max())) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@given(
    st.sampled_from(["logp", "entropy", "both"]),
    *(st.integers(0, 9), st.integers(2, 11), st.integers(1, 4), st.integers(1, 200), TEMPERATURES, st.integers(0, 99)),
)
def test_values_and_gradients_are_those_of_the_dense_head(dtype, tolerance, which, n, v, d, elements, tau, seed):
    hidden, weight, target, dlogp, dentropy = inputs(n, v, d, dtype, seed)
    cotangents = (None if which == "entropy" else dlogp, None if which == "logp" else dentropy)
    got = pulled(lambda h, w: chunked(h, w, target, tau, elements), hidden, weight, *cotangents)
    expected = pulled(lambda h, w: dense(h, w, target, tau), hidden, weight, *cotangents)
    near(got[0], expected[0], tolerance)
    near(got[1], expected[1], tolerance)
    knobs = {"temperature": tau, "elements": elements}
    assert torch.equal(linear_logp(hidden, weight, target, **knobs), got[0][0])


@given(TEMPERATURES, st.integers(1, 60))
def test_functorch_differentiates_it_like_the_dense_head(tau, elements):
    hidden, weight, target, dlogp, dentropy = inputs(6, 7, 3, torch.float64)
    out, pull = vjp(lambda h, w: chunked(h, w, target, tau, elements), hidden, weight)
    expected_out, expected_pull = vjp(lambda h, w: dense(h, w, target, tau), hidden, weight)
    near(out, expected_out, 1e-13)
    near(pull((dlogp, dentropy)), expected_pull((dlogp, dentropy)), 1e-13)
    slopes = [grad(lambda w, f=f: (f(hidden, w, target, tau)[0] * dlogp).sum())(weight) for f in (chunked, dense)]
    near(slopes[:1], slopes[1:], 1e-13)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_hidden_states_are_seen_not_hidden(broken):
    hidden, weight, target, *_ = inputs(3, 5, 2, torch.float32)
    hidden[1, 0] = broken
    logp, entropy = chunked(hidden, weight, target, 1.0)
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)])
@given(st.integers(0, 99), TEMPERATURES)
def test_halves_are_float32_up_to_the_rounding_of_their_logits(dtype, half_unit, seed, tau):
    hidden, weight, target, dlogp, dentropy = inputs(8, 50, 16, dtype, seed)
    half = pulled(lambda h, w: chunked(h, w, target, tau, 100), hidden, weight, dlogp, dentropy)
    full = pulled(lambda h, w: dense(h, w, target, tau), hidden.float(), weight.float(), dlogp, dentropy)
    assert [x.dtype for x in half[0]] == [torch.float32] * 2
    assert [x.dtype for x in half[1]] == [dtype] * 2
    # A logit of about 4 sqrt(16) is rounded: half a unit of its last bit, over tau; the largest of fifty, more.
    largest = float((hidden.float() @ weight.float().T).abs().max())
    slack = 2 * largest * half_unit / tau
    # The token's own logit and, at worst as much and the other way, the mean of the others'.
    torch.testing.assert_close(half[0][0], full[0][0], rtol=0, atol=2 * slack)
    torch.testing.assert_close(half[0][1], full[0][1], rtol=0, atol=slack * 4)  # times log V
    near([x.float() for x in half[1]], full[1], 4 * slack)


def test_a_vocabulary_of_150k_costs_float32_no_digits():
    """Against float64; torch's own log_softmax of these logits is off by 1e-5 and more on a CPU.

    Gradients are products with probabilities that follow rounded logits, summed by MKL over 151,936 terms: off by 2e-6,
    or by 1e-4 where a side is below 16.
    """
    hidden, weight, target, dlogp, dentropy = inputs(32, 151_936, 16, torch.float32)
    given = (hidden, weight, dlogp, dentropy)
    got = pulled(lambda h, w: chunked(h, w, target, 1.0, 16 * 151_936), *given)
    expected = pulled(lambda h, w: dense(h, w, target, 1.0), *(x.double() for x in given))
    for found, right, tolerance in zip(got, expected, (1e-6, 1e-5), strict=True):
        near([x.double() for x in found], right, tolerance)


@given(st.integers(1, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_head_that_does_not_train_hands_the_signal_on_and_has_no_gradient(elements, dtype):
    """As under adapters."""
    hidden, weight, target, dlogp, dentropy = inputs(5, 6, 3, dtype)
    trained = pulled(lambda h, w: chunked(h, w, target, 0.7, elements), hidden, weight, dlogp, dentropy)
    hidden.requires_grad_()
    torch.autograd.backward(chunked(hidden, weight, target, 0.7, elements), (dlogp, dentropy))
    assert torch.equal(hidden.grad, trained[1][0])
    assert weight.grad is None


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation under it returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def peak(head) -> int:
    """The largest tensor of a forward and backward pass with N = 64, V = 96, D = 2."""
    hidden, weight, target, dlogp, dentropy = inputs(64, 96, 2, torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    with Largest() as largest:
        torch.autograd.backward(head(hidden, weight, target), (dlogp, dentropy))
    return largest.elements


@pytest.mark.parametrize("rows", [1, 8])
def test_no_more_logits_than_allowed_exist_at_once(rows):
    assert peak(lambda h, w, t: dense(h, w, t, 1.0)) == 64 * 96  # so the measure works
    assert peak(lambda h, w, t: chunked(h, w, t, 1.0, rows * 96)) == max(rows * 96, 96 * 2)


# -- halves whose products are float32, as CUDA has them


@pytest.fixture
def wide(monkeypatch):
    """The CPU with CUDA's products of halves that give float32; which of them ran."""
    ran = []
    library = torch.library.Library("aten", "IMPL")

    def mm(a, b, dtype, *, out):
        ran.append("mm")
        return out.copy_(a.to(dtype) @ b.to(dtype))

    def addmm(total, a, b, dtype, *, beta=1, alpha=1, out):
        ran.append("addmm")
        return out.copy_(beta * total + alpha * (a.to(dtype) @ b.to(dtype)))

    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(logprob_model, "_wide_products", lambda halves: True)
    yield ran
    library._destroy()


@pytest.mark.parametrize("elements", [64, 10**6])
def test_products_in_float32_take_the_rounding_of_the_logits_away(wide, elements, monkeypatch):
    hidden, weight, target, *signals = inputs(40, 53, 16, torch.bfloat16)
    hidden = hidden * 4  # logits of some 16, which bfloat16 has to a sixteenth
    precise = [x.double() for x in (hidden, weight, *signals)]
    exact = pulled(lambda h, w: dense(h, w, target, 1.0), *precise)
    got = pulled(lambda h, w: chunked(h, w, target, 1.0, elements), hidden, weight, *signals)
    assert {*wide} == {"mm", "addmm"}
    monkeypatch.setattr(logprob_model, "_wide_products", lambda halves: False)
    rounded = pulled(lambda h, w: chunked(h, w, target, 1.0, elements), hidden, weight, *signals)
    for x, y, z in zip(got[0], rounded[0], exact[0], strict=True):
        torch.testing.assert_close(x.double(), z, rtol=0, atol=2e-5)
        assert (x.double() - z).abs().max() < 0.01 * (y.double() - z).abs().max()
    for x, z in zip(got[1], exact[1], strict=True):
        assert float((x.double() - z).norm() / z.norm()) < 0.01


# -- energies


@given(st.integers(0, 9), st.integers(2, 11), st.integers(1, 4), st.integers(1, 200), TEMPERATURES, st.integers(0, 99))
def test_a_tokens_energy_is_the_squared_norm_of_its_score_in_the_logits(n, v, d, elements, tau, seed):
    hidden, weight, target, *_ = inputs(n, v, d, torch.float64, seed)
    logits = hidden @ weight.T
    slopes = [jacrev(lambda z, a=a: (z / tau).log_softmax(-1)[a])(row) for row, a in zip(logits, target, strict=True)]
    expected = torch.stack([(tau * slope).square().sum() for slope in slopes]) if n else logits.new_empty(0)
    near([linear_energy(hidden, weight, target, temperature=tau, elements=elements)], [expected], 1e-13)
    near([dense_energy(logits, target, temperature=tau)], [expected], 1e-13)


def test_the_energy_of_a_sure_token_keeps_its_digits_in_float32():
    """1 - 2 p + sum p^2 as written is 0 or rounding there, of either sign."""
    logits = torch.tensor([[20.0, 0.0, 0.0]])
    energy = linear_energy(logits, torch.eye(3), torch.tensor([0]), temperature=1.0, elements=9)
    small = torch.tensor(-20.0, dtype=torch.float64).exp()  # of each of two others: (2 x)^2 + 2 x^2
    torch.testing.assert_close(energy.double(), (6 * small.square())[None], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("device", "gigabytes", "bound", "expected"),
    [("cpu", 0, 2**28, CPU_CHUNK), ("cuda", 8, 2**28, 2**25), ("cuda", 8, 2**22, 2**22)],
)
def test_a_chunk_is_as_large_as_the_device_allows_and_the_bound(monkeypatch, device, gigabytes, bound, expected):
    card = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert chunk_elements(bound, torch.device(device)) == expected


# -- entropies relative to a teacher


V, TAU = 12, 0.7
TOKENS = torch.arange(18).view(3, 6) * 5 % V
MASK = (torch.arange(6) > 1) & (torch.arange(6) < torch.tensor([[6], [4], [5]]))
ROWS = Rollout(TOKENS, MASK, torch.zeros(3, 6, dtype=torch.float64), ~MASK[:, 5], ("",) * 3)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scalar_loop(ours: Tensor, theirs: Tensor) -> tuple[list[float], Tensor]:
    """-KL at every place, and its slope in the policy's logits: p_v (log q_v - log p_v + KL) / temperature."""
    values, slopes = [], torch.zeros_like(ours)
    for n in range(len(ours)):
        logp, logq = ((x[n] / TAU).log_softmax(-1).tolist() for x in (ours, theirs))
        terms = [(math.exp(x), x - y) for x, y in zip(logp, logq, strict=False)]
        kl = sum(p * apart for p, apart in terms)
        values.append(-kl)
        slopes[n] = torch.tensor([-p * (apart - kl) / TAU for p, apart in terms], dtype=slopes.dtype)
    return values, slopes


@given(st.integers(0, 7), st.integers(1, 6), st.integers(0, 3), st.integers(1, 40), st.integers(0, 9))
def test_value_and_gradient_are_those_of_a_scalar_loop(n, v, more, elements, seed):
    """For chunks of any size, a teacher with its own rows, and a head that is no matrix product."""
    hidden, weight = (numbers(*shape, seed=seed).requires_grad_() for shape in ((n, 3), (v, 3)))
    teacher = HeadInput(numbers(n, 5, seed=seed + 1), numbers(v + more, 5, seed=seed + 2))
    found = relative_entropies(HeadInput(hidden, weight), teacher, temperature=TAU, elements=elements)
    logits, theirs = hidden.detach() @ weight.detach().T, teacher.states @ teacher.weight.T
    values, slopes = scalar_loop(logits, theirs)
    torch.testing.assert_close(found.detach(), torch.tensor(values, dtype=found.dtype), rtol=1e-9, atol=1e-10)
    signal = numbers(n, seed=seed + 3)
    found.backward(signal)
    torch.testing.assert_close(hidden.grad, signal[:, None] * slopes @ weight.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(weight.grad, (signal[:, None] * slopes).T @ hidden.detach(), rtol=1e-9, atol=1e-10)
    dense = relative_entropies(HeadInput(logits, None), HeadInput(theirs, None), temperature=TAU, elements=elements)
    torch.testing.assert_close(dense, found.detach(), rtol=1e-12, atol=1e-12)


def test_relative_to_itself_it_is_0_and_to_a_uniform_teacher_the_entropy_less_log_v():
    hidden, weight, how = numbers(5, 3, seed=0), numbers(V, 3, seed=1), {"temperature": TAU, "elements": 30}
    policy = HeadInput(hidden, weight)
    assert relative_entropies(policy, policy, **how).abs().max() < 1e-14
    uniform = relative_entropies(policy, HeadInput(hidden * 0, weight), **how)
    _, entropy = linear_scores(hidden, weight, torch.arange(5), **how)
    torch.testing.assert_close(uniform, entropy - torch.tensor(V).double().log())


@pytest.mark.parametrize("name", list(MODELS))
def test_a_policy_with_a_teacher_has_the_scores_and_gradients_of_whole_distributions(name):
    """Each head of its own kind; the teacher is another model of the same kind, and gets no gradient."""
    model, other = MODELS[name](V).double(), MODELS[name](V).double()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    teacher, policy = local(other).logprob_model, local(model)
    other.requires_grad_(False)
    batch = given_batch(ROWS)
    without, _ = policy.vjp(batch)
    policy.entropy_teacher = lambda: nullcontext(teacher)
    scores, pullback = policy.vjp(batch)
    assert torch.equal(scores.logp, without.logp)
    ours, theirs = ((m(input_ids=batch.tokens).logits / TAU).log_softmax(-1)[:, :-1] for m in (model, other))
    relative = torch.zeros_like(scores.entropy)
    relative[:, 1:] = torch.where(batch.mask[:, 1:], (ours.exp() * (theirs - ours)).sum(-1), 0.0)
    torch.testing.assert_close(scores.entropy, relative.detach(), rtol=1e-6, atol=1e-9)
    assert (scores.entropy[batch.mask] < 0).all()
    signal = numbers(*batch.mask.shape, seed=5)
    expected = torch.autograd.grad((signal * relative).sum(), list(model.parameters()), allow_unused=True)
    pullback(scores._replace(logp=torch.zeros_like(signal), entropy=signal))
    for p, right in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, right, rtol=1e-5, atol=1e-8)
    assert all(p.grad is None for p in other.parameters())
