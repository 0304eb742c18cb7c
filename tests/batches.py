"""Generated rows and batches in float64, shapes with B == T and rows without a sampled token among them."""

from functools import partial

import hypothesis.strategies as st
import torch
from strategies import masks, tensors
from torch import Tensor

from grpo_fn.types import Batch, Scores, Totals

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
MASKED_FIELDS = ("logp_sampled", "logp_old", "logp_ref")


@st.composite
def batches(draw, rows: int | None = None, drift: float = 1.0) -> tuple[Tensor, Batch]:
    """logp [B, T] and a Batch whose other policies are at most `drift` nats a token away; 0 puts all of them at one."""
    b = rows or draw(st.integers(1, 5))
    t = draw(st.integers(1, 5))
    logp = draw(tensors((b, t), st.floats(-6, 0)))
    near = [logp + draw(tensors((b, t), st.floats(-drift, drift))) if drift else logp.clone() for _ in range(3)]
    adv = draw(tensors(b, st.one_of(st.just(0.0), st.floats(-3, 3))))
    return logp, Batch(torch.zeros(b, t, dtype=torch.long), draw(masks((b, t))), *near, adv)


@st.composite
def rows(draw, drift: float = 1.0) -> tuple[Tensor, Batch]:
    """One row: logp [T] and a Batch of [T] fields with a scalar advantage."""
    logp, batch = draw(batches(rows=1, drift=drift))
    return logp[0], row_of(batch, 0)


def row_of(batch: Batch, b: int) -> Batch:
    return Batch(*(x[b] for x in batch))


def spoiled(logp: Tensor, batch: Batch, garbage: float) -> tuple[Tensor, Batch]:
    """The same with garbage wherever nothing was sampled."""
    spoil = partial(torch.where, batch.mask)
    filled = {name: spoil(getattr(batch, name), garbage) for name in MASKED_FIELDS}
    return spoil(logp, garbage), batch._replace(**filled)


def padded(logp: Tensor, batch: Batch, extra: int) -> tuple[Tensor, Batch]:
    """The same with columns of padding on the right, garbage in them."""
    wide = {name: pad(getattr(batch, name), extra, torch.nan) for name in MASKED_FIELDS}
    wide |= {"tokens": pad(batch.tokens, extra, 0), "mask": pad(batch.mask, extra, False)}
    return pad(logp, extra, torch.nan), batch._replace(**wide)


def pad(x: Tensor, extra: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, extra), value=value)


def totals(batch: Batch) -> Totals:
    return Totals(tokens=batch.mask.sum().double(), rows=batch.mask.any(-1).sum().double())


def scores(logp: Tensor) -> Scores:
    return Scores(logp=logp, entropy=-logp)
