"""Rewards: three verdicts, one marked answer, and sums that know what they could not score."""

import json
import time
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from published import published

from grpo_fn.metrics import of_reward
from grpo_fn.problem import Completion, Problem
from grpo_fn.rewards import math as reward_math
from grpo_fn.rewards.combine import TAKEN, combine, part_names, serial
from grpo_fn.rewards.format import boxed, last_box
from grpo_fn.rewards.math import LONGEST_ANSWER, correct, lenient, marked_answer
from grpo_fn.types import Rollout


def verdict(gold, text, fn=correct):
    return fn(Problem(0, "?", gold, {}), Completion(text, 1, False))


RIGHT = [
    ("42", r"so \boxed{42}"),
    ("42", r"\boxed {42}"),
    ("42", r"\boxed{42.}"),
    ("42", r"\boxed{ 42 }."),
    ("42", r"\boxed{\boxed{42}}"),
    ("42", r"\boxed{41}, no: \boxed{42}"),
    ("42", r"$\boxed{x = 42}$"),
    ("42", r"\boxed{42 apples}"),
    ("42", r"\boxed{42\text{ cm}}"),
    ("42", r"\boxed{42.0}"),
    ("42", r"\fbox{42}"),
    ("42", "6 * 7\n#### 42"),
    ("42", "#### 41\nwait\n#### 42"),
    ("42", "### Answer\n#### Step 1\nThe answer is 42."),
    ("42", "The answer is 42. I am sure of it, 100 times."),
    ("42", "THE FINAL ANSWER IS: $42$"),
    ("42", r"the answer is \(42\)."),
    ("42", "The answer is **42**."),
    ("42", "The answer is 42 dollars."),
    ("42", "The answer is:\n\n42\n"),
    ("18", r"\boxed{\$18}"),
    ("1,000", r"\boxed{1000}"),
    ("1000", r"\boxed{1{,}000}"),
    ("42000", r"\boxed{42\,000}"),
    ("42000", r"\boxed{42,\!000}"),
    ("1000", "The answer is $1,000."),
    ("3.5", "The answer is 3.5. Yes."),
    ("-3", r"\boxed{-3}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{1/2}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("50%", r"\boxed{50\%}"),
    ("0.42", r"\boxed{42\%}"),
    (r"2\sqrt{6}", r"\boxed{\sqrt{24}}"),
    ("x^2+1", r"The answer is $1 + x^2$."),
    ("a + b + c", r"\boxed{c + a + b}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("(1,2]", r"\boxed{(1, 2]}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    (r"\text{even}", r"\boxed{\text{even}}"),
    (r"\neq 2", r"\boxed{\neq 2}"),
]
WRONG = [
    ("42", ""),
    ("42", "42"),
    ("42", r"\boxed{}"),
    ("42", r"\boxed{43}"),
    ("42", r"\boxed{42}, no: \boxed{41}"),
    ("42", r"\boxed{42} or rather \boxed{4"),
    ("42", r"\boxed{42"),
    ("42", r"\boxed{41, 42}"),
    ("42", r"\boxed{" + ", ".join(map(str, range(100))) + "}"),
    ("42", r"\boxed{41 or 42}"),
    ("42", "The answer is 41 or 42."),
    ("42", "The answer is 42 and not 41."),
    ("42", r"\boxed{\neq 42}"),
    ("42", r"\boxed{-42}"),
    ("42", r"\boxed{42x}"),
    ("42", r"\boxed{4 2 1}"),
    ("42", "#### 42 #### 43"),
    ("2", r"\boxed{2\sqrt{6}}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
    ("(1,2]", r"\boxed{(1,2)}"),
    ("0.5", r"\boxed{\frac{1}{0}}"),
    ("42", r"\boxed{\frac{}{}}"),
    ("42", "\\boxed{" + "42 + 0" * 100 + "}"),
    (r"\text{even}", r"\boxed{\text{odd}}"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right_answers_are_right(gold, text):
    assert verdict(gold, text) == 1.0
    assert verdict(gold, text, lenient) == 1.0


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong_answers_are_wrong(gold, text):
    assert verdict(gold, text) == 0.0


@pytest.mark.parametrize("gold", ["", "   ", r"\frac{}{}", "{{{"])
@pytest.mark.parametrize("text", [r"\boxed{42}", "nothing", r"\boxed{}", ""])
def test_a_gold_that_does_not_parse_is_unscorable_whatever_the_text(gold, text):
    assert verdict(gold, text) is None
    assert verdict(gold, text, lenient) is None


@pytest.mark.parametrize(
    ("text", "want"),
    [("it is 42", 1.0), ("42 and then 43", 0.0), (r"\boxed{41} or 42", 0.0), ("1,042.", 0.0), ("-42", 0.0), ("", 0.0)],
)
def test_lenient_falls_back_on_the_last_number_only(text, want):
    assert verdict("42", text, lenient) == want


def written(value):
    """Ways to write an integer."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    return st.sampled_from([f"{value}", f"{value:,}", f"{sign}00{size}", *([f"+{value}"] if value >= 0 else [])])


@given(st.data(), st.integers(-(10**30), 10**30), st.integers(-2, 2))
def test_integers_are_right_iff_equal_however_they_are_written(data, gold, gap):
    text = data.draw(written(gold + gap))
    assert verdict(str(gold), rf"\boxed{{{text}}}") == float(gap == 0)


@given(st.data(), st.integers(-(10**9), 10**9), st.sampled_from([-1, 0, 1]))
def test_the_short_cut_for_integers_gives_math_verifys_verdict(data, gold, gap):
    asked, said = data.draw(written(gold)), data.draw(written(gold + gap))
    short = reward_math._verdict(asked, said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_math, "_INTEGER", reward_math.re.compile("(?!)"))  # matches nothing: no short cut
        assert reward_math._verdict.__wrapped__(asked, said) == short


prose = st.text(st.characters(blacklist_characters="\\{}#", blacklist_categories=("Cs",)), max_size=60)


@given(prose, prose, st.integers(0, 999), st.integers(0, 999))
def test_text_around_the_last_box_changes_nothing(before, after, gold, said):
    text = rf"\boxed{{{gold}}} {before}\boxed{{{said}}}{after}"
    assert verdict(str(gold), text) == verdict(str(gold), text, lenient) == float(gold == said)


@given(prose)
def test_without_a_marked_answer_strict_is_never_right(text):
    assume(marked_answer(text) is None)
    assert verdict("42", text) == 0.0


balanced = st.recursive(
    st.text(st.characters(blacklist_characters="\\{}", blacklist_categories=("Cs",)), max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join), inner.map("{{{}}}".format), inner.map(r"\{{{}\}}".format)
    ),
    max_leaves=8,
)


@given(balanced, prose, prose)
def test_the_last_box_holds_what_was_put_in(inside, before, after):
    assert last_box(rf"{before}\boxed{{{inside}}}{after}") == inside


@given(balanced, prose)
def test_a_box_that_never_closes_holds_nothing(inside, before):
    assert last_box(rf"{before}\boxed{{{inside}") is None


MEGABYTE = {
    "open boxes": r"\boxed{" * 150_000,
    "empty boxes": r"\boxed{}" * 130_000,
    "box and spaces": r"\boxed" + " " * 1_000_000,
    "open braces": r"\boxed{" + "{" * 1_000_000,
    "digits": "The answer is " + "9" * 1_000_000,
    "groups of digits": "1" + ",111" * 250_000,
    "hashes": "#### " * 200_000,
    "said again and again": "the answer is " * 75_000,
    "dollars": r"\boxed{" + "$" * 1_000_000,
    "one long line": "#### 4" + "x" * 1_000_000,
}


@pytest.mark.parametrize("text", MEGABYTE.values(), ids=MEGABYTE.keys())
def test_a_megabyte_of_text_is_judged_in_linear_time(text):
    start = time.process_time()
    assert verdict("42", text) == verdict("42", text, lenient) == 0.0
    assert boxed(Problem(0, "?", "42", {}), Completion(text, 1, False)) == 0.0
    assert time.process_time() - start < 5.0


def test_an_answer_over_the_length_cap_is_wrong_even_if_equal():
    assert verdict("7", r"\boxed{" + "0" * (LONGEST_ANSWER - 1) + "7}") == 1.0
    assert verdict("7", r"\boxed{" + "0" * LONGEST_ANSWER + "7}") == 0.0


@pytest.mark.parametrize(
    ("text", "truncated", "want"),
    [
        (r"so \boxed{42}.", False, 1.0),
        (r"so \boxed{\frac{1}{2}}", False, 1.0),
        (r"so \boxed{42}.", True, 0.0),
        (r"\boxed{42} \boxed{42}", False, 0.0),
        (r"\boxed{\boxed{42}}", False, 0.0),
        (r"\boxed{42} \boxed{", False, 0.0),
        (r"\boxed{42", False, 0.0),
        (r"\boxed{ }", False, 0.0),
        (r"\boxed 42", False, 0.0),
        ("42", False, 0.0),
    ],
)
def test_well_formed_means_one_closed_box_with_something_in_it(text, truncated, want):
    assert boxed(Problem(0, "?", "7", {}), Completion(text, 1, truncated)) == want


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
    got = combine(problems(p), rollout(map(str, texts)), parts=[as_number, by_length], weights=[a, b], score=serial)
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
    combine(problems(2), table, parts=[spy], weights=[1.0], score=serial)
    assert seen == [
        (0, Completion("a", 1, True)),
        (0, Completion("b", 2, False)),
        (1, Completion("c", 3, False)),
        (1, Completion("d", 0, False)),
    ]


@pytest.mark.parametrize(("parts", "weights"), [([], []), ([by_length], []), ([by_length], [1.0, 2.0])])
def test_parts_without_their_weights_are_refused(parts, weights):
    with pytest.raises(ValueError, match="one weight per part"):
        combine(problems(1), rollout(["1"]), parts=parts, weights=weights, score=serial)


def test_rows_that_do_not_make_whole_groups_are_refused():
    with pytest.raises(ValueError, match="got 3 rows for 2 problems"):
        combine(problems(2), rollout(["1", "2", "3"]), parts=[by_length], weights=[1.0], score=serial)


def test_parts_are_named_after_their_functions_and_by_module_where_names_collide():
    twin = partial(lambda problem, completion: 0.0)
    twin.func.__name__, twin.func.__module__ = "correct", "elsewhere"
    assert part_names([partial(correct), boxed]) == ["correct", "boxed"]
    assert part_names([correct, twin]) == ["grpo_fn.rewards.math.correct", "elsewhere.correct"]
    with pytest.raises(ValueError, match="different functions"):
        part_names([correct, partial(correct)])


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_a_part_never_takes_the_name_of_a_metric_of_the_whole_reward(name):
    part = partial(lambda problem, completion: 0.0)
    part.func.__name__, part.func.__module__ = name, "mine"
    assert part_names([part]) == [f"mine.{name}"]
    reward = combine(problems(1), rollout(["1", "2"]), parts=[part], weights=[1.0], score=serial)
    whole = {f"reward/{taken}" for taken in TAKEN}
    assert set(of_reward(reward)) == whole | {f"reward/mine.{name}"}


def gold_rows(name):
    path = published(f"gsm8k/{name}")
    return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
def test_every_gsm8k_solution_is_right_and_every_gold_equals_itself(name, count):
    solutions = gold_rows(name)
    assert len(solutions) == count
    for solution in solutions:
        gold = solution.rpartition("####")[2].strip()
        assert verdict(gold, solution) == verdict(gold.replace(",", ""), rf"\boxed{{{gold}}}") == 1.0


def test_gsm8k_golds_go_through_math_verify_as_well():
    for solution in gold_rows("test.jsonl")[::20]:
        gold = solution.rpartition("####")[2].strip()
        assert verdict(gold, rf"\boxed{{{gold}.0}}") == 1.0
        assert verdict(gold, rf"\boxed{{{gold}.5}}") == 0.0
