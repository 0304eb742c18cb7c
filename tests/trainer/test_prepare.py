"""Prompts and openings that leave no token for an answer are found before weights are loaded."""

from functools import partial

import pytest
from environment_fakes import TALK, long_where_asked
from episode_fakes import ends_with_one
from fakes import tokenizer
from families import published
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_fn.config import load_config
from grpo_fn.core.environment import Environment
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.episode_rows import as_observation
from grpo_fn.shell.model.tiny import byte_tokenizer
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.tasks import overlong
from grpo_fn.tasks.task import from_rows
from grpo_fn.trainer.prepare import BEGINNING, fitting_episodes, prepare_data, prompt_length, prompt_limit
from grpo_fn.trainer.sections import Episodes, Sampling, Settings

TOKENIZER = byte_tokenizer(chat=False)


@given(st.text(alphabet="ab ", max_size=200), st.integers(1, 12), st.integers(1, 20))
def test_a_prompt_fits_exactly_when_its_tokens_do(prompt, positions, characters) -> None:
    """Tokens of so many characters each."""

    def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        return list(range(-(-len(text) // characters)))

    counted = prompt_length(TOKENIZER, prompt, encode=encode, max_positions=positions)
    exact = len(encode(TOKENIZER, prompt))
    assert (counted > positions) == (exact > positions)
    if exact <= positions:
        assert counted == exact
    assert prompt_length(TOKENIZER, prompt, encode=encode, max_positions=None) == exact


def test_fifty_megabytes_are_not_tokenized() -> None:
    lengths = []

    def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        lengths.append(len(text))
        return [0] * (len(text) // 4)

    assert prompt_length(TOKENIZER, "x " * 25_000_000, encode=encode, max_positions=4096) > 4096
    assert lengths == [BEGINNING * 4096]


def sampling(new: int, total: int | None) -> Sampling:
    """The section, with these two limits."""
    bound = [f"MAX_NEW_TOKENS={new}", f"sections.Sampling.max_total_tokens={total}"]
    return Settings(**load_config(["run/arithmetic.gin"], bound).kwargs()).sampling


def test_rows_of_a_model_with_longrope_are_no_longer_than_its_short_factors_are_for() -> None:
    config = published("phi3_longrope", 64).config
    assert (positions(config), positions(published("llama_yarn", 64).config)) == (128, 512)
    settings = Settings(**load_config(["run/arithmetic.gin"], ["sections.Sampling.max_total_tokens=129"]).kwargs())
    with pytest.raises(ValueError, match=r"max_total_tokens: got 129, expected at most 128: .*longrope"):
        prepare_data(settings.model, from_rows(ROWS, HELD_OUT), (), config, settings.data, settings.sampling, None)


@pytest.mark.parametrize(
    ("new", "total", "positions", "most"),
    [(8, None, None, None), (8, None, 64, 56), (8, 32, None, 31), (60, 64, 64, 63)],
)
def test_the_most_tokens_of_a_prompt(new: int, total: int | None, positions: int | None, most: int | None) -> None:
    assert prompt_limit(sampling(new, total), positions) == most


def test_a_total_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_total_tokens: got 65, expected at most the model's 64 positions"):
        prompt_limit(sampling(8, 65), 64)
    with pytest.raises(ValueError, match=r"sections\.Sampling\.max_total_tokens: got 1, expected None or at least 2"):
        sampling(8, 1)


# -- openings of environments that begin by themselves


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
    def count(problem: Problem) -> int:
        return len(tokenizer()(problem.prompt)["input_ids"])

    return fitting_episodes(rule, episodes(pure=pure), from_rows(rows, test), (), tokenizer(), count, limit)


def test_rows_are_left_out_by_what_the_environment_begins_with() -> None:
    left = fitting(overlong.drop, HELD_OUT[:1], pure=True)
    assert [row.prompt for row in left.rows] == ["0 a", "2 a", "4 a"]
    assert left.notes[0].startswith("left out 2 training rows")
    both = fitting(partial(overlong.drop_both), HELD_OUT, pure=True)
    assert [row.prompt for row in (*both.rows, *both.test)] == ["0 a", "2 a", "4 a", "0 T", "2 T"]
    with pytest.raises(ValueError, match="got 1 of 3 held-out ones over the 50 tokens"):
        fitting(overlong.drop, HELD_OUT, pure=True)
    with pytest.raises(ValueError, match=r"got an opening of \d{3} tokens for problem \d+, expected at most 50"):
        fitting(overlong.refuse, HELD_OUT, pure=True)


def test_an_environment_that_is_not_pure_is_not_asked_and_a_rule_that_would_have_to_is_refused() -> None:
    assert fitting(overlong.drop, HELD_OUT, pure=False).rows == from_rows(ROWS, HELD_OUT).rows
    with pytest.raises(ValueError, match=r"leaves out 2 problems by their prompts, and environment_fakes\.step, which"):
        fitting(overlong.drop_both, HELD_OUT, pure=False, limit=6, rows=[*ROWS, *TOO_LONG])
