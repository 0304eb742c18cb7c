"""Looking only where a token may complete a stop string finds what looking at every row after every token finds."""

from functools import lru_cache

import hypothesis.strategies as st
from fakes import VOCABULARY, tokenizer
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_fn.shell.sampler.local.decode_step import Stops

COSTLY = settings(max_examples=max(10, settings.default.max_examples // 3))
letters = "ab \né…"


def pieced(words: tuple[str, ...]) -> PreTrainedTokenizerBase:
    """Of the SentencePiece kind: words with their space in front, and every byte; the first space is dropped."""
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *dict.fromkeys(w.replace(" ", "▁") for w in words)]
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<0x00>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=1)
def bytewise() -> PreTrainedTokenizerBase:
    return tokenizer()


def everywhere(known: PreTrainedTokenizerBase, tokens: list[int], stop: tuple[str, ...]) -> int:
    """The first token after which a stop string is in the row's text, decoded whole after every token; 0: none."""
    for end in range(1, len(tokens) + 1):
        text = known.decode(tokens[:end], skip_special_tokens=True)
        if any(s in text for s in stop):
            return end
    return 0


def check(known: PreTrainedTokenizerBase, size: int, tokens: list[int], stop: tuple[str, ...], step: int) -> None:
    stops = Stops(known, stop, size)
    expected, found = everywhere(known, tokens, stop), 0
    for begin in range(0, len(tokens), step):  # as many at once as are drawn between two looks
        seen = tokens[: begin + step]
        (found,) = stops.stop_lengths([seen], [len(seen) - begin])
        if found:
            break
    assert found == expected


strings = st.lists(st.text(letters, min_size=1, max_size=3), min_size=1, max_size=3, unique=True).map(tuple)


@COSTLY
@given(st.data(), strings, st.integers(1, 5))
def test_with_a_vocabulary_of_bytes_and_words(data: st.DataObject, stop: tuple[str, ...], step: int) -> None:
    spelt = bytewise()(data.draw(st.text(letters + "Tom has", max_size=12)))["input_ids"]
    noise = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=8))
    check(bytewise(), VOCABULARY, data.draw(st.permutations(spelt + noise)), stop, step)


@COSTLY
@given(
    st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=6).map(tuple),
    strings,
    st.lists(st.integers(0, 10**6), min_size=1, max_size=14),
    st.integers(1, 5),
)
def test_with_a_vocabulary_of_pieces(
    words: tuple[str, ...], stop: tuple[str, ...], drawn: list[int], step: int
) -> None:
    known = pieced(words)
    high, spelt = len(known), "".join(words + stop)
    # Half of the pieces are words, half characters that the texts are made of, spelt by their bytes.
    pieces = [[256 + n % (high - 256)] if n % 2 else spelt[n // 2 % len(spelt)].encode() for n in drawn]
    check(known, high + 3, [token for piece in pieces for token in piece], stop, step)


def test_a_character_spelt_by_bytes_behind_another_one_is_a_stop_string() -> None:
    assert Stops(pieced(("a",)), ("é",), 300).stop_lengths([[*"…é".encode(), 256]], [6]) == [5]


def test_most_tokens_are_not_suspect() -> None:
    suspect = Stops(bytewise(), ("}",), VOCABULARY).suspect
    texts = [bytewise().decode([i]) for i in range(VOCABULARY)]
    assert all(bool(suspect[i]) is ("}" in text or "\N{REPLACEMENT CHARACTER}" in text) for i, text in enumerate(texts))
    assert not suspect[bytewise()("apples")["input_ids"]].any()


def test_tokens_that_the_tokenizer_does_not_know_are_suspect_and_all_are_if_spaces_are_tidied() -> None:
    for size in (VOCABULARY - 5, VOCABULARY + 5):
        suspect = Stops(bytewise(), ("}",), size).suspect
        assert len(suspect) == size
        assert suspect[VOCABULARY:].all()
    known = pieced((" a", " ."))
    known.clean_up_tokenization_spaces = True
    assert Stops(known, ("a.",), len(known)).suspect.all()
