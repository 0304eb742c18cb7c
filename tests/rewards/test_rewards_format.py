"""Well formed or not: boxes and tags, whatever else a model writes."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.format import answer_tags, answer_tags_by_prompt, boxed, last_box

prose = st.text(st.characters(blacklist_characters="\\{}#", blacklist_categories=("Cs",)), max_size=60)

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


@pytest.mark.parametrize("text", [r"\boxed{" * 150_000, r"\boxed{" + "{" * 1_000_000])
def test_a_megabyte_of_boxes_is_judged_in_linear_time(text):
    start = time.process_time()
    assert boxed(Problem(0, "?", "7", {}), Completion(text, 1, False)) == 0.0
    assert time.process_time() - start < 5.0


R1 = ("think", "answer")


def tags(text, tags=R1, truncated=False, fn=answer_tags):
    return fn(Problem(0, "?", "7", {}), Completion(text, 1, truncated), tags=tags)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>6 * 7</think><answer>42</answer>", 1.0),
        ("\n<think>\n6 * 7\n</think>\n\n<answer>\n42\n</answer>\n", 1.0),
        ("<think>is 1 < 2 > 0? <b>yes</b></think><answer>42</answer>", 1.0),
        ("<think>6 * 7<answer>42</answer>", 0.0),
        ("<answer>42</answer><think>6 * 7</think>", 0.0),
        ("<think><answer>42</answer></think>", 0.0),
        ("<think>6 * 7</think> so <answer>42</answer>", 0.0),
        ("<think>6</think><think>7</think><answer>42</answer>", 0.0),
        ("<think>I write <answer> soon</think><answer>42</answer>", 0.0),
        ("<think>6 * 7</think><answer></answer>", 0.0),
        ("<THINK>6 * 7</THINK><answer>42</answer>", 0.0),
        ("<think >6 * 7</think><answer>42</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_well_tagged_means_every_block_once_in_order_and_nothing_else(text, want):
    assert tags(text) == want
    assert tags(text, truncated=True) == 0.0


names = st.lists(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,5}", fullmatch=True), min_size=1, max_size=3, unique=True)
insides = st.text(st.characters(blacklist_characters="<>", blacklist_categories=("Cs",)), max_size=8)
spaces = st.text(" \n\t", max_size=2)


@given(names, st.data())
def test_whatever_the_tags_are_called_only_full_blocks_and_white_space_count(tag_names, data):
    blocks = data.draw(st.lists(insides, min_size=len(tag_names), max_size=len(tag_names)))
    between = data.draw(st.lists(spaces, min_size=len(tag_names), max_size=len(tag_names)))
    text = "".join(f"{s}<{t}>{b}</{t}>" for s, t, b in zip(between, tag_names, blocks, strict=True))
    assert tags(text, tag_names) == float(all(block.strip() for block in blocks))
    assert tags(text, tuple(tag_names)) == tags(text, tag_names)
    outside = data.draw(insides)
    assert tags(text + outside, tag_names) == (0.0 if outside.strip() else tags(text, tag_names))


@given(names, st.data())
def test_a_mark_more_less_or_elsewhere_is_not_well_formed(tag_names, data):
    marks = [mark for tag in tag_names for mark in (f"<{tag}>", f"</{tag}>")]
    shuffled = data.draw(st.lists(st.sampled_from(marks), max_size=len(marks) + 2))
    text = "x".join(shuffled)  # every block is full, and what is outside is not white space unless there is one block
    assert tags(text, tag_names) == float(shuffled == marks and len(tag_names) == 1)
    assert tags("".join(m if m[1] == "/" else f"{m}x" for m in shuffled), tag_names) == float(shuffled == marks)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " "]), max_size=9).map("".join))
def test_a_tag_that_the_prompt_opened_is_as_good_as_one_of_the_completion(text):
    assert tags(text, fn=answer_tags_by_prompt) == tags("<think>" + text)


@pytest.mark.parametrize("bad", [(), "think", ("think", "think"), ("",), ("<think>",), ("a b", "c")])
@pytest.mark.parametrize("fn", [answer_tags, answer_tags_by_prompt])
def test_tags_that_are_no_names_are_refused(bad, fn):
    with pytest.raises(ValueError, match="expected different names"):
        tags("<think>6 * 7</think>", bad, fn=fn)


@pytest.mark.parametrize("text", ["<think>" * 150_000, "<think>" + "</think" * 150_000])
def test_a_megabyte_of_tags_is_judged_in_linear_time(text):
    start = time.process_time()
    assert tags(text) == 0.0
    assert time.process_time() - start < 5.0
