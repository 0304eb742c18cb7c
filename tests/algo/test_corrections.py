"""Invariants of every correction, their formulas as loops over plain numbers, and what each of them estimates."""

import math
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, batches, loss_rows, one_row, with_garbage, with_padding
from catalogue import all_corrections, each
from hypothesis import given, settings
from profiles import quarter
from torch import Tensor
from torch.func import grad, jacrev, vmap

from grpo_fn.algo import corrections
from grpo_fn.algo.corrections import row_ratio, token_ratio
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.types import Batch

TRUNCATED = partial(corrections.truncated_weight, ratio=token_ratio)
MASKED = partial(corrections.masked_weight, ratio=token_ratio)
OFF_POLICY = partial(corrections.off_policy_sequence_mask, delta=0.5)
REJECTED = partial(corrections.rejected_row, low=-2.0, high=3.0)
ALL = all_corrections()
EVERY = {  # also knobs at the edges of what is allowed
    **ALL,
    "truncated_weight(cap=1)": partial(TRUNCATED, cap=1.0),
    "masked_weight(low=0,high=inf)": partial(MASKED, low=0.0, high=math.inf),
    "masked_weight(low=1,high=1)": partial(MASKED, low=1.0, high=1.0),
    "off_policy_sequence_mask(delta=0)": partial(OFF_POLICY, delta=0.0),
    "weight_and_mask(masked_weight, of rows)": partial(
        corrections.weight_and_mask,
        weight=partial(MASKED, low=0.5, high=5.0),
        mask=partial(MASKED, ratio=row_ratio, low=0.9, high=1.1),
    ),
    "rejected_row(k1,row_max)": partial(REJECTED, divergence=corrections.k1_divergence, reduction=corrections.row_max),
    "rejected_row(k3,row_sum)": partial(REJECTED, divergence=corrections.k3_divergence, reduction=corrections.row_sum),
    "outlier_row(low=0.1,high=10)": partial(corrections.outlier_row, low=0.1, high=10.0),
}
COSTLY = settings(max_examples=quarter())
FAR = st.sampled_from([0.5, 3.0, 20.0])


def exactly(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def example(log_w: list[float], adv: float = -1.0, behind: float = 0.0) -> tuple[Tensor, Batch]:
    """A row whose sampler is log_w below logp_old, and on average `behind` above the policy as it is now."""
    log_w = torch.tensor(log_w, dtype=torch.float64)
    sampled, zero = torch.full_like(log_w, -3.0), torch.zeros_like(log_w)
    logp = sampled - behind * len(log_w) * torch.eye(1, len(log_w), dtype=torch.float64)[0]
    mask = torch.ones(len(log_w), dtype=torch.bool)
    return logp, Batch(mask.long(), mask, sampled, sampled + log_w, zero, zero, zero + adv, ~mask, mask.long())


# -- what holds for each of them


@each(EVERY)
@COSTLY
@given(loss_rows(drift=0.0))
def test_between_equal_policies_every_weight_is_exactly_one(f, row):
    assert (f(*row) == 1).all()


@each(EVERY)
@COSTLY
@given(loss_rows(drift=20.0), st.sampled_from([torch.float32, torch.float64]))
def test_weights_are_finite_within_their_knobs_and_one_where_nothing_was_sampled(f, row, dtype):
    logp, row = row[0].to(dtype), Batch(*(x.to(dtype) if x.is_floating_point() else x for x in row[1]))
    weight, knobs = f(logp, row), f.keywords
    assert (weight.shape, weight.dtype) == (logp.shape, dtype)
    assert (weight.isfinite() & (weight >= 0)).all()
    assert (weight[~row.mask] == 1).all()
    weight = weight[row.mask]
    if "cap" in knobs:
        assert (weight <= knobs["cap"]).all()
    if f.func is corrections.masked_weight:
        assert ((weight == 0) | ((weight >= knobs["low"]) & (weight <= knobs["high"]))).all()
    if "delta" in knobs or f.func in (corrections.rejected_row, corrections.outlier_row):
        assert ((weight == 0) | (weight == 1)).all()


@each(EVERY)
@COSTLY
@given(loss_rows(drift=3.0), st.sampled_from(GARBAGE), st.integers(1, 3))
def test_padding_and_what_is_behind_the_mask_have_no_say(f, row, garbage, extra):
    assert torch.equal(f(*with_garbage(*row, garbage)), f(*row))
    wide = f(*with_padding(*row, extra))
    exactly(wide[:-extra], f(*row))
    assert (wide[-extra:] == 1).all()


@each(EVERY)
@COSTLY
@given(batches(drift=3.0))
def test_a_row_depends_on_itself_alone(f, data):
    """vmapped over rows it gives each what it gets alone, also when B == T."""
    logp, batch = data
    exactly(vmap(f)(logp, batch), torch.stack([f(x, one_row(batch, b)) for b, x in enumerate(logp)]))


@each(EVERY)
@COSTLY
@given(loss_rows(drift=3.0))
def test_a_weight_is_a_constant_to_every_gradient(f, row):
    """By torch.func and by autograd, also through the fields of the row: an objective may be built of the same leaf."""
    logp, row = row
    assert (grad(lambda x: f(x, row).sum())(logp) == 0).all()
    assert (jacrev(lambda x: f(x, row._replace(logp_old=x, logp_sampled=x - 1)))(logp) == 0).all()
    leaf = logp.clone().requires_grad_()
    assert not (f(leaf, row._replace(logp_old=leaf)) * 1.0).requires_grad


@each(EVERY)
def test_policies_a_thousand_nats_apart_stay_finite(f):
    """One nan would reach every weight of the model."""
    for dtype in (torch.float32, torch.float64):
        zero, mask = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=torch.bool)
        for gap in (-1e3, 1e3):
            there = torch.tensor([0.0, gap], dtype=dtype)
            for sampled, old in ((zero, there), (there, zero), (there, there)):
                row = Batch(mask.long(), mask, sampled, old, zero, zero, zero - 1.0, ~mask, mask.long())
                assert f(zero, row).isfinite().all()


@each(ALL, only={"truncated_weight", "masked_weight"})
@COSTLY
@given(loss_rows(drift=3.0), st.floats(-5, 5))
def test_a_weight_by_the_sampler_reads_neither_the_policy_nor_the_advantage(f, row, moved):
    """And there is nothing to correct where logp_old is the sampler's, however far the policy has moved since."""
    logp, row = row
    assert torch.equal(f(logp + moved, row._replace(adv=-row.adv - 1)), f(logp, row))
    assert (f(logp, row._replace(logp_old=row.logp_sampled)) == 1).all()


# -- the formulas, one number after the other


DIVERGENCES = {
    "k1_divergence": lambda x: -x,
    "k2_divergence": lambda x: x * x / 2,
    "k3_divergence": lambda x: math.exp(x) - 1 - x,
}
REDUCTIONS = {
    "row_sum": sum,
    "row_mean": lambda values: sum(values) / len(values),
    "row_max": lambda values: max(values, key=abs),
}


def apart(knobs: dict, log_w: list[float]) -> float:
    """How far sampler and trainer are apart on a row, as `rejected_row` counts it."""
    each_token = [DIVERGENCES[knobs["divergence"].__name__](x) for x in log_w]
    return REDUCTIONS[knobs["reduction"].__name__](each_token)


def reference(f: partial, log_w: list[float], behind: list[float], adv: list[float]) -> list[float]:
    """The weights of a row's sampled tokens, from the equations."""
    count, knobs = len(log_w), f.keywords
    w = [math.exp(x) for x in log_w]
    if knobs.get("ratio") is row_ratio:
        w = [math.exp(sum(log_w) / count)] * count
    match f.func.__name__:
        case "truncated_weight":
            return [min(x, knobs["cap"]) for x in w]
        case "masked_weight":
            return [x if knobs["low"] <= x <= knobs["high"] else 0.0 for x in w]
        case "off_policy_sequence_mask":
            return [0.0 if a < 0 and sum(behind) / count > knobs["delta"] else 1.0 for a in adv]
        case "weight_and_mask":
            weight, mask = (reference(knobs[name], log_w, behind, adv) for name in ("weight", "mask"))
            return [x if kept else 0.0 for x, kept in zip(weight, mask, strict=True)]
    measured = [apart(knobs, log_w)] if f.func is corrections.rejected_row else w
    return [float(all(knobs["low"] <= x <= knobs["high"] for x in measured))] * count


def near_an_edge(log_w: list[float], behind: list[float], knobs: dict) -> bool:
    """Whether rounding may decide: a value within 1e-9 of a threshold."""
    inner = [function_and_knobs(knobs[name])[1] for name in ("weight", "mask") if name in knobs]
    if any(near_an_edge(log_w, behind, found) for found in inner):
        return True
    if "divergence" in knobs:
        return any(math.isclose(apart(knobs, log_w), knobs[k], rel_tol=1e-9, abs_tol=1e-9) for k in ("low", "high"))
    w = [*log_w, sum(log_w) / len(log_w)]
    edges = [math.log(knobs[k]) for k in ("cap", "low", "high") if knobs.get(k) and math.isfinite(knobs[k])]
    drifts = [abs(sum(behind) / len(behind) - knobs["delta"])] if "delta" in knobs else []
    return any(abs(x - edge) < 1e-9 for x in w for edge in edges) or any(d < 1e-9 for d in drifts)


@each(EVERY)
@COSTLY
@given(FAR.flatmap(lambda drift: loss_rows(drift=drift)))
def test_every_correction_equals_its_scalar_loop(f, row):
    logp, row = row
    here = row.mask.nonzero()[:, 0].tolist()
    log_w = (row.logp_old - row.logp_sampled)[here].tolist()
    behind = (row.logp_sampled - logp)[here].tolist()
    if here and not near_an_edge(log_w, behind, f.keywords):
        expected = reference(f, log_w, behind, row.adv[here].tolist())
        assert f(logp, row)[here].tolist() == pytest.approx(expected, rel=1e-9)


LOG_8, LOG_2 = math.log(8), math.log(2)  # of a row whose geometric mean is 4


@pytest.mark.parametrize(
    ("f", "row", "expected"),
    [
        (partial(TRUNCATED, cap=2.0), example([math.log(1.5), 1.0, -1.0]), [1.5, 2.0, math.exp(-1)]),
        (partial(MASKED, low=0.5, high=5.0), example([math.log(x) for x in (4, 6, 0.6, 0.4)]), [4.0, 0.0, 0.6, 0.0]),
        (partial(TRUNCATED, ratio=row_ratio, cap=5.0), example([LOG_8, LOG_2]), [4.0, 4.0]),
        (partial(MASKED, ratio=row_ratio, low=0.5, high=3.0), example([LOG_8, LOG_2]), [0.0, 0.0]),
        (OFF_POLICY, example([0.0, 0.0], adv=-1.0, behind=0.6), [0.0, 0.0]),
        (OFF_POLICY, example([0.0, 0.0], adv=1.0, behind=0.6), [1.0, 1.0]),
        (OFF_POLICY, example([0.0, 0.0], adv=-1.0, behind=-9.0), [1.0, 1.0]),  # more likely: a mistake being made
        *(
            (partial(corrections.outlier_row, low=1e-4, high=100.0), example(log_w), [kept] * len(log_w))
            for log_w, kept in (([0.0, 4.0], 1.0), ([0.0, 5.0], 0.0), ([-9.0, 0.0], 1.0), ([-10.0], 0.0))
        ),
    ],
)
def test_weights_of_small_rows_are_those_computed_by_hand(f, row, expected):
    assert f(*row).tolist() == pytest.approx(expected)


@given(loss_rows(drift=3.0))
def test_a_mask_that_keeps_its_weight_does_not_square_it(row):
    f = partial(MASKED, low=0.5, high=5.0)
    exactly(corrections.weight_and_mask(*row, weight=f, mask=f), f(*row))


# -- what they estimate, by enumerating every token


def every_token(seed: int, vocabulary: int, apart: float) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """Any f, pi_sampled and pi_old of a small vocabulary, and one row of one token for each of its tokens."""
    generator = torch.Generator().manual_seed(seed)
    f, here, step = (torch.randn(vocabulary, generator=generator, dtype=torch.float64) for _ in range(3))
    sampled, old = here.log_softmax(-1), (here + apart * step).log_softmax(-1)
    mask = torch.ones(vocabulary, 1, dtype=torch.bool)
    fields = (x[:, None] for x in (sampled, old, old, old, f))
    return f, sampled.exp(), old.exp(), Batch(torch.arange(vocabulary)[:, None], mask, *fields, ~mask, mask.long())


seeds = st.integers(0, 2**31)


@given(seeds, st.integers(2, 9), st.floats(0, 2), st.floats(1, 3))
def test_the_bias_of_truncated_is_what_is_above_the_cap(seed, vocabulary, apart, cap):
    """|bias| <= max |f| sum (pi_old - cap pi_sampled)+: none where no weight reaches the cap."""
    f, sampled, old, batch = every_token(seed, vocabulary, apart)
    for limit in (cap, float((old / sampled).max()) + 1e-9):
        w = vmap(partial(TRUNCATED, cap=limit))(batch.logp_old, batch)[:, 0]
        beyond = (old - limit * sampled).clamp(min=0).sum()
        assert (sampled * w).sum() == pytest.approx(float(1 - beyond), abs=1e-12)
        assert ((sampled * w * f).sum() - (old * f).sum()).abs() <= f.abs().max() * beyond + 1e-12


@given(seeds, st.integers(2, 9), st.floats(0, 2))
def test_masked_is_the_expectation_over_the_tokens_it_keeps(seed, vocabulary, apart):
    f, sampled, old, batch = every_token(seed, vocabulary, apart)
    w = vmap(partial(MASKED, low=0.5, high=1.5))(batch.logp_old, batch)[:, 0]
    exactly((sampled * w * f).sum(), (old * f)[w > 0].sum())


# -- rows that are left out


@pytest.mark.parametrize(
    ("f", "knobs", "message"),
    [
        (TRUNCATED, {"cap": 0.5}, "cap: got 0.5, expected at least 1"),
        (MASKED, {"low": 1.5, "high": 2.0}, "low, high: got 1.5 and 2.0, expected 0 <= low <= 1 <= high"),
        (OFF_POLICY, {"delta": -0.1}, "delta: got -0.1, expected at least 0"),
        (
            partial(REJECTED, divergence=corrections.k2_divergence, reduction=corrections.row_sum),
            {"low": 0.1},
            "low, high: got 0.1 and 3.0, expected low <= 0 <= high",
        ),
        (corrections.outlier_row, {"low": 1.1, "high": 2.0}, "low, high: got 1.1 and 2.0, expected 0 <= low <= 1"),
    ],
)
def test_knobs_that_would_mask_the_policys_own_samples_are_refused(f, knobs, message):
    with pytest.raises(ValueError, match=message):
        f(*example([0.0]), **knobs)
