"""Tasks: a problem is a function of (key, index), and no training draw touches a held-out problem."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import published

from grpo_fn.core import prng
from grpo_fn.core.problem import COMPLETION, Completion, Problem
from grpo_fn.rewards.format import boxed
from grpo_fn.rewards.math import correct
from grpo_fn.tasks import arithmetic, benchmarks
from grpo_fn.tasks.task import TEST_UID, filter_rows, from_rows, held_out_only, sample_tests, train_problems, with_notes

seeds = st.integers(0, 2**31 - 1)


def key(seed):
    return prng.key(seed, device="cpu")


def rows(count):
    return [Problem(0, f"q{i}", f"a{i}", {"level": i}) for i in range(count)]


# The stream over rows


@given(seeds, st.integers(1, 12), st.integers(0, 4))
def test_every_epoch_asks_every_row_once(seed, size, epoch):
    task = from_rows(rows(size), [])
    asked = train_problems(task, key(seed), epoch * size, size)
    assert task.size == size
    assert sorted(problem.meta["row"] for problem in asked) == list(range(size))
    assert [problem.uid for problem in asked] == list(range(epoch * size, (epoch + 1) * size))
    assert all(problem.prompt == f"q{problem.meta['row']}" == f"q{problem.meta['level']}" for problem in asked)


@given(seeds, st.integers(5, 12), st.integers(1, 4), st.lists(st.integers(0, 24), max_size=4))
def test_ranks_and_restarts_neither_skip_nor_repeat_a_row(seed, size, ranks, cuts):
    task, whole = from_rows(rows(size), []), 24
    straight = train_problems(task, key(seed), 0, whole)
    edges = sorted({0, whole, *cuts})
    resumed = [p for lo, hi in itertools.pairwise(edges) for p in train_problems(task, key(seed), lo, hi - lo)]
    shared = [task.train(key(seed), index) for rank in range(ranks) for index in range(rank, whole, ranks)]
    assert tuple(resumed) == straight
    assert tuple(sorted(shared)) == straight


def test_epochs_and_keys_have_orders_of_their_own():
    task = from_rows(rows(50), [])

    def order(seed, epoch):
        return tuple(problem.meta["row"] for problem in train_problems(task, key(seed), 50 * epoch, 50))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_held_out_problems_are_numbered_apart_and_keep_their_order():
    task = from_rows(rows(3), rows(2))
    assert [(problem.uid, problem.prompt) for problem in task.test] == [(TEST_UID, "q0"), (TEST_UID + 1, "q1")]


@given(seeds, st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2))
def test_kept_rows_are_asked_once_an_epoch_under_their_old_numbers(seed, stay, epoch):
    task = from_rows(rows(len(stay)), [Problem(0, "held out", "", {})])
    if not any(stay):
        with pytest.raises(ValueError, match=r"got \d+, of which none may stay"):
            filter_rows(task, lambda problem: stay[problem.meta["row"]])
        return
    left, count = filter_rows(with_notes(task, "before"), lambda problem: stay[problem.meta["row"]])
    assert (left.size, count) == (sum(stay), len(stay) - sum(stay))
    assert (left.test, left.notes) == (task.test, ("before",))
    asked = train_problems(left, key(seed), epoch * left.size, left.size)
    assert sorted(problem.meta["row"] for problem in asked) == [i for i, stays in enumerate(stay) if stays]
    assert all(problem.prompt == f"q{problem.meta['row']}" for problem in asked)
    assert filter_rows(left, lambda problem: True) == (left, 0)


@given(st.permutations(range(6)), st.integers(1, 5))
def test_rows_that_are_held_out_are_left_out_of_training_and_noted(order, tests):
    prompts = ["What is 2 + 3?", "What is 2+3?", "a b", "ab", "A b", "?"]
    spelt = ["What  is 2 + 3?\n", "What is\t2+3?", " a b", "ab ", "A\nb", "\u00a0?"]
    train = [Problem(0, prompt, "", {}) for prompt in prompts]
    task = from_rows(train, [Problem(0, spelt[i], "", {}) for i in order[:tests]])
    assert {row.prompt for row in task.rows} == {prompts[i] for i in order[tests:]}
    assert task.size == 6 - tests
    (note,) = task.notes
    assert note == (
        f"left out {tests} training rows that are held-out problems: {', '.join(map(str, sorted(order[:tests])))}"
    )


def test_a_task_of_nothing_but_held_out_rows_is_refused_and_none_in_common_says_nothing():
    with pytest.raises(ValueError, match="got 2, all of them held-out problems"):
        from_rows(rows(2), rows(3))
    assert from_rows(rows(2), [Problem(0, "else", "", {})]).notes == ()


def test_nothing_is_left_out_of_problems_that_are_made_and_nothing_drawn_without_rows():
    with pytest.raises(ValueError, match="made as they are drawn"):
        filter_rows(make(3, 1, 2), lambda problem: True)
    alone = held_out_only(rows(2))
    assert (alone.size, len(alone.test)) == (0, 2)
    assert filter_rows(alone, lambda problem: False) == (alone, 0)
    with pytest.raises(ValueError, match="got 0 of a task with a held-out set alone"):
        alone.train(key(0), 0)


def test_a_task_without_rows_and_an_index_below_zero_are_refused():
    with pytest.raises(ValueError, match="got none"):
        from_rows([], [])
    for task in (from_rows(rows(1), []), make(3, 1, 2)):
        with pytest.raises(ValueError, match="got -1"):
            task.train(key(0), -1)


# Arithmetic

GAIN = re.compile(r"buys|finds|brings|come in")
LOSS = re.compile(r"sells|loses|takes|are gone")


def content(problem):
    """The content of a problem, read from its words alone by someone who knows English."""
    _, *changes, _ = problem.prompt.split(". ")
    start, *operands = [int(digits) for digits in re.findall(r"[0-9]+", problem.prompt)]
    for change in changes:
        assert bool(GAIN.search(change)) + bool(LOSS.search(change)) == 1
    signs = ["+" if GAIN.search(change) else "-" for change in changes]
    return arithmetic.Content(start, tuple(zip(signs, operands, strict=True)))


def values(content):
    """What is there at the start and after each change, counted by hand."""
    there = [content.start]
    for op, operand in content.changes:
        there.append(there[-1] + operand if op == "+" else there[-1] - operand)
    return there


def make(max_value, operations, test_size):
    return arithmetic.task(max_value=max_value, operations=operations, test_size=test_size)


SHAPES = ((2, 1), (2, 2), (3, 2), (2, 3))
COUNTS = {shape: len(arithmetic.expression_contents(max_value=shape[0], operations=shape[1])) for shape in SHAPES}
sizes = st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(st.just(shape), st.integers(1, COUNTS[shape] - 1)))


@given(seeds, sizes, st.integers(0, 10**6))
def test_no_training_draw_touches_a_held_out_content(seed, size, start):
    shape, test_size = size
    task = make(*shape, test_size)
    held_out = {content(problem) for problem in task.test}
    assert len(held_out) == len(task.test) == test_size
    assert task.size == COUNTS[shape] - test_size
    assert held_out.isdisjoint(content(problem) for problem in train_problems(task, key(seed), start, 40))


@given(sizes)
def test_held_out_and_training_contents_are_all_contents_and_a_larger_test_extends_a_smaller(size):
    shape, test_size = size
    every = arithmetic.expression_contents(max_value=shape[0], operations=shape[1])
    held_out, rest = arithmetic.split_contents(max_value=shape[0], operations=shape[1], test_size=test_size)
    assert sorted((*held_out, *rest)) == sorted(every)
    whole = make(*shape, len(every) - 1).test
    assert make(*shape, test_size).test == whole[:test_size]


@given(st.integers(2, 4), st.integers(1, 3))
def test_contents_are_those_that_never_go_below_zero(max_value, operations):
    operands = range(1, max_value + 1)
    tails = itertools.product(itertools.product("+-", operands), repeat=operations)
    every = {arithmetic.Content(start, tail) for start, tail in itertools.product(operands, tails)}
    found = arithmetic.expression_contents(max_value=max_value, operations=operations)
    assert set(found) == {made for made in every if min(values(made)) >= 0}
    assert len(found) == len(set(found))


@given(seeds, st.integers(0, 10**9))
def test_a_problem_is_a_function_of_key_and_index(seed, index):
    first = make(4, 2, 2)
    make(3, 3, 3).train(key(seed + 1), index)
    problem = first.train(key(seed), index)
    assert problem == make(4, 2, 2).train(key(seed), index)
    assert problem.uid == index
    assert problem in train_problems(first, key(seed), max(0, index - 2), 5)


@given(seeds, st.integers(2, 5), st.integers(1, 3))
def test_prompts_are_short_english_that_says_what_the_answer_is(seed, max_value, operations):
    task = make(max_value, operations, 2)
    for problem in (*task.test, *train_problems(task, key(seed), 0, 8)):
        asked = content(problem)
        assert problem.meta == {"changes": asked.changes, "values": values(asked)}
        assert all(1 <= operand <= max_value for operand in (asked.start, *(b for _, b in asked.changes)))
        assert values(asked)[-1] == int(problem.answer) >= 0
        assert len(problem.prompt.split()) <= 12 + 5 * operations
        assert problem.prompt.isascii()
        assert problem.prompt.endswith("?")
        assert not re.search(r"[{}]|\b1 (?:apple|book|coin|pen|card|egg|cup|nut)s\b", problem.prompt)


@given(seeds, st.sampled_from((0.0, 0.4, 1.0)))
def test_demonstrations_are_right_well_formed_and_from_the_training_side(seed, share):
    task = arithmetic.demonstration_task(max_value=4, operations=3, test_size=20, worked_share=share)
    held_out = {content(problem) for problem in task.test}
    for problem in train_problems(task, key(seed), 0, 8):
        written = problem.meta[COMPLETION]
        completion = Completion(written, 1, False)
        assert correct(problem, completion) == boxed(problem, completion) == 1.0
        assert content(problem) not in held_out
        assert written in (arithmetic.worked_solution(problem), arithmetic.answer_only(problem))
        assert share not in (0.0, 1.0) or ("=" in written) == bool(share)
        *steps, _ = arithmetic.worked_solution(problem).split(" ")
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == eval(right)  # the working is sound


@pytest.mark.parametrize(
    ("max_value", "operations", "test_size"), [(1, 2, 1), (3, 0, 1), (3, 2, 0), (3, 2, 10**6), (3, 2, -1)]
)
def test_arithmetic_sizes_that_leave_a_side_empty_are_refused(max_value, operations, test_size):
    with pytest.raises(ValueError, match=r"got .*expected"):
        make(max_value, operations, test_size)


# GSM8K

GOOD = [{"question": f"What is {i}?", "answer": f"Well.\n#### 1,00{i}"} for i in range(3)]


HELD_OUT = [{"question": f"And {i}?", "answer": f"Well.\n#### 2,00{i}"} for i in range(3)]


def folder(path, train=GOOD, test=HELD_OUT):
    for name, lines in (("train.jsonl", train), ("test.jsonl", test)):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (path / name).write_text(text, encoding="utf-8")
    return str(path)


def test_rows_become_prompts_by_the_template_and_golds_without_commas(tmp_path):
    lines = ["", *GOOD, "  "]
    task = benchmarks.gsm8k(data=folder(tmp_path, train=lines), template=r"Q: {question} Use \boxed{}.")
    asked = sorted(train_problems(task, key(0), 0, 3), key=lambda problem: problem.meta["row"])
    assert [problem.prompt for problem in asked] == [rf"Q: What is {i}? Use \boxed{{}}." for i in range(3)]
    assert [problem.answer for problem in asked] == ["1000", "1001", "1002"]


@pytest.mark.parametrize(
    ("train", "want"),
    [
        ([], r"train\.jsonl: got an empty file"),
        ([*GOOD, "{oops"], r"train\.jsonl:4: got '\{oops', expected a JSON object"),
        (
            [*GOOD, {"question": "?", "answer": "42"}],
            r"train\.jsonl:4: got answer '42', expected it to end in '#### n'",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(tmp_path, train, want):
    with pytest.raises(ValueError, match=want):
        benchmarks.gsm8k(data=folder(tmp_path, train=train), template="{question}")


def test_a_missing_folder_or_file_is_refused_with_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"without train\.jsonl.*there are: notes\.txt"):
        benchmarks.gsm8k(data=str(tmp_path), template="{question}")
    with pytest.raises(ValueError, match=r"which is no folder.*has: notes\.txt"):
        benchmarks.gsm8k(data=str(tmp_path / "nowhere"), template="{question}")
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected UTF-8 text"):
        benchmarks.gsm8k(data=str(tmp_path), template="{question}")


def test_the_published_files_have_7473_and_1319_rows():
    task = benchmarks.gsm8k(data=str(published("gsm8k")), template="{question}")
    assert (task.size, len(task.test)) == (7473, 1319)
    assert {problem.meta["row"] for problem in train_problems(task, key(0), 0, 7473)} == set(range(7473))
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", problem.answer) for problem in task.test)


# A limit on the held-out problems


def made_of(kinds):
    return held_out_only([Problem(0, f"q{i}", "", meta) for i, meta in enumerate(kinds)])


GSM8K_MATH = [{"task": "gsm8k"}] * 1319 + [{"task": "math", "level": 1 + i % 5} for i in range(500)]


def test_eight_problems_of_gsm8k_and_math_are_of_both_and_of_every_level():
    task = sample_tests(made_of(GSM8K_MATH), 8)
    assert [problem.meta.get("level") for problem in task.test] == [None, None, None, 1, 2, 3, 4, 5]
    assert [problem.uid - TEST_UID for problem in task.test] == [0, 1, 2, 1319, 1320, 1321, 1322, 1323]
    (note,) = task.notes
    assert note.startswith("evaluating 8 of 1819 held-out problems: 3 of 1319 task gsm8k, 1 of 100 task math level 1, ")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), min_size=1, max_size=30), st.data())
def test_a_limit_takes_every_kind_and_more_of_it_takes_more(drawn, data):
    task = made_of([{"source": source, "level": level} for source, level in drawn])
    count = data.draw(st.integers(1, len(drawn)))
    kept = sample_tests(task, count).test
    assert kept == tuple(problem for problem in task.test if problem in kept)
    assert len(kept) == count
    assert {problem.uid for problem in kept} <= {problem.uid for problem in sample_tests(task, count + 1).test}
    kinds = [{(problem.meta["source"], problem.meta["level"]) for problem in some} for some in (task.test, kept)]
    assert kinds[0] == kinds[1] if count >= len(kinds[0]) else len(kinds[1]) == count
