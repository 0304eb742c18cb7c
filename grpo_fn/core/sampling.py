"""From logits and one uniform number to a token and its log-probability.

    logits        unnormalised log-probabilities, [*B, V]
    u             uniform numbers on [0, 1), [*B]
    temperature   divides the logits, dimensionless
    top_k         number of likeliest tokens kept; 0: all
    top_p         probability mass kept, above 0 to 1; 1: all
    returns       the token, [*B], and its log-prob, [*B], in nats

Each sampler has the signature `(logits [V], u [], *, knobs) -> (token [], logp [])`, vectorised over leading axes: from
logits [*B, V] and u [*B] come a token and a logp [*B], each a function of its own row alone (bit for bit on CPU). u is
uniform on [0, 1); the same u always means the same token. Nothing waits for the device.

Two policies that draw with the same u are coupled. `categorical` and `nucleus` lay their distributions over one line
and look at the same place of it; `gumbel_max` and `gumbel_max_nucleus` give every token of the vocabulary the same
noise in both, so that tokens before it do not push it aside. docs/experiments/sweeps.md has how often the two part.

logp is in nats, in float32 whatever the logits are in, and is the log-probability of the returned token *under the
distribution it was drawn from*: tempered, truncated and renormalised. `greedy` alone returns it under the plain
softmax, as it would be 0 under its own. A row with nan, with +inf, or with nothing but -inf gives some token and
logp = nan.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs

Draw = tuple[Int[Tensor, "*B"], Float[Tensor, "*B"]]

BLOCK = 256  # entries of the vocabulary that are looked at one by one


def greedy(logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"]) -> Draw:
    """The most likely token (the lowest id among equals) and its logp under softmax(logits)."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    token = logp.argmax(dim=-1)
    return token, logp.gather(-1, token[..., None])[..., 0]


def categorical(logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"], *, temperature: float) -> Draw:
    """A draw from softmax(logits / temperature), by inversion of its distribution function.

    token = min {i : p_0 + ... + p_i > u}. Probabilities below the spacing of u (2^-24 in float32) are met as often as
    the rounding of the sum lets them; a token of probability zero is never returned.

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

    Raises:
        ValueError: not 0 < temperature < inf, top_k >= 0 and 0 < top_p <= 1.
    """
    return _invert(_truncated(_tempered(logits, temperature), top_k, top_p), u)


def gumbel_max(logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"], *, temperature: float) -> Draw:
    """A draw from softmax(logits / temperature) by the Gumbel-max trick: an argmax over logits with noise added.

    token = argmax_i x_i + g_i, x = logits / temperature, g_i = -log e_i independent standard Gumbel numbers, e_i
    exponential ones (Maddison, Tarlow and Minka 2014, "A* Sampling", arXiv:1411.0030). The g_i are those of
    the key that the 53 bits of u are, so two policies that share u share every g_i. logp is that of `categorical`, to
    the last bit. It costs 32 random bits and two logarithms for each entry of the vocabulary.

    Raises:
        ValueError: not 0 < temperature < inf.
    """
    return _perturbed_argmax(_tempered(logits, temperature), u)


def gumbel_max_nucleus(
    logits: Float[Tensor, "*B V"], u: Float[Tensor, "*B"], *, temperature: float, top_k: int, top_p: float
) -> Draw:
    """A draw from the distribution of `nucleus` by the Gumbel-max trick of `gumbel_max`.

    Raises:
        ValueError: not 0 < temperature < inf, top_k >= 0 and 0 < top_p <= 1.
    """
    return _perturbed_argmax(_truncated(_tempered(logits, temperature), top_k, top_p), u)


def uniform_dtype(token_sampler: Callable[..., Draw]) -> torch.dtype:
    """The dtype whose uniform numbers a sampler, its knobs bound or not, draws from: those of float64 have 53 bits."""
    function, _ = function_and_knobs(token_sampler)
    return torch.float64 if function in (gumbel_max, gumbel_max_nucleus) else torch.float32


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: got {temperature}, expected a positive number (sampling.greedy is the limit 0)")
    return logits.float() if temperature == 1 else logits.float() / temperature


def _truncated(x: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k < 0:
        raise ValueError(f"top_k: got {top_k}, expected at least 0 (0 keeps every token)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a number in (0, 1] (1 keeps every token)")
    if 0 < top_k < x.shape[-1]:
        x = _keep_from(x, x.topk(top_k, dim=-1).values[..., -1:])
    return _keep_from(x, _nucleus_edge(x, top_p)) if top_p < 1 else x


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
    top, mass = _peak_and_mass(x)
    block, before, total = _first_beyond(mass, u.float())
    index = block[..., None] * BLOCK + torch.arange(BLOCK, device=x.device)
    size = x.shape[-1]
    inside = (x.gather(-1, index.clamp(max=size - 1)) - top).exp_().masked_fill(index >= size, 0.0)
    share = (u.float() * total - before) / mass.gather(-1, block[..., None])[..., 0]
    token = block * BLOCK + _first_beyond(inside, share)[0]
    return token, _log_prob(x, token, top, total)


def _perturbed_argmax(x: Tensor, u: Tensor) -> Draw:
    """argmax of x_i - log e_i, and the token's logp under softmax(x).

    A token is the argmax with probability p_i, for it is the one whose e_i / p_i is the smallest, and the smallest of
    independent exponential numbers with rates p_j is the i-th with probability p_i / sum p_j.
    """
    top, mass = _peak_and_mass(x)
    bits = (u.double() * 2**53).long()
    noise = prng.exponential(torch.stack([bits, torch.zeros_like(bits)], dim=-1), x.shape[-1])
    token = (x - top - noise.log()).argmax(dim=-1)
    return token, _log_prob(x, token, top, mass.cumsum(dim=-1)[..., -1])


def _log_prob(x: Tensor, token: Tensor, top: Tensor, total: Tensor) -> Tensor:
    return x.gather(-1, token[..., None])[..., 0] - top[..., 0] - total.log()


def _peak_and_mass(x: Float[Tensor, "*B V"]) -> tuple[Float[Tensor, "*B 1"], Float[Tensor, "*B K"]]:
    """The largest entry, and the sums of exp(x - largest) by block."""
    top = x.amax(dim=-1, keepdim=True)
    return top, _block_sums((x - top).exp_())


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
