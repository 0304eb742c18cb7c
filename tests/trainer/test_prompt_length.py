"""A prompt far too long for the model is found out from its beginning; every other one is counted to its end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from experiments.tiny.models import byte_tokenizer
from grpo_fn.config import load_config
from grpo_fn.trainer.prepare import BEGINNING, prompt_length, prompt_limit
from grpo_fn.trainer.sections import Sampling, Settings

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


def sampling(new: int, total: int | None) -> Sampling:
    """The section, with these two limits."""
    config = load_config(
        ["run/arithmetic.gin"], [f"MAX_NEW_TOKENS={new}", f"sections.Sampling.max_total_tokens={total}"]
    )
    return Settings(**config.kwargs()).sampling


@pytest.mark.parametrize(
    ("new", "total", "positions", "most"),
    [(8, None, None, None), (8, None, 64, 56), (8, 32, None, 31), (8, 32, 64, 31), (60, 64, 64, 63)],
)
def test_the_most_tokens_of_a_prompt(new: int, total: int | None, positions: int | None, most: int | None) -> None:
    assert prompt_limit(sampling(new, total), positions) == most


def test_a_total_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_total_tokens: got 65, expected at most the model's 64 positions"):
        prompt_limit(sampling(8, 65), 64)
    with pytest.raises(ValueError, match=r"sections\.Sampling\.max_total_tokens: got 1, expected None or at least 2"):
        sampling(8, 1)


def test_fifty_megabytes_are_not_tokenized() -> None:
    seen = []

    def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        seen.append(len(text))
        return [0] * (len(text) // 4)

    assert prompt_length(TOKENIZER, "x " * 25_000_000, encode=encode, max_positions=4096) > 4096
    assert seen == [BEGINNING * 4096]
