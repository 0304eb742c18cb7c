"""Parts add up: the weighted sum where every weighted part was scored, and names that no two parts share."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.algo.metrics import reward_metrics
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.problem import Completion, Problem, Turn
from grpo_fn.core.types import Rollout
from grpo_fn.rewards.combine import TAKEN, combine, part_names, score_serially, with_turns
from grpo_fn.rewards.format import boxed
from grpo_fn.rewards.math import correct


def rollout(texts, lengths=None, truncated=None):
    texts = list(texts)
    count = len(texts)
    mask = torch.arange(4)[None] < torch.tensor(lengths or [2] * count)[:, None]
    return Rollout(
        torch.zeros(count, 4, dtype=torch.long),
        mask,
        torch.zeros(count, 4),
        torch.tensor(truncated or [False] * count),
        tuple(texts),
    )


def problems(count):
    return [Problem(uid, "?", str(uid), {}) for uid in range(count)]


def as_number(problem, completion):
    return None if completion.text == "None" else float(completion.text)


def by_length(problem, completion):
    return 10.0 * completion.length + completion.truncated


scores = st.one_of(st.none(), st.floats(-8, 8, width=32))


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
def test_combined_is_the_weighted_sum_where_every_weighted_part_was_scored(data, p, g, a, b):
    texts = data.draw(st.lists(scores, min_size=p * g, max_size=p * g))
    got = combine(
        problems(p), rollout(map(str, texts)), parts=[as_number, by_length], weights=[a, b], score=score_serially
    )
    assert got.value.shape == got.valid.shape == (p, g)
    assert got.value.dtype == torch.float32
    assert list(got.parts) == ["as_number", "by_length"]
    for row, text in enumerate(texts):
        i, j = divmod(row, g)
        assert bool(got.valid[i, j]) == (text is not None or a == 0)
        want = (a * (text or 0.0) + b * 20.0) if got.valid[i, j] else 0.0
        assert float(got.value[i, j]) == pytest.approx(want, abs=1e-4)


def test_rows_belong_to_their_problem_and_carry_length_and_truncation():
    seen = []

    def spy(problem, completion):
        seen.append((problem.uid, completion))
        return 0.0

    table = rollout("abcd", lengths=[1, 2, 3, 0], truncated=[True, False, False, False])
    combine(problems(2), table, parts=[spy], weights=[1.0], score=score_serially)
    assert seen == [
        (0, Completion("a", 1, True)),
        (0, Completion("b", 2, False)),
        (1, Completion("c", 3, False)),
        (1, Completion("d", 0, False)),
    ]


@pytest.mark.parametrize(("parts", "weights"), [([], []), ([by_length], []), ([by_length], [1.0, 2.0])])
def test_parts_without_their_weights_are_refused(parts, weights):
    with pytest.raises(ValueError, match="one weight per part"):
        combine(problems(1), rollout(["1"]), parts=parts, weights=weights, score=score_serially)


def test_rows_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match="got 3 rows for 2 problems"):
        combine(problems(2), rollout(["1", "2", "3"]), parts=[by_length], weights=[1.0], score=score_serially)


def test_parts_are_named_after_their_functions_and_by_module_where_names_collide():
    twin = partial(lambda problem, completion: 0.0)
    twin.func.__name__, twin.func.__module__ = "correct", "elsewhere"
    assert part_names([partial(correct), boxed]) == ["correct", "boxed"]
    assert part_names([correct, twin]) == ["grpo_fn.rewards.math.correct", "elsewhere.correct"]
    with pytest.raises(ValueError, match="different functions"):
        part_names([correct, partial(correct)])


@pytest.mark.parametrize("name", sorted(TAKEN)[:1])
def test_a_part_never_takes_the_name_of_a_metric_of_the_whole_reward(name):
    part = partial(lambda problem, completion: 0.0)
    part.func.__name__, part.func.__module__ = name, "mine"
    assert part_names([part]) == [f"mine.{name}"]
    reward = combine(problems(1), rollout(["1", "2"]), parts=[part], weights=[1.0], score=score_serially)
    whole = {f"reward/{taken}" for taken in TAKEN}
    assert set(reward_metrics(reward)) == whole | {f"reward/mine.{name}"}


def wrapped(problem, completion, *, reward, seconds):
    """A stand-in for what changes how a reward is run and not what it says."""
    return reward(problem, completion)


def named_within(fn):
    return partial(wrapped, reward=fn, seconds=1.0)


@pytest.mark.parametrize("bare", [correct, partial(correct), named_within(correct), partial(by_length, reward=2.0)])
def test_a_wrapper_goes_by_the_name_of_what_it_wraps_however_deep(bare):
    (name,) = part_names([bare])
    with pytest.raises(ValueError, match="different functions"):
        part_names([bare, named_within(bare)])
    assert name in ("correct", "by_length")
    assert part_names([named_within(bare)]) == part_names([named_within(named_within(bare))]) == [name]


@given(st.lists(scores, min_size=4, max_size=4))
def test_a_part_that_is_only_logged_decides_nothing(texts):
    lengths = [1, 2, 3, 4]
    alone = combine(
        problems(2), rollout(map(str, texts), lengths), parts=[by_length], weights=[2.0], score=score_serially
    )
    both = combine(
        problems(2),
        rollout(map(str, texts), lengths),
        parts=[as_number, by_length],
        weights=[0.0, 2.0],
        score=score_serially,
    )
    assert both.valid.all()
    assert torch.equal(both.value, alone.value)
    assert torch.equal(both.parts["by_length"], alone.parts["by_length"])
    assert both.parts["as_number"].flatten().tolist() == [text or 0.0 for text in texts]


# -- episodes


def turn(reward, state):
    return Turn("said", 1, "seen", reward, state)


def episode(*turns):
    return Completion("said", len(turns), False, turns)


def test_the_turns_of_episodes_are_in_the_reward():
    rows = [episode(turn(0.5, "a"), turn(1.0, "b")), episode(turn(0.25, "a")), episode(turn(0, "a")), episode()]
    plain = outcome_reward(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), {})
    found = with_turns(plain, rows)
    assert found.turns.tolist() == [[[0.5, 1.0], [0.25, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    assert found.states.tolist() == [[[0, 1], [0, -1]], [[0, -1], [-1, -1]]]
    assert found.value is not None
    assert found.valid.all()


def test_a_turn_that_cannot_be_scored_makes_the_sample_invalid():
    rows = [episode(turn(None, "a"), turn(1.0, "b")), episode(turn(1.0, "a"))]
    found = with_turns(outcome_reward(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), {}), rows)
    assert found.valid.tolist() == [[False, True]]
    assert found.value.tolist() == [[0.0, 1.0]]
    assert found.turns.isfinite().all()


def test_rows_without_turns_are_episodes_of_one():
    found = combine(problems(2), rollout(["1", "2", "3", "4"]), parts=[as_number], weights=[1.0], score=score_serially)
    assert found.turns.tolist() == [[[1.0], [2.0]], [[3.0], [4.0]]]
    assert found.states.tolist() == [[[0], [0]], [[1], [1]]]
