"""Which samples a step leaves out: every filter answers for each of them, and looks at nothing but its own business."""

import hypothesis.strategies as st
import torch
from catalogue import bound, each
from hypothesis import given
from torch import Tensor

from grpo_fn.algo import masking
from grpo_fn.core.types import Rollout
from grpo_fn.testing.strategies import masks, tensors

ALL = bound(masking, "rollout", "adv")


@st.composite
def steps(draw) -> tuple[Rollout, Tensor]:
    """A rollout of P * G rows and advantages [P, G, T], whole groups of zeros among them."""
    p, g, t = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    adv = draw(tensors((p, g, t))) * draw(masks((p, 1, 1)))
    nothing = torch.zeros(p * g, t)
    rollout = Rollout(nothing.long(), nothing.bool(), nothing, draw(masks(p * g)), ("",) * (p * g))
    return rollout, adv


@each(ALL)
@given(steps())
def test_every_filter_answers_for_every_sample(f, step):
    keep = f(*step)
    assert keep.shape == step[1].shape[:2]
    assert keep.dtype == torch.bool


@each(ALL)
@given(steps(), st.data())
def test_groups_are_judged_one_by_one(f, step, data):
    rollout, adv = step
    p = data.draw(st.integers(0, len(adv) - 1))
    rows = slice(p * adv.shape[1], (p + 1) * adv.shape[1])
    alone = Rollout(*(x[rows] for x in rollout))
    assert torch.equal(f(alone, adv[p : p + 1])[0], f(rollout, adv)[p])


@given(steps())
def test_comparable_leaves_out_whole_groups_without_signal(step):
    rollout, adv = step
    keep = masking.drop_incomparable(rollout, adv)
    for group, kept in zip(adv, keep, strict=True):
        assert kept.tolist() == [bool(group.any())] * len(kept)
