"""What ends a completion: tokens that do by themselves, and texts that the last token completes."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

UNSPELT = "\N{REPLACEMENT CHARACTER}"  # what bytes are decoded to that are not a character yet


class Stops:
    """Stop strings, and which of `size` tokens may complete one: text is looked at where one of those was drawn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.suspect = tokens_of_stops(tokenizer, self.stop, size) if stop else torch.zeros(size, dtype=torch.bool)
        # Every token holds at least one byte, so the last len(stop) tokens hold it; one more in front, because decoders
        # of the SentencePiece kind drop a leading space.
        self.tail = max((len(s.encode()) for s in stop), default=0) + 1

    def first(self, completions: Sequence[list[int]], unseen: Sequence[int]) -> list[int]:
        """How long each completion is when a stop string is in it, of which all but the last `unseen` are known not to
        complete one; 0 for those in which none is."""
        found = [0] * len(completions)
        ends = [
            (row, t + 1)
            for row, (tokens, new) in enumerate(zip(completions, unseen, strict=True))
            for t in range(len(tokens) - new, len(tokens))
            if self.suspect[tokens[t]]
        ]
        tails = [completions[row][max(0, end - self.tail) : end] for row, end in ends]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True) if tails else []
        for (row, end), text in zip(ends, texts, strict=True):
            if not found[row] and any(s in text for s in self.stop):
                found[row] = end
        return found


def tokens_of_stops(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> Bool[Tensor, "V"]:
    """Tokens whose text holds the last character of a stop string, or bytes that may be part of one.

    Each is decoded behind itself, as decoders drop the space before a first word. Tokens that the tokenizer does not
    know are suspect, and all are where it tidies spaces, because then a token changes the text before it.
    """
    found = torch.ones(size, dtype=torch.bool)
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return found
    last = {UNSPELT, *(s[-1] for s in stop)}
    known = range(min(size, len(tokenizer)))
    texts = tokenizer.batch_decode([[i, i] for i in known], skip_special_tokens=True)
    found[: len(known)] = torch.tensor([not last.isdisjoint(text) for text in texts], dtype=torch.bool)
    return found


def token_table(ids: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, "V"]:
    """A table of all tokens in which these are marked; those beyond the vocabulary cannot be drawn."""
    table = torch.zeros(size, dtype=torch.bool)
    table[[i for i in ids if 0 <= i < size]] = True
    return table.to(device)
