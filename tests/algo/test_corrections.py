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
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.types import Batch

ALL = all_corrections()


def ones(logp: Tensor, row: Batch) -> Tensor:
    """The sampler is taken for pi_old."""
    return torch.ones_like(logp)


# Also knobs at the edges of what is allowed.
EDGES = {
    "truncated_weight(cap=1)": partial(corrections.truncated_weight, cap=1.0),
    "masked_weight(low=0,high=inf)": partial(corrections.masked_weight, low=0.0, high=math.inf),
    "masked_weight(low=1,high=1)": partial(corrections.masked_weight, low=1.0, high=1.0),
    "sequence_masked_weight(low=1,high=1)": partial(corrections.sequence_masked_weight, low=1.0, high=1.0),
    "off_policy_sequence_mask(delta=0)": partial(corrections.off_policy_sequence_mask, delta=0.0),
    "weight_and_mask(masked_weight, sequence_masked_weight)": partial(
        corrections.weight_and_mask,
        weight=partial(corrections.masked_weight, low=0.5, high=5.0),
        mask=partial(corrections.sequence_masked_weight, low=0.9, high=1.1),
    ),
    **{
        f"rejected_row({divergence.__name__},{reduction.__name__},low=-2,high=3)": partial(
            corrections.rejected_row, divergence=divergence, reduction=reduction, low=-2.0, high=3.0
        )
        for divergence, reduction in (
            (corrections.k1_divergence, corrections.row_mean),
            (corrections.k1_divergence, corrections.row_max),
            (corrections.k2_divergence, corrections.row_mean),
            (corrections.k2_divergence, corrections.row_max),
            (corrections.k3_divergence, corrections.row_sum),
        )
    },
    "outlier_row(low=0.1,high=10)": partial(corrections.outlier_row, low=0.1, high=10.0),
    "weight_and_mask(masked_weight, outlier_row)": partial(
        corrections.weight_and_mask,
        weight=partial(corrections.masked_weight, low=0.1, high=3.0),
        mask=partial(corrections.outlier_row, low=0.1, high=10.0),
    ),
}
EVERY = {**ALL, **EDGES}
BY_THE_SAMPLER = {"truncated_weight", "masked_weight", "sequence_truncated_weight", "sequence_masked_weight"}
# Those with a scalar loop in `reference` below.
LOOPED = {*BY_THE_SAMPLER, "off_policy_sequence_mask", "weight_and_mask", "rejected_row", "outlier_row"}
COSTLY = settings(max_examples=quarter())
FAR = st.sampled_from([0.5, 3.0, 20.0])


def exactly(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def example(log_w: list[float], adv: float = -1.0, behind: list[float] | None = None) -> tuple[Tensor, Batch]:
    """A row whose sampler is log_w below logp_old, and `behind` above the policy as it is now."""
    log_w = torch.tensor(log_w, dtype=torch.float64)
    sampled = torch.full_like(log_w, -3.0)
    logp = sampled - (torch.zeros_like(log_w) if behind is None else torch.tensor(behind, dtype=torch.float64))
    everything = torch.ones(len(log_w), dtype=torch.bool)
    zero = torch.zeros_like(log_w)
    return logp, Batch(
        everything.long(), everything, sampled, sampled + log_w, zero, zero, zero + adv, ~everything, everything.long()
    )


# -- what holds for each of them


@each(EVERY)
@COSTLY
@given(loss_rows(drift=0.0))
def test_between_equal_policies_every_weight_is_exactly_one(f, row):
    assert (f(*row) == 1).all()


@each(EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@COSTLY
@given(loss_rows(drift=20.0))
def test_weights_are_finite_not_negative_and_one_where_nothing_was_sampled(f, dtype, row):
    logp, row = row[0].to(dtype), Batch(*(x.to(dtype) if x.is_floating_point() else x for x in row[1]))
    weight = f(logp, row)
    assert weight.shape == logp.shape
    assert weight.dtype == dtype
    assert (weight.isfinite() & (weight >= 0)).all()
    assert (weight[~row.mask] == 1).all()


@each(EVERY)
@COSTLY
@given(loss_rows(drift=3.0), st.sampled_from(GARBAGE))
def test_what_is_behind_the_mask_has_no_say(f, row, garbage):
    assert torch.equal(f(*with_garbage(*row, garbage)), f(*row))


@each(EVERY)
@COSTLY
@given(loss_rows(drift=3.0), st.integers(1, 3))
def test_padding_changes_nothing(f, row, extra):
    wide = f(*with_padding(*row, extra))
    exactly(wide[:-extra], f(*row))
    assert (wide[-extra:] == 1).all()


@each(EVERY)
@COSTLY
@given(batches(drift=3.0))
def test_a_row_depends_on_itself_alone(f, data):
    """vmapped over rows it gives each what it gets alone, also when B == T; and no row notices another's change."""
    logp, batch = data
    together = vmap(f)(logp, batch)
    exactly(together, torch.stack([f(x, one_row(batch, b)) for b, x in enumerate(logp)]))
    others = batch._replace(logp_sampled=batch.logp_sampled - 1, logp_old=batch.logp_old + 1, adv=-batch.adv)
    mixed = Batch(*(torch.cat([x[:1], y[1:]]) for x, y in zip(batch, others, strict=True)))
    exactly(vmap(f)(logp, mixed)[0], together[0])


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
def test_policies_worlds_apart_stay_finite(f):
    """A thousand nats, either way, in both dtypes: one nan would reach every weight of the model."""
    for dtype in (torch.float32, torch.float64):
        zero, mask = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=torch.bool)
        for gap in (-1e3, 1e3):
            there = torch.tensor([0.0, gap], dtype=dtype)
            for sampled, old in ((zero, there), (there, zero), (there, there)):
                for adv in (-1.0, 1.0):
                    row = Batch(mask.long(), mask, sampled, old, zero, zero, zero + adv, ~mask, mask.long())
                    assert f(zero, row).isfinite().all()


@each(EVERY)
@COSTLY
@given(loss_rows(drift=20.0))
def test_a_weight_is_within_its_knobs(f, row):
    weight, knobs = f(*row)[row[1].mask], f.keywords
    if "cap" in knobs:
        assert (weight <= knobs["cap"]).all()
    if "low" in knobs and f.func is not corrections.rejected_row:  # whose bounds are those of a divergence
        assert ((weight == 0) | ((weight >= knobs["low"]) & (weight <= knobs["high"]))).all()
    if "delta" in knobs:
        assert ((weight == 0) | (weight == 1)).all()


@each(ALL, only=BY_THE_SAMPLER)
@COSTLY
@given(loss_rows(drift=3.0), st.floats(-5, 5))
def test_a_weight_by_the_sampler_stays_the_same_from_update_to_update(f, row, moved):
    assert torch.equal(f(row[0] + moved, row[1]), f(*row))


@each(ALL, only=BY_THE_SAMPLER)
@COSTLY
@given(loss_rows(drift=20.0))
def test_a_weight_by_the_sampler_is_blind_to_the_advantage(f, row):
    assert torch.equal(f(row[0], row[1]._replace(adv=-row[1].adv - 1)), f(*row))


@each(ALL, only=BY_THE_SAMPLER)
@COSTLY
@given(loss_rows(drift=3.0))
def test_where_the_sampler_is_the_old_policy_there_is_nothing_to_correct(f, row):
    """As with step.from_sampler, however far the policy has moved since."""
    assert (f(row[0], row[1]._replace(logp_old=row[1].logp_sampled)) == 1).all()


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


def reference(name: str, knobs: dict, log_w: list[float], behind: list[float], adv: list[float]) -> list[float]:
    """The weights of a row's sampled tokens, from the equations."""
    count = len(log_w)
    w_s = math.exp(sum(log_w) / count)
    drift = sum(behind) / count
    weights = []
    for t in range(count):
        w = math.exp(log_w[t])
        if name == "truncated_weight":
            weights.append(w if w <= knobs["cap"] else knobs["cap"])
        elif name == "masked_weight":
            weights.append(w if knobs["low"] <= w <= knobs["high"] else 0.0)
        elif name == "sequence_truncated_weight":
            weights.append(w_s if w_s <= knobs["cap"] else knobs["cap"])
        elif name == "sequence_masked_weight":
            weights.append(w_s if knobs["low"] <= w_s <= knobs["high"] else 0.0)
        elif name == "off_policy_sequence_mask":
            weights.append(0.0 if adv[t] < 0 and drift > knobs["delta"] else 1.0)
        elif name == "weight_and_mask":
            inner, outer = knobs["weight"], knobs["mask"]
            kept = reference(outer.func.__name__, outer.keywords, log_w, behind, adv)[t]
            weights.append(reference(inner.func.__name__, inner.keywords, log_w, behind, adv)[t] if kept else 0.0)
        elif name in ("rejected_row", "outlier_row"):
            measured = [apart(knobs, log_w)] if name == "rejected_row" else [math.exp(x) for x in log_w]
            weights.append(float(all(knobs["low"] <= x <= knobs["high"] for x in measured)))
        else:
            raise LookupError(f"got no loop of {name}, expected one here")
    return weights


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


@each(EVERY, only=LOOPED)
@COSTLY
@given(FAR.flatmap(lambda drift: loss_rows(drift=drift)))
def test_formulas_as_scalar_loops(f, row):
    logp, row = row
    here = row.mask.nonzero()[:, 0].tolist()
    if not here:
        return
    log_w = (row.logp_old - row.logp_sampled)[here].tolist()
    behind = (row.logp_sampled - logp)[here].tolist()
    if near_an_edge(log_w, behind, f.keywords):
        return
    expected = reference(
        f.func.__name__ if isinstance(f, partial) else f.__name__, f.keywords, log_w, behind, row.adv[here].tolist()
    )
    assert f(logp, row)[here].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("f", "row", "expected"),
    [
        (partial(corrections.truncated_weight, cap=2.0), example([math.log(1.5), 1.0, -1.0]), [1.5, 2.0, math.exp(-1)]),
        (
            partial(corrections.masked_weight, low=0.5, high=5.0),
            example([math.log(4), math.log(6), math.log(0.6), math.log(0.4)]),
            [4.0, 0.0, 0.6, 0.0],
        ),
        (partial(corrections.sequence_truncated_weight, cap=2.0), example([math.log(8), math.log(2)]), [2.0, 2.0]),
        (partial(corrections.sequence_truncated_weight, cap=5.0), example([math.log(8), math.log(2)]), [4.0, 4.0]),
        (
            partial(corrections.sequence_masked_weight, low=0.5, high=3.0),
            example([math.log(8), math.log(2)]),
            [0.0, 0.0],
        ),
        (
            partial(corrections.sequence_masked_weight, low=0.5, high=4.5),
            example([math.log(8), math.log(2)]),
            [4.0, 4.0],
        ),
        (
            partial(corrections.off_policy_sequence_mask, delta=0.5),
            example([0.0, 0.0], adv=-1.0, behind=[1.2, 0.0]),
            [0.0, 0.0],
        ),
        (
            partial(corrections.off_policy_sequence_mask, delta=0.5),
            example([0.0, 0.0], adv=1.0, behind=[1.2, 0.0]),
            [1.0, 1.0],
        ),
        (
            partial(corrections.off_policy_sequence_mask, delta=0.5),
            example([0.0, 0.0], adv=-1.0, behind=[-9.0, -9.0]),  # more likely than it was: a mistake being made
            [1.0, 1.0],
        ),
    ],
)
def test_by_hand(f, row, expected):
    assert f(*row).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sequence", "token"),
    [("sequence_truncated_weight", "truncated_weight"), ("sequence_masked_weight", "masked_weight")],
    ids=["cap", "range"],
)
@given(loss_rows(drift=3.0), st.data())
def test_of_a_row_of_one_token_the_sequence_form_is_the_token_form(sequence, token, row, draw):
    logp, row = row
    t = draw.draw(st.integers(0, len(logp) - 1))
    row = row._replace(mask=torch.arange(len(logp)) == t)
    knobs = ALL[next(name for name in ALL if name.startswith(f"{token}("))].keywords
    exactly(getattr(corrections, sequence)(logp, row, **knobs), getattr(corrections, token)(logp, row, **knobs))


@given(loss_rows(drift=3.0), st.floats(0.1, 3))
def test_the_off_policy_mask_takes_whole_rows_of_bad_samples_and_no_good_one(row, adv):
    logp, row = row
    f = partial(corrections.off_policy_sequence_mask, delta=0.2)
    good = f(logp, row._replace(adv=torch.full_like(row.adv, adv)))
    bad = f(logp, row._replace(adv=torch.full_like(row.adv, -adv)))
    assert (good == 1).all()
    assert len(bad[row.mask].unique()) <= 1


@given(loss_rows(drift=3.0))
def test_weight_and_mask_with_nothing_on_one_side_is_the_other(row):
    weight, mask = (
        partial(corrections.truncated_weight, cap=2.0),
        partial(corrections.off_policy_sequence_mask, delta=0.2),
    )
    exactly(corrections.weight_and_mask(*row, weight=weight, mask=ones), weight(*row))
    exactly(corrections.weight_and_mask(*row, weight=ones, mask=mask), mask(*row))
    exactly(corrections.weight_and_mask(*row, weight=weight, mask=mask), weight(*row) * mask(*row))


@given(loss_rows(drift=3.0))
def test_a_mask_that_keeps_its_weight_does_not_square_it(row):
    f = partial(corrections.masked_weight, low=0.5, high=5.0)
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


@given(seeds, st.integers(2, 9), st.floats(0, 2))
def test_truncated_is_unbiased_where_no_weight_reaches_the_cap(seed, vocabulary, apart):
    """sum pi_sampled w f = sum pi_old f, for any f."""
    f, sampled, old, batch = every_token(seed, vocabulary, apart)
    cap = float((old / sampled).max()) + 1e-9
    w = vmap(partial(corrections.truncated_weight, cap=cap))(batch.logp_old, batch)[:, 0]
    exactly((sampled * w * f).sum(), (old * f).sum())


@given(seeds, st.integers(2, 9), st.floats(0, 2), st.floats(1, 3))
def test_the_bias_of_truncated_is_what_is_above_the_cap(seed, vocabulary, apart, cap):
    """|bias| <= max |f| sum (pi_old - cap pi_sampled)+, and the weights' mean never exceeds 1."""
    f, sampled, old, batch = every_token(seed, vocabulary, apart)
    w = vmap(partial(corrections.truncated_weight, cap=cap))(batch.logp_old, batch)[:, 0]
    beyond = (old - cap * sampled).clamp(min=0).sum()
    assert (sampled * w).sum() == pytest.approx(float(1 - beyond), abs=1e-12)
    assert ((sampled * w * f).sum() - (old * f).sum()).abs() <= f.abs().max() * beyond + 1e-12


@given(seeds, st.integers(2, 9), st.floats(0, 2))
def test_masked_is_the_expectation_over_the_tokens_it_keeps(seed, vocabulary, apart):
    f, sampled, old, batch = every_token(seed, vocabulary, apart)
    w = vmap(partial(corrections.masked_weight, low=0.5, high=1.5))(batch.logp_old, batch)[:, 0]
    kept = w > 0
    exactly((sampled * w * f).sum(), (old * f)[kept].sum())


# -- rows that are left out


@pytest.mark.parametrize(
    ("divergence", "reduction", "value"),
    [
        (corrections.k1_divergence, corrections.row_sum, -0.5 + 0.2),
        (corrections.k1_divergence, corrections.row_mean, (-0.5 + 0.2) / 2),
        (corrections.k1_divergence, corrections.row_max, -0.5),
        (corrections.k2_divergence, corrections.row_sum, (0.25 + 0.04) / 2),
        (corrections.k2_divergence, corrections.row_mean, (0.25 + 0.04) / 4),
        (corrections.k2_divergence, corrections.row_max, 0.125),
        (corrections.k3_divergence, corrections.row_sum, math.exp(0.5) + math.exp(-0.2) - 2 - 0.3),
        (corrections.k3_divergence, corrections.row_mean, (math.exp(0.5) + math.exp(-0.2) - 2 - 0.3) / 2),
        (corrections.k3_divergence, corrections.row_max, math.exp(0.5) - 1.5),
    ],
)
def test_a_row_is_left_out_just_beyond_its_divergence(divergence, reduction, value):
    """log w = 0.5 and -0.2."""
    row, f = example([0.5, -0.2]), partial(corrections.rejected_row, divergence=divergence, reduction=reduction)
    for factor, kept in ((1.01, 1.0), (0.99, 0.0)):
        bounds = {"low": min(0.0, value * factor), "high": max(0.0, value * factor)}
        assert f(*row, **bounds).tolist() == [kept, kept]


@pytest.mark.parametrize(("log_w", "kept"), [([0.0, 4.0], 1.0), ([0.0, 5.0], 0.0), ([-9.0, 0.0], 1.0), ([-10.0], 0.0)])
def test_one_outlier_takes_its_row_along(log_w, kept):
    f = partial(corrections.outlier_row, low=1e-4, high=100.0)
    assert f(*example(log_w)).tolist() == [kept] * len(log_w)


@given(loss_rows(drift=3.0))
def test_a_row_that_is_kept_has_the_weight_it_would_have(row):
    weight = partial(corrections.truncated_weight, cap=3.0)
    apart = {"divergence": corrections.k2_divergence, "reduction": corrections.row_max}
    for f in (corrections.rejected_row, corrections.outlier_row):
        mask = partial(f, **(apart if f is corrections.rejected_row else {}), low=0.0, high=math.inf)
        assert torch.equal(corrections.weight_and_mask(*row, weight=weight, mask=mask), weight(*row))


# -- knobs that cannot work


@pytest.mark.parametrize(
    ("f", "message"),
    [
        *(
            (partial(f, cap=c), f"cap: got {c}, expected at least 1")
            for f in (corrections.truncated_weight, corrections.sequence_truncated_weight)
            for c in (0.5, -1.0, math.nan)
        ),
        *(
            (partial(f, low=low, high=high), f"low, high: got {low} and {high}, expected 0 <= low <= 1 <= high")
            for f in (corrections.masked_weight, corrections.sequence_masked_weight)
            for low, high in ((1.5, 2.0), (0.5, 0.9), (-0.1, 2.0), (math.nan, 2.0), (0.5, math.nan))
        ),
        *(
            (partial(corrections.off_policy_sequence_mask, delta=d), f"delta: got {d}, expected at least 0")
            for d in (-0.1, math.nan)
        ),
        *(
            (
                partial(
                    corrections.rejected_row,
                    divergence=corrections.k2_divergence,
                    reduction=corrections.row_sum,
                    low=low,
                    high=high,
                ),
                f"low, high: got {low} and {high}, expected low <= 0 <= high",
            )
            for low, high in ((0.1, 1.0), (-1.0, -0.1), (math.nan, 1.0))
        ),
        (
            partial(corrections.outlier_row, low=1.1, high=2.0),
            "low, high: got 1.1 and 2.0, expected 0 <= low <= 1 <= high",
        ),
    ],
)
def test_knobs_that_would_mask_the_policys_own_samples_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        f(*example([0.0]))
