"""A prompt far too long for the model is found out from its beginning; every other one is counted to its end."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from grpo_fn.shell.model.tiny_model import byte_tokenizer
from grpo_fn.trainer.build import BEGINNING, prompt_length

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
    seen = []

    def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        seen.append(len(text))
        return [0] * (len(text) // 4)

    assert prompt_length(TOKENIZER, "x " * 25_000_000, encode=encode, max_positions=4096) > 4096
    assert seen == [BEGINNING * 4096]
