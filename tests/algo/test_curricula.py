"""Curricula: pure over a carried state, equal to a scalar loop, and what each of them promises."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile, quarter

from grpo_fn import testing
from grpo_fn.algo import curricula
from grpo_fn.algo.curricula import (
    begin_curriculum,
    choose_uids,
    curriculum_figures,
    pool_in_band,
    sample_and_follow,
    update_curriculum,
)
from grpo_fn.algo.group_sampling import GroupBatch
from grpo_fn.algo.step import AT_THE_START
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Groups

RATE = partial(curricula.reward_at_least, threshold=1.0)
BANDIT = {"temperature": 0.3, "decay": 0.7, "floor": 0.1, "pass_rate": RATE}
ALL = {
    "uniform": curricula.uniform_arms(pass_rate=RATE),
    "threshold": curricula.threshold_levels(threshold=0.7, decay=0.5, min_groups=2, review=0.25, pass_rate=RATE),
    "learnability": curricula.learnability_bandit(**BANDIT),
    "progress": curricula.progress_bandit(**BANDIT, slow_decay=0.9),
    "pool": pool_in_band(size=3, low=0.1, high=0.9, decay=0.5, min_asked=1, pass_rate=RATE),
}
seeds = st.integers(0, 2**31)
shares = st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0])
steps = st.lists(st.lists(st.tuples(st.integers(0, 4), shares), max_size=8), min_size=1, max_size=6)


def key(seed):
    return prng.key(seed, device="cpu")


def arrays(step):
    return torch.tensor([arm for arm, _ in step], dtype=torch.int64), torch.tensor([p for _, p in step]).double()


@pytest.mark.parametrize("name", ALL)
def test_every_curriculum_holds_what_a_run_expects(name):
    with profile(max_examples=quarter()):
        testing.check_curriculum(ALL[name])


# -- against a loop over numbers


def looped_average(steps, arms, decay, of_rate):
    average, asked = [0.0] * arms, [0] * arms
    for step in steps:
        for arm in range(arms):
            mine = [of_rate(rate) for one, rate in step if one == arm]
            if mine:
                mean = sum(mine) / len(mine)
                average[arm] = decay * average[arm] + (1 - decay) * mean if asked[arm] else mean
                asked[arm] += len(mine)
    return average, asked


@given(steps)
def test_averages_are_those_of_a_loop(steps):
    expected = {
        ("learnability", "variance"): looped_average(steps, 5, 0.7, lambda p: p * (1 - p)),
        ("progress", "fast"): looped_average(steps, 5, 0.7, lambda p: p),
        ("progress", "slow"): looped_average(steps, 5, 0.9, lambda p: p),
        ("threshold", "rate"): looped_average(steps, 5, 0.5, lambda p: p),
        ("pool", "rate"): looped_average(steps, 5, 0.5, lambda p: p),
    }
    for (name, field), (average, asked) in expected.items():
        state = ALL[name].start(5, key(0))
        for step in steps:
            state = ALL[name].update(state, *arrays(step))
        torch.testing.assert_close(state[field], torch.tensor(average, dtype=torch.float64), rtol=0, atol=1e-12)
        assert state["asked"].tolist() == asked


@given(steps)
def test_levels_follow_a_loop(steps):
    level, state = 0, ALL["threshold"].start(5, key(0))
    for n, step in enumerate(steps, 1):
        state = ALL["threshold"].update(state, *arrays(step))
        average, asked = looped_average(steps[:n], 5, 0.5, lambda p: p)
        level += level < 4 and average[level] >= 0.7 and asked[level] >= 2
        assert int(state["level"]) == level


def test_levels_rise_one_by_one_up_to_the_last():
    state, levels = ALL["threshold"].start(3, key(0)), []
    for _ in range(4):
        here = state["level"].repeat(2)
        state = ALL["threshold"].update(state, here, torch.ones(2).double())
        levels.append(int(state["level"]))
    assert levels == [1, 2, 2, 2]


def looped_pool(state, arms, rates):
    """The update of the pool, one arm at a time."""
    place, member = state["place"].tolist(), state["member"].tolist()
    rate, asked = state["rate"].tolist(), state["asked"].tolist()
    for arm in range(len(place)):
        mine = [p for a, p in zip(arms, rates, strict=True) if a == arm]
        if mine:
            mean = sum(mine) / len(mine)
            rate[arm] = 0.5 * rate[arm] + 0.5 * mean if asked[arm] else mean
            asked[arm] += len(mine)
    stays = {arm for arm in range(len(place)) if member[arm] and not (asked[arm] and not 0.1 <= rate[arm] <= 0.9)}
    queue = sorted((arm for arm in range(len(place)) if arm not in stays), key=lambda arm: (asked[arm], place[arm]))
    return stays | {*queue[: sum(member) - len(stays)]}


@given(seeds, steps)
def test_the_pool_is_that_of_a_loop(seed, steps):
    state = ALL["pool"].start(5, key(seed))
    for step in steps:
        expected = looped_pool(state, [arm for arm, _ in step], [p for _, p in step])
        state = ALL["pool"].update(state, *arrays(step))
        assert {*state["member"].nonzero().flatten().tolist()} == expected


# -- what each promises


@given(seeds, st.lists(st.integers(0, 10), min_size=1, max_size=9).filter(any), st.integers(1, 40))
def test_a_spread_choice_is_within_one_of_every_share(seed, weights, count):
    chosen = curricula.spread_choice(torch.tensor(weights).double(), key(seed), count).bincount(minlength=len(weights))
    for number, weight in zip(chosen.tolist(), weights, strict=True):
        assert abs(number - count * weight / sum(weights)) < 1 + 1e-6
        assert number == 0 or weight > 0


@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(1, 20))
def test_a_pool_asks_each_member_before_any_twice(seed, size, arms, count):
    pool = pool_in_band(size=size, low=0.0, high=1.0, decay=0.0, min_asked=1, pass_rate=RATE)
    state = pool.start(arms, key(seed))
    assert int(state["member"].sum()) == min(size, arms)
    asked = pool.select(state, key(seed + 1), count).bincount(minlength=arms)[state["member"]]
    assert int(asked.max() - asked.min()) <= 1
    assert int(asked.sum()) == count


def test_solved_problems_retire_hard_ones_are_set_aside_and_fresh_ones_come_first():
    pool = pool_in_band(size=3, low=0.1, high=0.9, decay=0.5, min_asked=1, pass_rate=RATE)
    state = pool.start(6, key(0))
    before = state["member"].nonzero().flatten()
    after = pool.update(state, before, torch.tensor([1.0, 0.0, 0.5]).double())
    kept = {*after["member"].nonzero().flatten().tolist()}
    assert int(before[2]) in kept
    assert not {int(before[0]), int(before[1])} & kept
    figures = {"pool_size": 3.0, "admitted": 2.0, "retired": 1.0, "set_aside": 1.0, "fresh": 3.0}
    assert pool.figures(state, after) == figures


def test_a_bandit_goes_to_where_half_pass_and_still_looks_at_every_arm():
    curriculum = curricula.learnability_bandit(temperature=0.1, decay=0.0, floor=0.2, pass_rate=RATE)
    state = curriculum.update(
        curriculum.start(4, key(0)), torch.arange(4), torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=torch.float64)
    )
    asked = curriculum.select(state, key(1), 200).bincount(minlength=4)
    assert asked.argmax() == 1
    assert asked[1] > 150
    assert (asked >= 10).all()


# -- problems by number


@given(seeds, st.sampled_from([*ALL]), st.integers(1, 8), st.integers(1, 9), st.integers(1, 4))
def test_no_uid_comes_twice_and_batches_of_a_step_do_not_depend_on_one_another(seed, name, arms, count, batches):
    curriculum, state = ALL[name], begin_curriculum(ALL[name], arms, key(seed))
    seen, drawn = [], 0
    for step in range(2):
        asked = [choose_uids(curriculum, state, key(5), drawn, drawn + count * b, count) for b in range(batches)]
        assert asked[-1] == choose_uids(curriculum, state, key(5), drawn, drawn + count * (batches - 1), count)
        uids = [uid for batch in asked for uid in batch]
        state = update_curriculum(curriculum, state, uids, torch.full((len(uids),), step / 2))
        seen, drawn = seen + uids, drawn + len(uids)
    assert len({*seen}) == len(seen)
    for arm in range(arms):
        turns = [uid // arms for uid in seen if uid % arms == arm]
        assert turns == [*range(len(turns))]
        assert int(state.turns[arm]) == len(turns)


def groups(uids, value, valid):
    problems = tuple(Problem(uid, "", "", {}) for uid in uids)
    return Groups(problems, None, outcome_reward(torch.tensor(value), torch.tensor(valid), {}))


def test_a_step_moves_the_state_on_by_all_that_was_sampled_for_it():
    curriculum = ALL["learnability"]
    state = begin_curriculum(curriculum, 2, key(0))
    fresh = groups([0, 1, 2], [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [[True, True], [True, False], [False, False]])
    found = sample_and_follow(
        lambda first, count: fresh,
        AT_THE_START._replace(curriculum=state),
        3,
        group_sampling=lambda explore, carried, prompts: GroupBatch(
            fresh, fresh, carried._replace(drawn=prompts), {"a": 1.0}
        ),
        curriculum=curriculum,
        labels=("easy", "hard"),
    )
    assert found.carried.drawn == 3
    assert found.carried.curriculum.turns.tolist() == [2, 1]
    assert found.carried.curriculum.arrays["variance"].tolist() == [0.25, 0.0]
    assert found.carried.curriculum.arrays["asked"].tolist() == [1, 1]  # of problem 2 nothing is known
    shares = {"curriculum/share/easy": 2 / 3, "curriculum/share/hard": 1 / 3}
    rates = {"curriculum/pass_rate/easy": 0.5, "curriculum/pass_rate/hard": 1.0}
    assert found.figures == {"a": 1.0, **shares, **rates}


def test_rows_of_a_level_are_counted_together_and_one_that_was_not_asked_has_a_share_of_none():
    curriculum = ALL["uniform"]
    state = begin_curriculum(curriculum, 3, key(0))
    figures = curriculum_figures(curriculum, ("a", "a", "b"), state, state, [0, 1, 4], torch.tensor([1.0, 0.5, 0.0]))
    shares = {"curriculum/share/a": 1.0, "curriculum/share/b": 0.0}
    assert figures == {**shares, "curriculum/pass_rate/a": 0.5}


def test_pass_rates_count_what_could_be_scored():
    value, valid = torch.tensor([[1.1, 0.1, 1.0], [1.0, 1.0, 1.0]]), torch.tensor([[True, True, False], [False] * 3])
    reward = outcome_reward(value, valid, {"correct": value})
    assert curricula.reward_at_least(reward, threshold=1.0)[0] == 0.5
    assert curricula.part_at_least(reward, part="correct", threshold=0.1)[0] == 1.0
    assert curricula.reward_at_least(reward, threshold=1.0)[1].isnan()
    with pytest.raises(ValueError, match="got 'right', expected one of correct"):
        curricula.part_at_least(reward, part="right", threshold=0.1)


# -- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(curricula.threshold_levels, threshold=1.5, decay=0.0, min_groups=1, review=0.0), "threshold: got 1.5"),
        (partial(curricula.learnability_bandit, temperature=0.0, decay=0.0, floor=0.0), "temperature: got 0.0"),
        (
            partial(curricula.progress_bandit, temperature=1.0, decay=0.5, slow_decay=0.5, floor=0.0),
            "slow_decay: got 0.5",
        ),
        (partial(pool_in_band, size=1, low=0.5, high=0.4, decay=0.0, min_asked=1), "expected 0 <= low <= high"),
    ],
)
def test_bad_numbers_say_got_and_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make(pass_rate=RATE)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (torch.tensor([0, 3]), "got arm 3, expected 0 to 2"),
        (torch.tensor([0.0, 1.0]), "got torch.float32 of shape .2., expected torch.int64"),
        ([0, 1], "got list, expected"),
    ],
)
def test_arms_that_are_none_are_refused(chosen, message):
    curriculum = replace(ALL["uniform"], select=lambda state, key, count: chosen)
    with pytest.raises(ValueError, match=message):
        choose_uids(curriculum, begin_curriculum(curriculum, 3, key(0)), key(1), 0, 0, 2)


@pytest.mark.parametrize(
    "broken",
    [
        {"select": lambda state, key, count: torch.randint(int(state["arms"]), (count,))},  # draws without the key
        {"update": lambda state, arms, rates: {"arms": state["arms"].add_(int(len(arms) > 0))}},  # changes its state
        {"update": lambda state, arms, rates: {"arms": state["arms"] * rates.mean()}},  # nan
    ],
)
def test_a_curriculum_that_is_not_sound_is_caught_by_the_published_check(broken):
    with pytest.raises((AssertionError, ValueError)):
        testing.check_curriculum(replace(ALL["uniform"], **broken), arms=st.integers(2, 12))


def test_a_state_of_another_shape_is_refused():
    curriculum = replace(ALL["uniform"], update=lambda state, arms, rates: {"arms": torch.zeros(2)})
    state = begin_curriculum(curriculum, 3, key(0))
    with pytest.raises(ValueError, match=r"curriculum.update: got arrays .*float32 .2.*expected .*int64 "):
        update_curriculum(curriculum, state, [0], torch.tensor([1.0]))
