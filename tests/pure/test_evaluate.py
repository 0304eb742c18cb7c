"""Accuracy counts what could be scored, and its interval is Wilson's."""

import math

import hypothesis.strategies as st
import pytest
import torch
from fakes import LIMIT, TablePolicy, TableSampler, problem
from hypothesis import given

from grpo_fn import prng
from grpo_fn.evaluate import Judged, evaluate, wilson, word
from grpo_fn.problem import Completion, Problem
from grpo_fn.rewards.combine import serial

KEY = prng.key(1, device="cpu")
KEYS = {
    f"eval/{name}"
    for name in ("accuracy", "accuracy_low", "accuracy_high", "problems", "unscorable", "length_mean", "truncated")
}


# -- the interval


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, the score method.
        *((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)),
        *((0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (1, 1, 0.2065, 1.0)),
    ],
)
def test_golden_intervals(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 3000), st.data())
def test_the_interval_holds_the_shares_that_could_have_given_the_count(n, data):
    right = data.draw(st.integers(0, n))
    low, high = wilson(right, n)
    assert 0 <= low <= right / n + 1e-12
    assert right / n - 1e-12 <= high <= 1
    for edge in (low, high):  # the score test is at its limit there: |share - edge| = z sd(edge)
        inside = 1e-9 < edge < 1 - 1e-9
        assert inside or right in (0, n)
        if inside:
            z = (right / n - edge) / math.sqrt(edge * (1 - edge) / n)
            assert abs(z) == pytest.approx(1.959964, rel=1e-3)
    mirrored = wilson(n - right, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


def test_no_trials_say_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


# -- the evaluation


@pytest.mark.parametrize(("value", "name"), [(None, "unscorable"), (1.0, "right"), (0.999, "wrong"), (0.0, "wrong")])
def test_words(value, name):
    assert word(value) == name


def told(verdicts: list[float | None]):
    """A verdict that says of problem i what is listed."""
    return lambda problem, completion: verdicts[problem.uid]


@given(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=12))
def test_accuracy_is_the_share_of_right_answers_among_those_scored(verdicts):
    policy = TablePolicy(torch.zeros(6), lr=0.0, reference_table=None)
    asked = [problem(i, f"question {i}") for i in range(len(verdicts))]
    sampler = TableSampler(policy)
    figures, judged = evaluate(sampler, asked, key=KEY, verdict=told(verdicts), score=serial)
    right, n = verdicts.count(1.0), len(verdicts) - verdicts.count(None)
    rollout = sampler.sample(asked, 1, key=KEY)
    assert figures.keys() == KEYS
    assert (figures["eval/accuracy"] == right / n) if n else math.isnan(figures["eval/accuracy"])
    assert (figures["eval/accuracy_low"], figures["eval/accuracy_high"]) == wilson(right, n)
    assert figures["eval/problems"] == len(verdicts)
    assert figures["eval/unscorable"] == verdicts.count(None)
    assert figures["eval/length_mean"] == pytest.approx(float(rollout.mask.sum()) / len(asked))
    assert figures["eval/truncated"] == pytest.approx(float(rollout.truncated.double().mean()))
    assert judged == [
        Judged(p.uid, p.prompt, rollout.text[i], p.answer, word(verdicts[i])) for i, p in enumerate(asked)
    ]


def test_the_verdict_sees_every_problem_with_its_own_completion():
    seen: list[tuple[int, Completion]] = []

    def verdict(problem: Problem, completion: Completion) -> float:
        seen.append((problem.uid, completion))
        return 1.0

    sampler = TableSampler(TablePolicy(torch.zeros(6), lr=0.0, reference_table=None))
    asked = [problem(uid, "?") for uid in (4, 2, 9)]
    evaluate(sampler, asked, key=KEY, verdict=verdict, score=serial)
    rollout = sampler.sample(asked, 1, key=KEY)
    assert [uid for uid, _ in seen] == [4, 2, 9]
    assert [c.text for _, c in seen] == list(rollout.text)
    assert [c.truncated for _, c in seen] == rollout.truncated.tolist()
    assert all(c.truncated <= (c.length == LIMIT) for _, c in seen)
