"""The entropy relative to a teacher is -KL(policy || teacher) over the whole vocabulary, and so is its gradient."""

import math
from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from fakes import MODELS
from hypothesis import given
from policies import local
from torch import Tensor

from grpo_fn.core.batch import given_batch
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model.logprob_model import (
    HeadInput,
    linear_scores,
    relative_entropies,
)

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
        p = [math.exp(x) for x in logp]
        kl = sum(a * (x - y) for a, x, y in zip(p, logp, logq, strict=False))
        values.append(-kl)
        for v, (a, x, y) in enumerate(zip(p, logp, logq, strict=False)):
            slopes[n, v] = -a * (x - y - kl) / TAU
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
    hidden, weight, target = numbers(5, 3, seed=0), numbers(V, 3, seed=1), torch.arange(5)
    how = {"temperature": TAU, "elements": 30}
    policy = HeadInput(hidden, weight)
    own = relative_entropies(policy, policy, **how)
    assert own.abs().max() < 1e-14
    uniform = relative_entropies(policy, HeadInput(hidden * 0, weight), **how)
    _, entropy = linear_scores(hidden, weight, target, **how)
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
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-8)
    assert all(p.grad is None for p in other.parameters())
