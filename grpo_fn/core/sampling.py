"""From logits and one uniform number to a token and its log-probability.

Each sampler has the signature `(logits [V], u [], *, knobs) -> (token [], logp [])`, vectorised over leading axes: from
logits [*B, V] and u [*B] come a token and a logp [*B], each a function of its own row alone (bit for bit on CPU). u is
uniform on [0, 1); the same u always means the same token. Nothing waits for the device.

logp is in nats, in float32 whatever the logits are in, and is the log-probability of the returned token *under the
distribution it was drawn from*: tempered, truncated and renormalised. `greedy` alone returns it under the plain
softmax, as it would be 0 under its own. A row with nan, with +inf, or with nothing but -inf gives some token and
logp = nan.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

Draw = tuple[Int[Tensor, "*B"], Float[Tensor, "*B"]]

BLOCK = 256  # entries of the vocabulary that are looked at one by one


def greedy(logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"]) -> Draw:
    """The most likely token (the lowest id among equals) and its logp under softmax(logits).

    Args:
        logits: unnormalised log-probabilities, [*B, V].
        u: not read; [*B].

    Returns:
        The token, [*B], and its log-prob, [*B], in nats.
    """
    logp = torch.log_softmax(logits.float(), dim=-1)
    token = logp.argmax(dim=-1)
    return token, logp.gather(-1, token[..., None])[..., 0]


def categorical(logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"], *, temperature: float) -> Draw:
    """A draw from softmax(logits / temperature), by inversion of its distribution function.

    token = min {i : p_0 + ... + p_i > u}. Probabilities below the spacing of u (2^-24 in float32) are met as often as
    the rounding of the sum lets them; a token of probability zero is never returned.

    Args:
        logits: unnormalised log-probabilities, [*B, V].
        u: uniform numbers on [0, 1), [*B].
        temperature: divides the logits, dimensionless.

    Returns:
        The token, [*B], and its log-prob under the distribution it was drawn from, [*B], in nats.

    Raises:
        ValueError: not 0 < temperature < inf.
    """
    return _invert(_tempered(logits, temperature), u)


def nucleus(
    logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"], *, temperature: float, top_k: int, top_p: float
) -> Draw:
    """A draw from softmax(logits / temperature) cut to the top_k likeliest tokens, then to their nucleus of mass top_p.

    Both cuts look at logits x only, so that equal ones share their fate. Top-k keeps x_i >= the k-th largest; top-p,
    with p renormalised after top-k, keeps i when sum {p_j : x_j > x_i} < top_p (Holtzman, Buys, Du, Forbes and Choi
    2020, "The curious case of neural text degeneration"), which always includes the likeliest. The order is that of
    transformers and vLLM. A top_p < 1 costs a sort of the vocabulary.

    Args:
        logits: unnormalised log-probabilities, [*B, V].
        u: uniform numbers on [0, 1), [*B].
        temperature: divides the logits, dimensionless.
        top_k: number of likeliest tokens kept; 0: all.
        top_p: probability mass kept, above 0 to 1; 1: all.

    Returns:
        The token, [*B], and its log-prob under the distribution it was drawn from, [*B], in nats.

    Raises:
        ValueError: not 0 < temperature < inf, top_k >= 0 and 0 < top_p <= 1.
    """
    if top_k < 0:
        raise ValueError(f"top_k: got {top_k}, wanted at least 0 (0 keeps every token)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, wanted a number in (0, 1] (1 keeps every token)")
    x = _tempered(logits, temperature)
    if 0 < top_k < x.shape[-1]:
        x = _keep_from(x, x.topk(top_k, dim=-1).values[..., -1:])
    if top_p < 1:
        x = _keep_from(x, _nucleus_edge(x, top_p))
    return _invert(x, u)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: got {temperature}, wanted a positive number (sampling.greedy is the limit 0)")
    return logits.float() if temperature == 1 else logits.float() / temperature


def _keep_from(x: Tensor, edge: Tensor) -> Tensor:
    return torch.where(x >= edge, x, -math.inf)


def _nucleus_edge(x: Tensor, top_p: float) -> Tensor:
    """The smallest logit of the nucleus, [*B, 1]."""
    falling = x.sort(dim=-1, descending=True).values
    p = torch.softmax(falling, dim=-1)
    before = p.cumsum(dim=-1) - p  # mass of what stands in front
    return torch.where(before < top_p, falling, math.inf).amin(dim=-1, keepdim=True)


def _invert(x: Tensor, u: Tensor) -> Draw:
    """The first token whose cumulative probability under softmax(x) exceeds u: first the block that it is in.

    So nothing but sums is made of the whole vocabulary, and the running sums are short ones.
    """
    top = x.amax(dim=-1, keepdim=True)
    mass = _block_sums((x - top).exp_())
    block, before, total = _first_beyond(mass, u.float())
    index = block[..., None] * BLOCK + torch.arange(BLOCK, device=x.device)
    size = x.shape[-1]
    inside = (x.gather(-1, index.clamp(max=size - 1)) - top).exp_().masked_fill(index >= size, 0.0)
    share = (u.float() * total - before) / mass.gather(-1, block[..., None])[..., 0]
    token = block * BLOCK + _first_beyond(inside, share)[0]
    return token, x.gather(-1, token[..., None])[..., 0] - top[..., 0] - total.log()


def _block_sums(weight: Float[Tensor, "*B V"]) -> Float[Tensor, "*B K"]:
    """Of every `BLOCK` entries, and of those that are left."""
    whole = weight.shape[-1] // BLOCK * BLOCK
    blocks = weight[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1) if whole else weight[..., :0]
    return torch.cat([blocks, weight[..., whole:].sum(-1, keepdim=True)], -1)


def _first_beyond(mass: Float[Tensor, "*B K"], u: Float[Tensor, "*B"]) -> tuple[Tensor, Tensor, Tensor]:
    """The first entry with which the running sum exceeds u of the total; the sum before it, and the total.

    It has a mass above zero: u is kept so far below 1 that some entry makes the sum exceed it, and the first one that
    does has added something.
    """
    running = mass.cumsum(dim=-1)
    total = running[..., -1]
    goal = torch.minimum(u.clamp(min=0) * total, torch.nextafter(total, torch.zeros_like(total)))
    first = torch.searchsorted(running, goal[..., None], right=True).clamp(max=mass.shape[-1] - 1)
    # A parallel scan on a GPU may fall by an ulp between neighbours, and then one without any mass can be first: the
    # largest takes its place.
    first = torch.where(mass.gather(-1, first) > 0, first, mass.argmax(dim=-1, keepdim=True))
    before = running.gather(-1, first) - mass.gather(-1, first)
    return first[..., 0], before[..., 0], total
