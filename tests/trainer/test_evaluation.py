"""What is found about a problem depends on that problem alone, and the figures are those of all of them together."""

import json
import math
import re
import time
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from fakes import LIMIT, TablePolicy, TableSampler, problem
from hypothesis import given

from grpo_fn.core import prng, sampling
from grpo_fn.core.problem import Completion, Problem, Turn
from grpo_fn.rewards.combine import score_serially
from grpo_fn.trainer.evaluation import (
    Attempt,
    GradedAnswer,
    before_and_after,
    estimate_pass_at_k,
    evaluate,
    final_answer,
    grader_names,
    maj_at_k,
    problems_by_meta,
    summarise,
    wilson,
)
from grpo_fn.trainer.sections import Evaluation

KEY = prng.key(1, device="cpu")
KEYS = {
    f"eval/{name}"
    for name in ("accuracy", "accuracy_low", "accuracy_high", "problems", "unscorable", "length_mean", "truncated")
}
CHOOSE = partial(sampling.categorical, temperature=1.0)


def strict(problem: Problem, completion: Completion) -> float | None:
    """Something of the text, three-valued."""
    first = int(completion.text[0])
    return None if first == 0 else float(first % 2)


def shaped(problem: Problem, completion: Completion) -> float | None:
    """A share, for a further judge."""
    return None if completion.text[-1] == "1" else len(completion.text) / 8


def first_word(text: str) -> str | None:
    return text.split()[0] if text[0] != "4" else None


def samplers() -> tuple[TableSampler, TableSampler]:
    """Two that do not draw alike."""
    one, other = (TablePolicy(torch.linspace(0, tilt, 6), lr=0.0, reference_table=None) for tilt in (0.0, 1.0))
    return TableSampler(one), TableSampler(other)


def found(problems, samples=2, judges=(strict, shaped), answer=first_word, key=KEY):
    knobs = {"judges": judges, "samples": samples, "answer": answer, "score": score_serially}
    return evaluate(*samplers(), problems, key=key, **knobs)


def asked(n: int) -> list[Problem]:
    return [problem(uid, f"question {uid}")._replace(meta={"level": uid % 3}) for uid in range(n)]


# -- what is found about a problem


@given(st.permutations(range(7)), st.sets(st.integers(1, 6)), st.integers(0, 3))
def test_problems_may_come_in_any_order_and_in_any_parts(order, cuts, samples):
    problems = asked(7)
    whole = {one.problem.uid: one for one in found(problems, samples)}
    places = [0, *sorted(cuts), 7]
    parts = [found([problems[i] for i in order[a:b]], samples) for a, b in pairwise(places)]
    together = [one for part in parts for one in part]
    assert [one.problem.uid for one in together] == list(order)
    assert all(one == whole[one.problem.uid] for one in together)
    knobs = {"ks": range(1, samples + 1), "by": ["level"]}
    assert repr(summarise(together, **knobs)) == repr(summarise(list(whole.values()), **knobs))


@given(st.integers(0, 3), st.integers(1, 3))
def test_more_samples_extend_fewer_and_leave_the_greedy_answer(few, more):
    for small, large in zip(found(asked(5), few), found(asked(5), few + more), strict=True):
        assert small.greedy == large.greedy
        assert small.samples == large.samples[:few]
        assert len(large.samples) == few + more


def test_greedy_answers_and_samples_come_from_their_own_sampler_and_key():
    greedy, sampled = samplers()
    problems, keys = asked(4), prng.split(KEY, 2)
    alone = greedy.sample(problems, 1, key=keys[0])
    drawn = sampled.sample(problems, 3, key=keys[1])
    judged = found(problems, 3)
    assert [one.greedy.text for one in judged] == list(alone.text)
    assert [sample.text for one in judged for sample in one.samples] == list(drawn.text)
    assert [s.length for one in judged for s in one.samples] == drawn.mask.sum(-1).tolist()
    assert [s.truncated for one in judged for s in one.samples] == drawn.truncated.tolist()
    assert {s.truncated for one in judged for s in one.samples} == {True, False}
    assert all(a.truncated <= (a.length == LIMIT) for one in judged for a in (one.greedy, *one.samples))


def test_every_judge_sees_every_completion_with_its_own_problem():
    seen: dict[str, list[tuple[int, str]]] = {"one": [], "two": []}

    def one(problem: Problem, completion: Completion) -> float:
        seen["one"].append((problem.uid, completion.text))
        return 1.0

    def two(problem: Problem, completion: Completion) -> None:
        seen["two"].append((problem.uid, completion.text))

    judged = found([problem(uid, "?") for uid in (4, 2, 9)], 2, [one, two])
    expected = [(j.problem.uid, a.text) for j in judged for a in (j.greedy, *j.samples)]
    assert sorted(seen["one"]) == sorted(seen["two"]) == sorted(expected)
    assert judged[0].greedy.scores == {"one": 1.0, "two": None}
    assert [a.scores for j in judged for a in j.samples] == [{"one": 1.0, "two": None}] * 6


def test_the_problem_that_training_taught_is_shown_before_and_after_on_bounded_lines():
    def rows(verdicts: str, text: str) -> list[dict[str, object]]:
        words = {"+": "right", "-": "wrong"}
        usual = {"prompt": "Why?\x1b[2J\n" + "w" * 999, "answer": "42"}
        return [{"uid": i, "text": f"{text}{i}", "verdict": words[v], **usual} for i, v in enumerate(verdicts)]

    question, expected, before, after = before_and_after(rows("+--", "no"), rows("-++", "yes")[::-1])
    assert question.startswith(r"a held-out problem   Why?\x1b[2J\nwww")
    assert len(question) < 350
    assert expected.split() == ["expected", "42"]
    assert before.split() == ["before", "training", "wrong", "no2"], "of those that were learned the first in the file"
    assert after.split() == ["after", "training", "right", "yes2"]
    assert before_and_after(rows("+", "no"), rows("+", "yes"))[3].split()[-1] == "yes0", "none was learned: the first"
    turns = [Turn("call", 1, "x", None, "")._asdict()]
    assert "call" in before_and_after(rows("+", ""), [{**rows("+", "")[0], "turns": turns}])[3]
    assert before_and_after(rows("+", "no"), []) == []


def test_a_row_of_an_episode_has_its_turns_and_a_person_reads_all_of_them():
    turns = (Turn("3*4?", 4, "12", 0.0, "a", calls=1), Turn("12", 2, "", 1.0, "b"))
    attempt = Attempt("12", None, {"strict": 1.0}, 6, False, turns)
    row = GradedAnswer(Problem(3, "3*4", "12", {}), attempt, (attempt, attempt._replace(turns=()))).row()
    assert [Turn(**turn) for turn in json.loads(json.dumps(row))["turns"]] == list(turns)
    assert [tuple(Turn(**turn) for turn in sample.get("turns", ())) for sample in row["samples"]] == [turns, ()]
    shown = GradedAnswer(Problem(3, "3*4", "12", {}), attempt, ()).display_fields()
    assert shown["completion"] == "3*4?\n> 12\n12"


# -- the figures

values = st.sampled_from([None, 0.0, 0.5, 1.0])


@st.composite
def attempts(draw) -> Attempt:
    scores = {"strict": draw(values), "other": draw(values)}
    return Attempt("text", draw(st.sampled_from(["", "1", "2"])), scores, draw(st.integers(0, 9)), draw(st.booleans()))


@st.composite
def evaluations(draw) -> list[GradedAnswer]:
    samples, n = draw(st.integers(0, 4)), draw(st.integers(1, 8))
    metas = [
        draw(st.dictionaries(st.sampled_from(["level", "task"]), st.sampled_from([None, 1, "a b"]))) for _ in range(n)
    ]
    return [
        GradedAnswer(Problem(i, "?", "0", meta), draw(attempts()), tuple(draw(attempts()) for _ in range(samples)))
        for i, meta in enumerate(metas)
    ]


def share(rows: list[Attempt]) -> tuple[int, int]:
    known = [row for row in rows if row.scores["strict"] is not None]
    return sum(row.scores["strict"] == 1.0 for row in known), len(known)


@given(evaluations())
def test_the_figures_of_the_greedy_answers(judged):
    figures = summarise(judged, ks=(), by=())
    greedy = [one.greedy for one in judged]
    right, n = share(greedy)
    assert figures.keys() == KEYS | {"eval/other"}
    assert (figures["eval/accuracy"] == right / n) if n else math.isnan(figures["eval/accuracy"])
    assert (figures["eval/accuracy_low"], figures["eval/accuracy_high"]) == wilson(right, n)
    assert figures["eval/problems"] == len(judged)
    assert figures["eval/unscorable"] == len(judged) - n
    assert figures["eval/length_mean"] == pytest.approx(sum(a.length for a in greedy) / len(greedy))
    assert figures["eval/truncated"] == pytest.approx(sum(a.truncated for a in greedy) / len(greedy))
    other = [a.scores["other"] for a in greedy if a.scores["other"] is not None]
    assert figures["eval/other"] == pytest.approx(sum(other) / len(other) if other else math.nan, nan_ok=True)


@given(evaluations(), st.randoms(use_true_random=False))
def test_the_figures_are_the_same_in_any_order(judged, random):
    knobs = {"ks": range(1, len(judged[0].samples) + 1), "by": ("level", "task")}
    before = summarise(judged, **knobs)
    random.shuffle(judged)
    assert repr(summarise(judged, **knobs)) == repr(before)


@given(evaluations())
def test_accuracy_by_key_is_that_of_each_part_and_the_parts_make_the_whole(judged):
    figures = summarise(judged, ks=(), by=["level"])
    parts = problems_by_meta(judged, "level")
    for value, rows in parts.items():
        right, n = share([one.greedy for one in rows])
        assert (figures[f"eval/level/{value}"] == right / n) if n else f"eval/level/{value}" not in figures
    with_level = [one.greedy for one in judged if one.problem.meta.get("level") is not None]
    shares = [share([one.greedy for one in rows]) for rows in parts.values()]
    assert (sum(r for r, _ in shares), sum(n for _, n in shares)) == share(with_level)
    assert {name for name in figures if name.startswith("eval/level/")} <= {"eval/level/1", "eval/level/a_b"}


@given(evaluations())
def test_samples_give_pass_and_majority(judged):
    samples = len(judged[0].samples)
    ks = range(1, samples + 1)
    figures = summarise(judged, ks=ks, by=())
    assert figures.keys() - KEYS - {"eval/other"} == {f"eval/{name}@{k}" for k in ks for name in ("pass", "maj")}
    scorable = [one.samples for one in judged if any(s.scores["strict"] is not None for s in one.samples)]
    for k in ks:
        right = [[s.scores["strict"] == 1.0 for s in drawn] for drawn in scorable]
        passed = [estimate_pass_at_k(samples, sum(r), k) for r in right]
        won = [maj_at_k([s.marked for s in drawn], r, k) for drawn, r in zip(scorable, right, strict=True)]
        for name, of_problems in (("pass", passed), ("maj", won)):
            mean = sum(of_problems) / len(of_problems) if of_problems else math.nan
            assert figures[f"eval/{name}@{k}"] == pytest.approx(mean, nan_ok=True)


@given(evaluations())
def test_without_answers_to_mark_there_is_no_majority(judged):
    bare = [one._replace(greedy=one.greedy._replace(marked=None)) for one in judged]
    names = summarise(bare, ks=[1] if judged[0].samples else [], by=()).keys() - KEYS - {"eval/other"}
    assert names == ({"eval/pass@1"} if judged[0].samples else set())


# -- judges and knobs


def test_judges_have_names_of_their_own():
    assert grader_names([strict, partial(shaped)]) == ["strict", "shaped"]
    with pytest.raises(ValueError, match="judges: got none"):
        grader_names([])
    with pytest.raises(ValueError, match="expected different functions"):
        grader_names([strict, partial(strict)])


KNOBS = {
    **{"samples": 4, "ks": (1, 4), "token_sampler": CHOOSE, "extract_answer": None, "by": ()},
    **{"every": 0, "problems": 8, "graders": (strict,), "async_sampler": None, "max_rows": 8, "timeout": 1.0},
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"samples": -1}, "samples: got -1, expected 0"),
        ({"ks": (1, 5)}, "ks: got [1, 5] with 4 samples a problem, expected each of them from 1 to 4"),
        ({"ks": ()}, "ks: got [] with 4 samples"),
        ({"by": "level"}, "by: got 'level', expected a list of keys, such as ('level',)"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(wrong, said):
    assert Evaluation(**{**KNOBS, "samples": 0, "ks": (1, 8)}).samples == 0  # then ks do not matter
    Evaluation(**KNOBS)
    with pytest.raises(ValueError, match=re.escape(said)):
        Evaluation(**{**KNOBS, **wrong})


# -- votes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"so \boxed{42}", "The answer is 42."),
        (r"\boxed{1,080}", "#### 1080"),
        (r"\boxed{\dfrac{1}{2}}", r"\boxed{ \frac{1} {2} }"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\boxed{(3,\frac{\pi}{2})}"),
        (r"\boxed{$18}", r"\boxed{18}"),
    ],
)
def test_the_same_answer_is_the_same_vote_however_it_is_set(one, other):
    assert final_answer(one) == final_answer(other) != None  # noqa: E711


@pytest.mark.parametrize(
    ("one", "other"),
    [(r"\boxed{1,2}", r"\boxed{12}"), (r"\boxed{(1,080)}", r"\boxed{(1080)}"), (r"\boxed{x+1}", r"\boxed{x-1}")],
)
def test_different_answers_are_different_votes(one, other):
    assert final_answer(one) != final_answer(other)


LONG = [r"\boxed{" * 150_000, r"\boxed{" + "(" * 1_000_000 + "}", "#### " * 200_000, "Answer: " + "1," * 400_000]


@pytest.mark.parametrize("text", [*LONG, r"\boxed{" + " " * 900_000 + "1}"], ids=range(5))
def test_a_megabyte_of_text_votes_at_once(text):
    start = time.process_time()
    final_answer(text)
    assert time.process_time() - start < 3.0
