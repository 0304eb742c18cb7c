"""Properties that a step expects of an advantage, `(reward [G], valid [G]) -> [G]`: one invariant, one function.

An invariant takes the function, its knobs bound, and a strategy for one finite reward; it raises where it is broken.
"""

from collections.abc import Callable

import hypothesis.strategies as st
import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor
from torch.func import vmap

from grpo_fn.testing.harness import assert_same, check_claim, holds_for
from grpo_fn.testing.strategies import NO_NUMBERS, finite_floats, groups

Advantage = Callable[[Tensor, Tensor], Tensor]
Group = tuple[Tensor, Tensor]
Rewards = SearchStrategy[float]
VALID = st.integers(1, 64).flatmap(lambda g: st.lists(st.booleans(), min_size=g, max_size=g)).map(torch.tensor)


def check_advantage(advantage: Advantage, *, rewards: Rewards | None = None) -> None:
    """Check that every invariant of INVARIANTS holds for an advantage function, over groups of rewards.

    Args:
        advantage: (reward [G], valid [G]) -> [G], its knobs bound.
        rewards: draws one finite reward, from -100 to 100 where it is None; name the values of your own reward when the
            function is made for them, as `st.sampled_from([0.0, 1.0])`.

    Raises:
        AssertionError: an invariant does not hold, on the example that is shown.
    """
    for invariant in INVARIANTS:
        invariant(advantage, finite_floats() if rewards is None else rewards)


@holds_for(groups)
def finite_and_zero_where_invalid(f: Advantage, group: Group) -> None:
    """One finite number a sample, in the reward's dtype; exactly 0 for a sample that could not be scored."""
    reward, valid = group
    adv = f(reward, valid)
    alike = adv.shape == reward.shape and adv.dtype == reward.dtype
    check_claim(alike, f"got {adv}, expected shape and dtype of {reward}")
    check_claim(bool(adv.isfinite().all()), f"got {adv}, expected finite advantages of finite rewards")
    check_claim(bool((adv[~valid] == 0).all()), f"got {adv}, expected exactly 0 where not {valid}")


@holds_for(groups)
def invalid_samples_do_not_affect_others(f: Advantage, group: Group) -> None:
    """The others get what they would get without them."""
    reward, valid = group
    if valid.any():
        alone = f(reward[valid], valid[valid])
        assert_same(f(reward, valid)[valid], alone, "with and without invalid samples", tolerance=1e-9)


@holds_for(
    lambda rewards: st.tuples(rewards, st.sampled_from(NO_NUMBERS), st.one_of(VALID.map(torch.ones_like), VALID))
)
def constant_group_is_exactly_zero(f: Advantage, example: tuple[float, float, Tensor]) -> None:
    """In float32 too, where sum/G and R differ by an ulp that a small std blows up; also one sample, and none."""
    value, garbage, valid = example
    adv = f(torch.where(valid, value, garbage).float(), valid)
    check_claim(bool((adv == 0).all()), f"got {adv} for equal rewards {value}, expected exactly 0")


@holds_for(lambda rewards: st.tuples(groups(rewards, least=2), st.sampled_from(NO_NUMBERS[:3])))
def a_reward_that_is_not_finite_shows(f: Advantage, example: tuple[Group, float]) -> None:
    """No silent zero for a valid sample: the step refuses what is not finite, and says so."""
    (reward, valid), bad = example
    first = torch.arange(len(reward)) == 0
    adv = f(torch.where(first, bad, reward), valid | first)
    check_claim(not adv.isfinite().all(), f"got {adv} for a valid reward of {bad}, expected nan or inf in it")


@holds_for(
    lambda rewards: groups(rewards).flatmap(
        lambda group: st.tuples(st.just(group), st.permutations(range(len(group[0]))))
    )
)
def order_does_not_matter(f: Advantage, example: tuple[Group, list[int]]) -> None:
    """Permuting the group permutes the advantages."""
    (reward, valid), order = example
    assert_same(f(reward[order], valid[order]), f(reward, valid)[order], "permuted", tolerance=1e-9)


@holds_for(
    lambda rewards: st.integers(1, 6).flatmap(
        lambda g: st.lists(groups(rewards, least=g, most=g), min_size=1, max_size=5)
    )
)
def groups_do_not_leak(f: Advantage, drawn: list[Group]) -> None:
    """vmapped over groups, as a step calls it, it gives each group what it gets alone."""
    together = vmap(f)(*(torch.stack(x) for x in zip(*drawn, strict=True)))
    alone = torch.stack([f(*group) for group in drawn])
    assert_same(together, alone, "vmapped over groups", tolerance=1e-12)


@holds_for(groups)
def advantages_are_bounded(f: Advantage, group: Group) -> None:
    """|A| <= G times the larger of 1 and the range of the valid rewards: no sample drives the step by itself.

    A std that can be next to nothing while one reward stands out breaks this.
    """
    reward, valid = group
    adv, scored = f(reward, valid), reward[valid]
    most = len(scored) * max(1.0, float(scored.max() - scored.min())) if len(scored) else 0.0
    check_claim(bool((adv.abs() <= most * (1 + 1e-9)).all()), f"got {adv}, expected at most {most:g} either way")


INVARIANTS = (
    finite_and_zero_where_invalid,
    invalid_samples_do_not_affect_others,
    constant_group_is_exactly_zero,
    a_reward_that_is_not_finite_shows,
    order_does_not_matter,
    groups_do_not_leak,
    advantages_are_bounded,
)
