"""What float32 costs: every function of the catalogue against itself in float64, on the very same numbers.

`U` is float32's unit roundoff. The bounds are stated in units of it and hold for every function that the catalogue has;
a new one is held to them the moment it exists. Where a function branches (a clip, a trust region) rounding may take the
other branch: the float32 result has to lie between the float64 results of inputs that float32 cannot distinguish.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from catalogue import bound, each, functions, signature, token_losses, values_of
from hypothesis import given, settings
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_map_only

from grpo_fn.algo import advantage, credit, objective
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Batch, Reward
from grpo_fn.testing.steps import scored_step
from grpo_fn.testing.strategies import masks, tensors

U = 2.0**-24  # 6e-8
APART = 2e-6  # nats: a log-ratio carries an error of a few U, which cannot distinguish such neighbours
ADVANTAGES = bound(advantage, "reward", "valid")
LOSSES = token_losses()
KLS = bound(objective, "logp", "row")
SOME = settings(max_examples=max(10, settings.default.max_examples // 8))


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


# -- rows: token losses and KL estimators


@st.composite
def float32_rows(draw, drift: float = 3.0) -> tuple[Tensor, Batch]:
    """logp down to -120 nats, other policies at most `drift` nats a token away, |A| at most 5; all of it float32."""
    t = draw(st.integers(1, 6))
    logp = draw(tensors(t, st.one_of(st.floats(-20, 0, width=32), st.floats(-120, -80, width=32)))).float()
    near = [logp + draw(tensors(t, st.floats(-drift, drift, width=32))).float() for _ in range(4)]
    adv = draw(tensors(t, st.floats(-5, 5, width=32))).float()
    mask = draw(masks(t))
    selected = mask & draw(masks(t))
    return logp, Batch(torch.zeros(t, dtype=torch.long), mask, *near, adv, selected, mask.long())


def size(logp: Tensor, row: Batch) -> float:
    """(1 + max |A|) (1 + max |logp|) exp(max |distance to another policy|), over the sampled tokens."""
    if not row.mask.any():
        return 1.0
    gaps = [(logp - base)[row.mask].abs().max() for base in (row.logp_old, row.logp_ref, row.logp_sampled)]
    adv, far = (float(x[row.mask].abs().max()) for x in (row.adv, logp))
    return (1 + adv) * (1 + far) * math.exp(float(max(gaps)))


def between(got: Tensor, neighbours: list[Tensor], slack: float) -> None:
    assert got.dtype == torch.float32
    low, high = (getattr(torch.stack(neighbours), pick)(0) for pick in ("amin", "amax"))
    assert ((got.double() >= low - slack) & (got.double() <= high + slack)).all(), (got.tolist(), low, high, slack)


def value_and_slope(f: Callable, logp: Tensor, row: Batch) -> tuple[Tensor, Tensor]:
    """A row's per-token values, and the gradient of their sum."""

    def values(x: Tensor) -> Tensor:
        out = f(x, row)
        return out[0] if isinstance(out, tuple) else out

    return values(logp), grad(lambda x: values(x).sum())(logp)


@each({**LOSSES, **KLS})
@SOME
@given(float32_rows())
def test_a_loss_and_its_gradient_are_off_by_four_roundings_of_their_size(f, data):
    """|float32 - float64| <= 4 U (1 + |A|) (1 + |logp|) e^|drift|, a row's largest of each."""
    logp, row = data
    exact = Batch(*map(doubled, row))
    neighbours = [value_and_slope(f, logp.double() + shift, exact) for shift in (-APART, 0.0, APART)]
    for got, expected in zip(value_and_slope(f, logp, row), zip(*neighbours, strict=True), strict=True):
        between(got, list(expected), 4 * U * size(logp, row))


# -- groups: advantages


@st.composite
def float32_groups(draw, most: int = 16) -> tuple[Tensor, Tensor]:
    """Rewards [G] up to 100 in size, many of them equal, and who is valid."""
    n = draw(st.integers(1, most))
    reward = st.floats(-100, 100, width=32, allow_subnormal=False)
    few = draw(st.lists(reward, min_size=1, max_size=3))
    values = draw(tensors(n, st.one_of(reward, st.sampled_from(few)))).float()
    return values, draw(masks(n))


@each(ADVANTAGES)
@SOME
@given(float32_groups(), st.sampled_from([1.0, 1e30]))
def test_an_advantage_is_off_by_a_rounding_for_each_sample(f, group, unit):
    """|float32 - float64| <= 4 n U max |A|, n the size of the group, even if its rewards differ by one ulp only."""
    reward, valid = group[0] * (1.0 if f.func is advantage.leave_one_out_others_std else unit), group[1]  # no bound
    exact, got = f(reward.double(), valid), f(reward, valid)
    assert got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= 4 * len(reward) * U * exact.abs().max()).all(), (got, exact)


# -- steps: credit

# Knobs that are themselves functions or tables of the catalogue. Coefficients are powers of two: see float32_steps.
NESTED: dict[str, tuple] = {
    "advantage": (partial(advantage.group_normalized, eps=1e-4, ddof=1), advantage.max_rl),
    "beta": (0.0, 0.0625),
    "weights": ({"correct": 1.0, "boxed": 0.5}, {"correct": 1.0, "boxed": 1.0}),
    "credit": (
        partial(credit.outcome, advantage=advantage.mean_centered),
        partial(credit.reward_to_go, beta=0.0625),
        partial(credit.outcome_minus_kl, advantage=advantage.mean_centered, beta=0.0625),
    ),
}


def credits() -> dict[str, partial]:
    """Every credit function at every combination of its knobs, as `catalogue.bound` does it for other modules."""
    found = {}
    for name, f in functions(credit, "scored").items():
        knobs = signature(f)[1]
        tried = (NESTED.get(knob) or values_of(credit, name, f, knob) for knob in knobs)
        for number, values in enumerate(product(*tried)):
            found[f"{name}({number})"] = partial(f, **dict(zip(knobs, values, strict=True)))
    return found


CREDITS = credits()


class Step(NamedTuple):
    """What a credit is shown; all but the reward is [P, G, T]."""

    reward: Reward
    drift: Tensor
    mask: Tensor
    energy: Tensor


@st.composite
def float32_steps(draw, most: int = 4) -> Step:
    """Reward with two parts, drift, mask, energy; multiples of 1/64, so that R - beta KL is exact in float32.

    Otherwise that difference rounds to U |R|, whatever is done with it afterwards.
    """
    p, g, t = (draw(st.integers(1, n)) for n in (3, most, 4))
    number = st.integers(-128, 128).map(lambda n: n / 64)
    few = st.sampled_from(draw(st.lists(number, min_size=1, max_size=3)))
    value, correct, boxed = (draw(tensors((p, g), few)).float() for _ in range(3))
    drift, energy = (draw(tensors((p, g, t), numbers)).float() for numbers in (number, number.map(abs)))
    reward = outcome_reward(value, draw(masks((p, g))), {"correct": correct, "boxed": boxed})
    return Step(reward, drift, draw(masks((p, g, t))), energy)


def run(f: Callable, step: Step) -> Tensor:
    return f(scored_step(step.reward, step.mask, drift=step.drift, energy=step.energy))


def reach(f: partial, step: Step) -> float:
    """The largest number on the way to the result: what its rounding is a rounding of.

    Parts that cancel leave the rounding of the parts, and a value that a baseline is taken from that of the value; a
    whitened advantage is divided by the spread of what it whitens, which may be far smaller than that itself.
    """
    result = float(run(f, step).abs().max())
    if "weights" in f.keywords:
        single = (partial(f, weights={name: w}) for name, w in f.keywords["weights"].items())
        return sum(float(run(one, step).abs().max()) for one in single)
    if "credit" in f.keywords:
        values = run(f.keywords["credit"], step)[step.mask & step.reward.valid[..., None]]
        if f.func is credit.token_baseline:
            return max([result, *values.abs().tolist()])
        gaps = values.sort().values.diff()
        if (gaps > 0).any():
            return result * (1 + float(values.abs().max() / gaps[gaps > 0].min()))
    return result


@each(CREDITS)
@SOME
@given(float32_steps())
def test_a_credit_is_off_by_a_rounding_for_each_token(f, step):
    """|float32 - float64| <= 8 n U `reach`, n the tokens of the step, where what is compared is exact in float32."""
    double = tree_map_only(Tensor, doubled, step)
    exact, got = run(f, double), run(f, step)
    assert got.dtype == torch.float32
    slack = 8 * step.mask.numel() * U * reach(f, double)
    assert ((got.double() - exact).abs() <= slack).all(), (got.tolist(), exact.tolist())


@each(CREDITS)
@SOME
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 3), st.integers(1, 64), st.data())
def test_a_step_of_equal_rewards_gives_exactly_nothing(f, value, p, g, data):
    """Any float32 as the reward, groups of any size, next to the reference policy.

    `reward_to_go` compares nothing, and `token_baseline` nothing where a row is the only one that is so long.
    """
    if f.func is credit.reward_to_go:
        return
    valid = data.draw(masks((p, 1))).expand(p, g) | (torch.arange(g) % 3 == 0)
    same = torch.where(valid, torch.full((p, g), value, dtype=torch.float32), torch.nan)
    reward = outcome_reward(same, valid, {"correct": same, "boxed": same})
    mask = torch.arange(3) < 1 + torch.arange(p * g).view(p, g, 1) % 3
    zeros, rows = torch.zeros(p, g, 3), (mask & valid[..., None]).sum(1, keepdim=True)
    adv = run(f, Step(reward, zeros, mask, 1.0 + zeros))
    alone = (rows == 1) & (f.func is credit.token_baseline)
    assert not torch.where(alone, 0.0, adv).any()
