"""Lengths in tokens and repetition in words: published formulas, their corners, and what they must not look at."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import cosine_length, repeated_ngrams, soft_overlong_punishment

ASKED = Problem(0, "?", "42", {})

lengths = st.integers(0, 40)
limits = st.integers(1, 30).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most)))
texts = st.text(max_size=40)


def overlong(length, max_length, cache_length, text="", truncated=False):
    row = Completion(text, length, truncated)
    return soft_overlong_punishment(ASKED, row, max_length=max_length, cache_length=cache_length)


@given(lengths, limits)
def test_soft_overlong_punishment_is_equation_13_of_dapo(length, limit):
    most, cache = limit
    if length <= most - cache:
        expected = 0.0
    elif length <= most:
        expected = ((most - cache) - length) / cache
    else:
        expected = -1.0
    assert overlong(length, most, cache) == expected


def test_golden_soft_overlong_punishment():
    """The paper's numbers: 20,480 tokens at most, the last 4,096 of them the cache."""
    assert [overlong(n, 20480, 4096) for n in (0, 16384, 18432, 20480, 99999)] == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(("most", "cache"), [(10, 0), (10, -1), (10, 11), (0, 0)])
def test_a_cache_that_does_not_fit_is_refused(most, cache):
    with pytest.raises(ValueError, match=f"got {cache} with max_length {most}"):
        overlong(1, most, cache)


def named_verdict(problem, completion):
    """The verdict that the text names."""
    return {"right": 1.0, "wrong": 0.0, "nearly": 0.5}.get(completion.text)


NUMBERS = {"right_empty": 2.0, "right_full": 1.0, "wrong_empty": -10.0, "wrong_full": 0.0, "exceeded": -10.0}


def cosine(text, length, max_length):
    return cosine_length(
        ASKED, Completion(text, length, False), verdict=named_verdict, max_length=max_length, **NUMBERS
    )


ENDS = {"right": (2.0, 1.0), "wrong": (-10.0, 0.0), "nearly": (-10.0, 0.0)}  # empty, full
verdicts = st.sampled_from(sorted(ENDS))


@given(verdicts, st.integers(2, 60), st.data())
def test_the_cosine_reward_goes_from_empty_to_full_and_a_part_of_a_point_is_wrong(text, most, data):
    length = data.draw(st.integers(1, most - 1))
    assert cosine(text, 0, most) == ENDS[text][0]
    assert min(ENDS[text]) <= cosine(text, length, most) <= max(ENDS[text])
    assert cosine(text, length, most) + cosine(text, most - length, most) == pytest.approx(sum(ENDS[text]))


@given(st.integers(1, 30), st.data())
def test_short_is_better_when_right_and_worse_when_wrong(most, data):
    length = data.draw(st.integers(0, most))
    assert cosine("right", length, most + 2) >= cosine("right", length + 1, most + 2)
    assert cosine("wrong", length, most + 2) <= cosine("wrong", length + 1, most + 2)


@given(lengths, st.integers(1, 30))
def test_a_row_without_a_verdict_has_no_cosine_reward(length, most):
    assert cosine("?", length, most) is None


def test_golden_cosine_reward():
    """A quarter of the way: 1 + (2 - 1) (1 + cos(pi / 4)) / 2 and -10 (1 + cos(pi / 4)) / 2."""
    half = (1 + 0.5**0.5) / 2
    assert cosine("right", 1024, 4096) == pytest.approx(1 + half)
    assert cosine("wrong", 1024, 4096) == pytest.approx(-10 * half)
    assert cosine("right", 2048, 4096) == pytest.approx(1.5)


def test_a_cosine_over_no_tokens_is_refused():
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        cosine("right", 0, 0)


def repeated(text, ngram=2, max_penalty=1.0):
    return repeated_ngrams(ASKED, Completion(text, 1, False), ngram=ngram, max_penalty=max_penalty)


words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12)


@given(words, st.integers(1, 4), st.floats(0, 4))
def test_repetition_is_the_share_of_ngrams_that_were_there_before(said, ngram, penalty):
    grams = [tuple(said[i : i + ngram]) for i in range(len(said) - ngram + 1)]
    again = sum(gram in grams[:i] for i, gram in enumerate(grams))
    expected = -penalty * again / len(grams) if grams else 0.0
    assert repeated(" ".join(said), ngram, penalty) == pytest.approx(expected, abs=1e-12)


@given(words, st.sampled_from([" ", "\n", "\t  ", "\u00a0"]), st.data())
def test_neither_case_nor_kind_of_white_space_counts(said, space, data):
    loud = [word.upper() if data.draw(st.booleans()) else word for word in said]
    assert repeated(space.join(loud)) == repeated(" ".join(said))


@pytest.mark.parametrize(("ngram", "penalty"), [(0, 1.0), (-1, 1.0), (2, -1.0), (2, float("nan"))])
def test_no_ngram_and_no_penalty_are_refused(ngram, penalty):
    with pytest.raises(ValueError, match=f"got ngram {ngram} and max_penalty {penalty}"):
        repeated("a b c", ngram, penalty)


@pytest.mark.parametrize("text", ["a " * 500_000, "\n" * 1_000_000])
def test_a_megabyte_is_judged_in_linear_time(text):
    start = time.process_time()
    assert -1 <= repeated(text, 20) <= 0
    assert time.process_time() - start < 5.0
