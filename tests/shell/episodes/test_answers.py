"""What environments answer: plain data comes back as it was, anything else is refused and named."""

import json
from collections.abc import Callable

import pytest
from environment_fakes import TALK
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.core.environment import Environment, Message, Step
from grpo_fn.core.problem import Problem, Turn
from grpo_fn.shell.episodes import episode_rows as tapes
from grpo_fn.shell.episodes.answers import EnvironmentCall, decode_answer, read_entry, state_digest

PROBLEM = Problem(1, "question", "", {})
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def answering(step: Callable[..., object]) -> EnvironmentCall:
    return EnvironmentCall(Environment(start=TALK.start, step=step, pure=True))


@given(plain, st.text(max_size=5), st.none() | st.floats(-9, 9), st.booleans())
def test_an_answer_comes_back_as_it_was(state, content, reward, done) -> None:
    said = (Message("tool", content, "name"),)
    got = decode_answer(answering(lambda *_: Step(state, said, reward, done))("step", None, said[0], 0))
    assert got[:4] == (state, said, reward, done)
    assert read_entry(got.entry()) == got._replace(state=None)
    assert json.loads(got.entry())["state"] == state_digest(state)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_a_digest_does_not_know_the_order_of_a_mapping(state) -> None:
    assert state_digest(dict(reversed(state.items()))) == state_digest(state)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "got NoneType from the environment, expected a Step"),
        (Step({"a": [1, {2}]}, (), 0.0, True), r"state\['a'\]\[1\]: got set \{2\}, expected plain data"),
        (Step({1: 2}, (), 0.0, True), "state: got the key 1, expected text"),
        (Step(None, ("text",), 0.0, True), "messages: got str, expected Message"),
        (Step(None, (Message("assistant", "x"),), 0.0, True), "got role 'assistant'"),
        (Step(None, (), float("inf"), True), "reward: got float inf"),
        (Step(None, (), 0.0, 1), "done: got int, expected True or False"),
    ],
)
def test_values_that_are_no_answers_are_refused(answer, said) -> None:
    with pytest.raises(ValueError, match=said):
        answering(lambda *_: answer)("step", None, Message("assistant", ""), 0)


def stored(turns: list[Turn]) -> dict:
    row = {"uid": 3, "g": 1, "tokens": [5, 6, 7, 8], "mask": [0, 0, 1, 1], "turns": [turn._asdict() for turn in turns]}
    return {**row, "tape": tapes.tape_digest(turns)}


@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from(["answer", "state"]))
def test_a_changed_tape_is_found_out(count: int, at: int, name: str) -> None:
    turns = [Turn(str(n), 1, "", 0.0, f"s{n}", 0, "", "", f"answer {n}") for n in range(count)]
    tape = tapes.Tape()
    tape.add([stored(turns)])
    assert tape.of(3, 1) == tapes.Taped((5, 6), tuple(turns))
    row = stored(turns)
    row["turns"][at % count][name] += "!"
    with pytest.raises(ValueError, match="tape of problem 3, sample 1: got turns with the digest"):
        tape.add([row])
