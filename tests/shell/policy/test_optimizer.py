"""Optimizers: each is AdamW as it is written, sharded as whole, and what a checkpoint holds of it brings it back."""

import importlib.util
import math
import sys
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from policies import mesh_of_one
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from grpo_fn.shell.policy import optimizer

KNOBS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
knobs = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 0.1),
        "beta1": st.floats(0.0, 0.95),
        "beta2": st.floats(0.5, 0.999),
        "eps": st.floats(1e-8, 1e-2),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
    }
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="NOT TESTED: adamw_8bit needs torchao: pip install 'grpo-fn[adamw8bit]'",
)
adamw_8bit = partial(optimizer.adamw, implementation="8bit")


def muon(params, **adamw) -> torch.optim.Optimizer:
    """With AdamW's knobs; the last matrix stands for a head."""
    params = list(params)
    params[-2].of_vocabulary = True
    return optimizer.muon(params, momentum=0.9, **adamw)


ALL = [optimizer.adamw, pytest.param(adamw_8bit, marks=needs_torchao), muon]


def net(seed: int) -> nn.Module:
    """Matrices of 64 x 128 (kept in codes by 8bit), vectors, and a matrix too small for codes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 3))


def gradients(model: nn.Module, seed: int, steps: int) -> list[list[torch.Tensor]]:
    """Of one sign each and of magnitude 0.5 to 1: in the finest part of the map of 8 bits."""
    draw = torch.Generator().manual_seed(seed)
    signs = [torch.randint(0, 2, p.shape, generator=draw) * 2.0 - 1 for p in model.parameters()]
    return [[s * (0.5 + torch.rand(s.shape, generator=draw) / 2) for s in signs] for _ in range(steps)]


def step(made: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
        if isinstance(p, DTensor):  # a world of one holds all of it
            p.grad = DTensor.from_local(grad.clone(), p.device_mesh, p.placements)
    made.step()


def written_out(p, grads, *, lr, beta1, beta2, eps, weight_decay):
    """Algorithm 2 of arXiv:1711.05101 in float64, decay on matrices alone."""
    p, m, v = p.detach().double(), 0.0, 0.0
    decay = weight_decay if p.ndim == 2 else 0.0
    for t, g in enumerate((g.double() for g in grads), 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        p = p - lr * (m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + decay * p)
    return p, m, v


@given(knobs, st.integers(0, 99), st.integers(1, 4))
def test_an_update_is_adamw_as_published(given_knobs, seed, steps):
    model = net(seed)
    before = [p.detach().clone() for p in model.parameters()]
    made, grads = optimizer.adamw(model.parameters(), **given_knobs), gradients(model, seed, steps)
    for each in grads:
        step(made, list(model.parameters()), each)
    for p, old, g in zip(model.parameters(), before, zip(*grads, strict=True), strict=True):
        torch.testing.assert_close(p.detach().double(), written_out(old, g, **given_knobs)[0], rtol=2e-6, atol=2e-7)


@needs_torchao
@settings(max_examples=10)
@given(knobs, st.integers(0, 99))
def test_the_first_step_in_8_bits_is_adamw_and_its_moments_are_within_half_a_code(given_knobs, seed):
    model = net(seed)
    before = [p.detach().clone() for p in model.parameters()]
    made, (grads,) = adamw_8bit(model.parameters(), **given_knobs), gradients(model, seed, 1)
    step(made, list(model.parameters()), grads)
    for p, old, g in zip(model.parameters(), before, grads, strict=True):
        expected, m, v = written_out(old, [g], **given_knobs)
        rounding = 2e-7 / (1 - max(given_knobs["beta1"], given_knobs["beta2"]))  # of 1 - beta^t in float32
        torch.testing.assert_close(p.detach().double(), expected, rtol=2e-6, atol=2e-7 + given_knobs["lr"] * rounding)
        state = made.state[p]
        # Ends of the map: 64 fractions from 0.1 to 1 with a sign, 128 without; half a gap of the block's largest. At
        # the negative end a whole one, since the map has no -1.
        for moment, exact, gap in ((state["exp_avg"], m, 0.9 / 64), (state["exp_avg_sq"], v, 0.9 / 128)):
            off = (optimizer.moment_value(moment).double() - exact).abs().amax()
            assert off <= (gap / 2 + 1e-4) * exact.abs().amax()
            assert (off > 1e-5 * exact.abs().amax()) == hasattr(moment, "codes")
            assert hasattr(moment, "codes") == (p.numel() >= 4096)


@given(knobs, st.integers(0, 99), st.integers(1, 3))
@settings(max_examples=10)
def test_muon_is_torchs_own_on_matrices_and_adamw_on_the_rest(given_knobs, seed, steps):
    model, other = net(seed), net(seed)
    mine, grads = muon(model.parameters(), **given_knobs), gradients(model, seed, steps)
    theirs, rest = [], []
    for i, p in enumerate(other.parameters()):
        (theirs if p.ndim == 2 and i != 6 else rest).append(p)
    decay = given_knobs["weight_decay"]
    knobs = {"lr": given_knobs["lr"], "weight_decay": decay, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    alone, beside = torch.optim.Muon(theirs, **knobs), optimizer.adamw(rest, **given_knobs)
    for each in grads:
        step(mine, list(model.parameters()), each)
        for p, grad in zip(other.parameters(), each, strict=True):
            p.grad = grad.clone()
        alone.step()
        beside.step()
    for p, q, old in zip(model.parameters(), other.parameters(), net(seed).parameters(), strict=True):
        # An entry near zero is the difference of larger ones, and rounded as they are: by 2^-24 of each, every step.
        largest = max(x.detach().abs().max().item() for x in (old, q))
        torch.testing.assert_close(p, q, rtol=2e-6, atol=max(1e-8, steps * 2**-23 * largest))
    assert {len(mine.state[p]) for p in model.parameters() if p.ndim == 2} == {1, 3}


def test_muon_without_matrices_is_adamw_and_without_anything_is_refused():
    vectors = [nn.Parameter(torch.ones(3))]
    assert type(optimizer.muon(vectors, momentum=0.9, **KNOBS)) is torch.optim.AdamW
    with pytest.raises(ValueError, match=r"optimizer\.muon: got no parameters"):
        optimizer.muon([], momentum=0.9, **KNOBS)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh_of_one())
    return fully_shard(model, mesh=mesh_of_one())


@pytest.mark.parametrize("make", ALL)
def test_a_sharded_step_is_the_whole_one(make):
    model, parts = net(3), sharded(net(3))
    one, other = (make(some.parameters(), **KNOBS) for some in (model, parts))
    for grads in gradients(model, 3, 3):
        step(one, list(model.parameters()), grads)
        step(other, list(parts.parameters()), grads)
    for p, q in zip(model.parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q.full_tensor())
        assert all(torch.equal(whole(value), whole(other.state[q][key])) for key, value in one.state[p].items())


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("make", ALL)
def test_an_optimizer_is_restored_bit_for_bit(make, spread):
    """Steps with gradients of every magnitude, moments taken out, a fresh optimizer filled in, and on with both."""
    model, again = (sharded(net(5)) if spread else net(5) for _ in range(2))
    made, fresh = (make(m.parameters(), **KNOBS) for m in (model, again))
    draw = torch.Generator().manual_seed(5)
    wild = [[torch.randn(p.shape, generator=draw) ** 5 for p in model.parameters()] for _ in range(5)]
    for grads in wild[:3]:
        step(made, list(model.parameters()), grads)
    step(fresh, list(again.parameters()), [torch.zeros(p.shape) for p in again.parameters()])
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        with torch.no_grad():
            q.copy_(p)
        for key, value in fresh.state[q].items():
            held = optimizer.moment_value(value)
            assert not hasattr(getattr(held, "_local_tensor", held), "codes")
            held.copy_(optimizer.moment_value(made.state[p][key]))
            optimizer.load_moment(value, held)
            assert torch.equal(whole(value), whole(made.state[p][key])), key
    for grads in wild[3:]:
        step(made, list(model.parameters()), grads)
        step(fresh, list(again.parameters()), grads)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = optimizer.moment_value(tensor.detach())
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@needs_torchao
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(-30, 20), st.integers(1, 9), st.booleans())
def test_values_of_whole_blocks_come_back_exactly(seed, power, spread, signed):
    from torchao.optim.subclass_8bit import OptimState8bit

    state, again = (OptimState8bit.zeros((20, 256), signed=signed) for _ in range(2))
    values = torch.randn(20, 256, generator=torch.Generator().manual_seed(seed)) ** spread * 2.0**power
    values[0] = 0.0
    values[1] = -values[1].abs()
    state.copy_(values if signed else values.abs())
    optimizer.load_moment(again, optimizer.moment_value(state))
    assert torch.equal(optimizer.moment_value(again), optimizer.moment_value(state))


def test_an_implementation_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"got '8bit' without torchao .*pip install 'grpo-fn\[adamw8bit\]'"):
        adamw_8bit(net(0).parameters(), **KNOBS)
    with pytest.raises(ValueError, match=r"implementation: got '4bit', expected one of fused, 8bit"):
        optimizer.adamw(net(0).parameters(), **KNOBS, implementation="4bit")


# -- schedules


def cosine_loop(step: int, warmup: int, total: int, final: float) -> float:
    """SGDR without restarts after a linear warm-up, written out."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step >= total:
        return final
    return final + (1 - final) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


@given(st.integers(0, 400), st.integers(0, 20), st.integers(1, 300), st.sampled_from([0.0, 0.1, 1.0]))
def test_a_cosine_falls_from_the_warm_up_to_its_floor(step: int, warmup: int, length: int, final: float) -> None:
    knobs = {"warmup": warmup, "total": warmup + length, "final": final}
    found = optimizer.cosine_decay(step, **knobs)
    assert found == pytest.approx(cosine_loop(step, warmup, warmup + length, final), abs=1e-12)
    assert min(final, 1 / (warmup + 1)) - 1e-12 <= found <= 1.0
    if step >= warmup:
        assert optimizer.cosine_decay(step + 1, **knobs) <= found
    assert optimizer.linear_decay(step, **knobs) == (
        (step + 1) / (warmup + 1) if step < warmup else 1.0 - (1.0 - final) * min(1.0, (step - warmup) / length)
    )
