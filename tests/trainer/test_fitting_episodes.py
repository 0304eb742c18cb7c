"""Openings that leave no turn: what a rule for overlong prompts does with environments that begin by themselves."""

from functools import partial

import pytest
from environment_fakes import TALK, long_where_asked
from episode_fakes import ends_with_one
from fakes import tokenizer

from grpo_fn.core.environment import Environment
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.episode_rows import as_observation
from grpo_fn.tasks import overlong
from grpo_fn.tasks.task import from_rows
from grpo_fn.trainer.prepare import fitting_episodes
from grpo_fn.trainer.sections import Episodes


def episodes(*, pure: bool) -> Episodes:
    return Episodes(
        environment=Environment(start=long_where_asked, step=TALK.step, pure=pure),
        chat_format=ends_with_one,
        max_turns=2,
        max_turn_tokens=4,
        on_failure=as_observation,
        answer_steps=2,
        workers=1,
        deadline=60.0,
        memory_mb=2048,
    )


ROWS = [Problem(0, f"{i} a", "long" if i in (1, 3) else "", {}) for i in range(5)]
TOO_LONG = [Problem(0, f"{i} 7777777", "", {}) for i in range(2)]
HELD_OUT = [Problem(0, f"{i} T", "long" if i == 1 else "", {}) for i in range(3)]


def fitting(rule, test, *, pure: bool, limit: int = 50, rows=ROWS):
    count = lambda problem: len(tokenizer()(problem.prompt)["input_ids"])  # noqa: E731
    return fitting_episodes(rule, episodes(pure=pure), from_rows(rows, test), (), tokenizer(), count, limit)


def test_rows_are_left_out_by_what_the_environment_begins_with() -> None:
    left = fitting(overlong.drop, HELD_OUT[:1], pure=True)
    assert [row.prompt for row in left.rows] == ["0 a", "2 a", "4 a"]
    assert left.notes[0].startswith("left out 2 training rows")
    both = fitting(partial(overlong.drop_both), HELD_OUT, pure=True)
    assert [row.prompt for row in both.rows] == ["0 a", "2 a", "4 a"]
    assert [row.prompt for row in both.test] == ["0 T", "2 T"]
    with pytest.raises(ValueError, match="got 1 of 3 held-out ones over the 50 tokens"):
        fitting(overlong.drop, HELD_OUT, pure=True)


def test_refuse_names_the_environment() -> None:
    with pytest.raises(ValueError, match=r"got an opening of \d{3} tokens for problem \d+, expected at most 50"):
        fitting(overlong.refuse, HELD_OUT, pure=True)


def test_an_environment_that_is_not_pure_is_not_asked_and_a_rule_that_would_have_to_is_refused() -> None:
    assert fitting(overlong.drop, HELD_OUT, pure=False).rows == from_rows(ROWS, HELD_OUT).rows
    with pytest.raises(ValueError, match=r"leaves out 2 problems by their prompts, and environment_fakes\.step, which"):
        fitting(overlong.drop_both, HELD_OUT, pure=False, limit=6, rows=[*ROWS, *TOO_LONG])
