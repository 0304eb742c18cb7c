"""Hypothesis strategies: small tensors, masks, groups of rewards and float64 batches, drawn so that failures shrink."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from grpo_fn.core.batch import tokens_of_group
from grpo_fn.core.types import Batch, Rollout
from grpo_fn.testing import texts

Shape = int | tuple  # of integers; beartype would look at one drawn with `random`, which hypothesis warns of
Draw = Callable[..., Any]  # hypothesis's own type for it cannot be checked at run time
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"), 3e38)  # and one that float32 can just hold


@lru_cache(maxsize=1024)
def finite_floats(bound: float = 100.0) -> st.SearchStrategy[float]:
    """Numbers in [-bound, bound] that float32 can hold too, so a test may cast and lose nothing."""
    return st.floats(-bound, bound, width=32)


@lru_cache(maxsize=1024)
def tensors(shape: Shape, elements: st.SearchStrategy | None = None) -> st.SearchStrategy[Tensor]:
    """float64 tensors of one shape; finite elements by default."""
    sizes = _sizes(shape)
    values = st.lists(finite_floats() if elements is None else elements, min_size=sizes.numel(), max_size=sizes.numel())
    # Without a dtype torch would round to float32.
    return values.map(lambda drawn: torch.tensor(drawn, dtype=torch.float64).reshape(sizes))


@lru_cache(maxsize=1024)
def masks(shape: Shape) -> st.SearchStrategy[Tensor]:
    """bool tensors of one shape; all False and all True come up often enough to matter, the latter more often."""
    constant = st.sampled_from([False, True, True, True]).map(lambda b: torch.full(_sizes(shape), b))
    return st.one_of(tensors(shape, st.booleans()).map(Tensor.bool), constant)


@st.composite
def groups(
    draw: Draw, rewards: st.SearchStrategy[float] | None = None, *, least: int = 1, most: int = 8
) -> tuple[Tensor, Tensor]:
    """float64 rewards [G], valid [G], anything at all where invalid.

    Groups of one or of two different rewards come up, and groups without a valid sample.
    """
    number = finite_floats() if rewards is None else rewards
    valid = draw(masks(draw(st.integers(least, most))))
    few = st.lists(number, min_size=1, max_size=2).map(st.sampled_from)
    one = draw(st.one_of(st.just(number), few))
    drawn = [draw(one if v else st.one_of(number, st.sampled_from(NO_NUMBERS))) for v in valid.tolist()]
    return torch.tensor(drawn, dtype=torch.float64), valid


def _sizes(shape: Shape) -> torch.Size:
    return torch.Size((shape,) if isinstance(shape, int) else shape)


GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
MASKED_FIELDS = ("logp_sampled", "logp_old", "logp_ref", "logp_teacher", "adv")
LOGP = st.floats(-6, 0)
ADVANTAGE = st.one_of(st.sampled_from([0.0, 1.0, -1.5]), st.floats(-3, 3))  # floats alone are too often 0
between = lru_cache(maxsize=64)(st.floats)


@lru_cache(maxsize=64)
def advantages(b: int, t: int) -> st.SearchStrategy[Tensor]:
    """adv [b, t]: half of the time one for each row."""
    return st.one_of(tensors(b, ADVANTAGE).map(lambda adv: adv[:, None].repeat(1, t)), tensors((b, t), ADVANTAGE))


@st.composite
def batches(draw: Draw, rows: int | None = None, drift: float = 1.0) -> tuple[Tensor, Batch]:
    """logp [B, T] and a Batch whose other policies are at most `drift` nats a token away; 0 puts all of them at one."""
    b = rows or draw(st.integers(1, 5))
    t = draw(st.integers(1, 5))
    logp = draw(tensors((b, t), LOGP))
    near = [logp + draw(tensors((b, t), between(-drift, drift))) if drift else logp.clone() for _ in range(4)]
    adv = draw(advantages(b, t))
    mask = draw(masks((b, t)))
    selected = mask & draw(masks((b, t)))
    groups = tokens_of_group(mask, draw(st.sampled_from([n for n in range(1, b + 1) if b % n == 0])))
    return logp, Batch(torch.zeros(b, t, dtype=torch.long), mask, *near, adv, selected, groups)


@st.composite
def loss_rows(draw: Draw, drift: float = 1.0) -> tuple[Tensor, Batch]:
    """One row: logp [T] and a Batch of [T] fields."""
    logp, batch = draw(batches(rows=1, drift=drift))
    return logp[0], one_row(batch, 0)


@st.composite
def rollouts(draw: Draw, prompts: int | None = None, group_size: int | None = None) -> Rollout:
    """A sampler's rollout for P prompts with G samples each: rows `[prompt | completion | padding]`."""
    b, t = (prompts or draw(st.integers(1, 3))) * (group_size or draw(st.integers(1, 4))), draw(st.integers(2, 6))
    first = draw(tensors((b, 1), st.integers(1, t - 1)))  # a prompt has a token, and so has a completion
    place, end = torch.arange(t), first + draw(tensors((b, 1), st.integers(1, t - 1)))
    mask = (place >= first) & (place < end)
    logp = draw(tensors((b, t), st.floats(-6, 0)))
    return Rollout(
        draw(tensors((b, t), st.integers(0, 9))).long(),
        mask,
        torch.where(mask, logp, draw(st.sampled_from(GARBAGE))),
        draw(masks(b)),
        tuple(draw(st.lists(texts.PROSE, min_size=b, max_size=b))),
    )


def one_row(batch: Batch, b: int | slice) -> Batch:
    """Row b of a batch, or several rows for a slice."""
    return Batch(*(x[b] for x in batch))


def with_garbage(logp: Tensor, batch: Batch, garbage: float) -> tuple[Tensor, Batch]:
    """The same with garbage wherever nothing was sampled."""
    spoil = partial(torch.where, batch.mask)
    filled = {name: spoil(getattr(batch, name), garbage) for name in MASKED_FIELDS}
    return spoil(logp, garbage), batch._replace(**filled)


def with_padding(logp: Tensor, batch: Batch, extra: int) -> tuple[Tensor, Batch]:
    """The same with columns of padding on the right, garbage in them."""
    wide = Batch(*(pad(x, extra, torch.nan if x.is_floating_point() else 0) for x in batch))
    return pad(logp, extra, torch.nan), wide


def pad(x: Tensor, extra: int, value: float | int) -> Tensor:
    """x with `extra` columns of `value` on the right."""
    return torch.nn.functional.pad(x, (0, extra), value=value)
