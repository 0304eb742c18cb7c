"""Procedural tasks: pure streams, held-out questions apart, strict verdicts, and an audit that says what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import last_box
from grpo_fn.rewards.procedural import procedural_correct
from grpo_fn.tasks import procedural
from grpo_fn.tasks.task import TEST_UID, normalize_prompt

procedural_audit = pytest.importorskip(
    "procedural_audit", reason="the extra `tasks` is not installed", exc_type=ImportError
)
KNOBS = {"levels": [0, 2], "template": "Q: {question}\n", "test_size": 6, "accept": ()}
SMALL = {"chain_sum": 2, "gcd": 1}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks" / "procedural.md"


def made(**changed):
    return procedural.task(**{"weights": SMALL, **KNOBS, **changed})


@pytest.fixture(scope="module")
def small():
    return made()


@given(st.integers(0, 2**63), st.lists(st.integers(0, 10**9), min_size=1, max_size=4))
def test_a_problem_is_a_function_of_key_and_index(small, seed, indices):
    key = prng.key(seed, device="cpu")
    there = [small.train(key, i) for i in indices]
    assert there == [small.train(key, i) for i in reversed(indices)][::-1]
    assert [problem.uid for problem in there] == indices
    assert all(problem.meta["level"] in KNOBS["levels"] for problem in there)


def one_of_sixty(name, level, seed):
    return {"question": f"{seed % 60}?", "answer": "1", "metadata": {}}


@pytest.fixture(scope="module")
def few():
    """A kind with 60 questions, 40 of which are held out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(procedural, "make_entry", one_of_sixty)
        return made(weights={"gcd": 1}, test_size=40)


@given(st.integers(0, 2**63))
def test_no_training_question_is_held_out_where_there_are_few(few, seed):
    held_out = {normalize_prompt(problem.prompt) for problem in few.test}
    key = prng.key(seed, device="cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(procedural, "make_entry", one_of_sixty)
        assert len(held_out) == 40
        assert not any(normalize_prompt(few.train(key, i).prompt) in held_out for i in range(8))


def test_held_out_problems_are_the_same_for_every_run_and_a_larger_set_begins_with_a_smaller_one(small):
    assert made().test == small.test
    one = [problem for problem in made(test_size=9).test if problem.meta["task"] == "gcd"]
    two = [problem for problem in small.test if problem.meta["task"] == "gcd"]
    assert [x.prompt for x in one[:6]] == [x.prompt for x in two]
    assert [x.uid for x in small.test] == [TEST_UID + i for i in range(12)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": {"chain_sums": 1}}, "got 'chain_sums', expected one of .*chain_sum"),
        ({"weights": {"game_of_life_halting": 1}}, "got game_of_life_halting, expected one that passes the audit: "),
        ({"weights": {"gcd": 1}, "levels": [99]}, "gcd: got level 99, expected -1 or 0 to "),
        ({"weights": {"list_functions": 1}, "accept": ["list_functions"]}, "it has no levels"),
        ({"template": "no field"}, "expected one that holds {question}"),
    ],
)
def test_a_refusal_says_got_and_expected(changed, message):
    with pytest.raises(ValueError, match=message):
        made(**changed)


def test_a_kind_with_too_few_questions_is_refused(monkeypatch):
    monkeypatch.setattr(procedural, "ATTEMPTS", 2)
    monkeypatch.setattr(procedural, "make_entry", lambda *_: {"question": "1?", "answer": "1", "metadata": {}})
    with pytest.raises(ValueError, match="got 1 different questions of gcd in 12 seeds, expected 6"):
        made(weights={"gcd": 1})


def test_a_kind_that_the_library_cannot_make_is_refused_with_what_it_raised(small, monkeypatch):
    def fails(name, level, seed):
        raise KeyError("no such operator")

    monkeypatch.setattr(procedural, "ATTEMPTS", 3)
    monkeypatch.setattr(procedural, "make_entry", fails)
    with pytest.raises(
        ValueError, match=r"got 0 different questions of gcd .* 3 of which .* KeyError: 'no such operator'"
    ):
        made(weights={"gcd": 1})
    with pytest.raises(
        ValueError, match=r"3 seeds without .*, 3 of which .* KeyError: 'no such operator', expected one$"
    ):
        small.train(prng.key(1, device="cpu"), 3)


def test_a_seed_that_the_library_fails_on_is_passed_over(small, monkeypatch):
    key, real = prng.key(1, device="cpu"), procedural.make_entry
    seeds = []

    def fails_once(name, level, seed):
        seeds.append(seed)
        if len(seeds) == 1:
            raise ValueError("no expression after 100 attempts")
        return real(name, level, seed)

    monkeypatch.setattr(procedural, "make_entry", fails_once)
    problem = small.train(key, 3)
    assert len(seeds) == 2
    assert problem.meta["entry"] == real(problem.meta["task"], problem.meta["level"], seeds[1])


def completion(text):
    return Completion(text, 1, False)


@pytest.mark.parametrize("kind", ["chain_sum", "prime_factorization", "spell_backward", "letter_counting"])
def test_the_whole_answer_in_a_box_is_right_and_nothing_else(kind):
    entry = procedural.make_entry(kind, procedural.DEFAULT_LEVEL, 7)
    problem, right = Problem(0, entry["question"], entry["answer"], {"entry": entry}), entry["answer"]
    texts = {f"so \\boxed{{{right}}}": 1.0, f"\\boxed{{ {right} }}.": 1.0}
    texts |= dict.fromkeys([right, f"\\boxed{{{right} or not}}", "\\boxed{}", "\\boxed{no number}", ""], 0.0)
    assert {text: procedural_correct(problem, completion(text), answer_of=last_box) for text in texts} == texts


def test_a_problem_of_another_task_is_an_error():
    with pytest.raises(ValueError, match=r"problem 5: got no meta\['entry'\], expected a problem of procedural.task"):
        procedural_correct(Problem(5, "1+1?", "2", {}), completion("\\boxed{2}"), answer_of=last_box)


def test_the_page_has_every_kind_and_what_fails():
    lines = PAGE.read_text().splitlines()
    rows = {
        line.split("`")[1]: line.split(" | ")[1] for line in lines if line.startswith("| `") and line.count("|") == 7
    }
    assert [*rows] == procedural.kinds()
    assert {k: v.removeprefix("no: ") for k, v in rows.items() if v != "yes"} == dict(procedural.AUDIT_FAILURES)


@pytest.mark.slow
def test_the_audit_finds_what_is_wrong_with_a_kind_as_the_page_says():
    """Of four kinds that show its ways to fail, and every twelfth; `tools/tables` writes the page from all of them."""
    found = procedural_audit.audit(["coin_flip", "gcd", "graph_color", "isomorphic_strings", *procedural.kinds()[::12]])
    expected = {name: procedural.AUDIT_FAILURES.get(name, "") for name in found}
    assert {name: "; ".join(failed) for name, (_, failed) in found.items()} == expected
