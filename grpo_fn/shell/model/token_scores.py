"""Log-probabilities of tokens that are given, and of the likeliest ones in their places: how a text is scored."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScoredText(NamedTuple):
    """Tokens to score: `ids[start:]`, each after all that stands before it. `start` is at least 1."""

    ids: Sequence[int]
    start: int


class TokenScores(NamedTuple):
    """Of every scored token its log-prob in nats, and (token, log-prob) of the likeliest in its place, falling."""

    logp: list[float]
    top: list[list[tuple[int, float]]]


@torch.no_grad()
def score_texts(
    model: nn.Module, texts: Sequence[ScoredText], *, temperature: float, top: int, elements: int, linear: bool
) -> list[TokenScores]:
    """Scores under softmax(logits / temperature), all texts in one pass, padded on the right."""
    device = next(model.parameters()).device
    width = max(len(text.ids) for text in texts)
    every = torch.tensor([[*text.ids] + [0] * (width - len(text.ids)) for text in texts], device=device)
    ids = every[:, : max(1, width - 1)]  # nothing is said behind the last token
    if linear:
        states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    else:
        states = model(input_ids=ids, use_cache=False).logits
    weight = model.get_output_embeddings().weight
    scores = []
    for row, text in enumerate(texts):
        target = every[row, text.start : len(text.ids)]
        before = states[row, text.start - 1 : len(text.ids) - 1]
        logp, likeliest = [], []
        for part in _parts(len(target), len(weight), elements):
            logits = before[part] @ weight.T if linear else before[part]
            one = _log_softmax(logits, temperature)
            logp += one.gather(-1, target[part, None])[:, 0].tolist()
            likeliest += _likeliest(one, top)
        scores.append(TokenScores(logp, likeliest))
    return scores


def _parts(n: int, vocabulary: int, elements: int) -> Iterator[slice]:
    rows = max(1, elements // vocabulary)
    return (slice(i, min(i + rows, n)) for i in range(0, n, rows))


def _log_softmax(logits: Tensor, temperature: float) -> Float[Tensor, "n V"]:
    """In float32, the sum pairwise: a CPU's own log_softmax adds a large vocabulary up in turn."""
    z = logits.float() / temperature
    z = z - z.amax(-1, keepdim=True)
    return z - z.exp().sum(-1, keepdim=True).log()


def _likeliest(logp: Float[Tensor, "n V"], top: int) -> list[list[tuple[int, float]]]:
    if not top:
        return [[] for _ in logp]
    found = logp.topk(min(top, logp.shape[-1]), dim=-1)
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]
