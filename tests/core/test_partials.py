"""What a partial holds is found by the one module that looks into it."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.partials import check_divides, function_and_knobs, unwrap_reward, uses_of


def plain(x, *, by):
    return x + by


def outer(x, *, inner, by=0):
    return inner(x) + by


def around(x, *, reward, seconds):
    return reward(x)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers()), st.integers())
def test_knobs_of_partials_of_partials_add_up(knobs, by):
    assert function_and_knobs(partial(partial(plain, **knobs), by=by)) == (plain, {**knobs, "by": by})
    assert function_and_knobs(plain) == (plain, {})


@given(st.data())
def test_every_use_is_found_however_deep_and_no_other(data):
    use = partial(plain, by=1)
    holds = {
        "nothing": lambda value: value,
        "a list": lambda value: [3, value],
        "a tuple": lambda value: (value, len),
        "a table": lambda value: {"x": None, "y": value},
        "a knob": lambda value: partial(outer, inner=value),
    }
    value = use
    for name in data.draw(st.lists(st.sampled_from(sorted(holds)), max_size=5)):
        value = holds[name](value)
    assert list(uses_of(plain, value)) == [use]
    assert list(uses_of(plain, [value, value])) == [use, use]
    assert list(uses_of(around, value)) == []


@pytest.mark.parametrize("bare", [plain, partial(plain, by=1)])
def test_a_wrapper_is_looked_through_and_what_shapes_is_not(bare):
    assert unwrap_reward(bare) is plain
    assert unwrap_reward(partial(around, reward=partial(around, reward=bare, seconds=1.0), seconds=2.0)) is plain
    assert unwrap_reward(partial(outer, inner=bare)) is outer
    assert unwrap_reward(partial(outer, reward=bare, inner=bare)) is outer


@given(st.integers(1, 60), st.integers(1, 60))
def test_minibatches_divide_the_prompts_or_the_nearest_numbers_that_do_are_named(prompts, minibatches):
    if prompts % minibatches == 0:
        return check_divides(prompts, minibatches)
    with pytest.raises(ValueError, match=f"prompts {prompts} do not split into {minibatches} minibatches") as caught:
        check_divides(prompts, minibatches)
    offered, closest = str(caught.value).split("expected prompts ")[1].split(", or minibatches ")
    fits = [n for n in range(1, 200) if n % minibatches == 0]
    nearest = [*[n for n in fits if n < prompts][-1:], *[n for n in fits if n > prompts][:1]]
    assert [int(n) for n in offered.split(" or ")] == nearest
    divisors = [m for m in range(1, prompts + 1) if prompts % m == 0]
    assert int(closest) in divisors
    assert abs(int(closest) - minibatches) == min(abs(m - minibatches) for m in divisors)
    return None
