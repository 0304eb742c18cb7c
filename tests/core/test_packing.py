"""Micro-batches by what is read: every row once, within a device's budget, prompts shared, the sum as it was."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import UNMOVED, batches, packed_split, policy_objective, totals
from hypothesis import given
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo import objective
from grpo_fn.core.batch import (
    PromptPiece,
    balance_pieces,
    read_lengths,
    share_prompts,
    visible_positions,
)
from grpo_fn.core.types import Batch, Scores

budgets = st.tuples(st.integers(1, 40), st.integers(1, 4))  # micro_tokens, devices


@st.composite
def grouped(draw) -> tuple[Tensor, Batch]:
    """Batches in which many rows begin alike."""
    logp, batch = draw(batches(rows=draw(st.integers(1, 9))))
    tokens = draw(st.lists(st.integers(0, 1), min_size=logp.numel(), max_size=logp.numel()))
    return logp, batch._replace(tokens=torch.tensor(tokens).view(logp.shape))


def numbered(batch: Batch) -> Batch:
    numbers = torch.arange(len(batch.adv), dtype=torch.float64)
    return batch._replace(adv=numbers[:, None].expand(batch.adv.shape))


def live(micro: Batch, rank: int = 0, devices: int = 1) -> list[int]:
    """The numbers of a device's rows that sampled something."""
    return [int(a) for a, on in zip(micro.adv[rank::devices, 0], micro.mask[rank::devices].any(-1), strict=True) if on]


def read(batch: Batch, rows: list[int]) -> int:
    spans = share_prompts(batch.tokens[rows], batch.mask[rows])
    return int((spans.end - spans.start).sum())


@given(grouped(), budgets)
def test_every_row_that_sampled_something_is_dealt_out_once(drawn, budget):
    batch = numbered(drawn[1])
    dealt = sorted(row for micro in packed_split(batch, *budget) for row in live(micro))
    assert dealt == batch.mask.any(-1).nonzero()[:, 0].tolist()


@given(grouped(), budgets)
def test_no_device_reads_more_than_its_budget_but_for_a_row_that_does_so_alone(drawn, budget):
    batch, (tokens, devices) = numbered(drawn[1]), budget
    for micro in packed_split(batch, *budget):
        assert micro.mask.any()
        assert len(micro.mask) % devices == 0
        assert micro.mask[:, -1].any()
        for rank in range(devices):
            rows = live(micro, rank, devices)
            assert len(rows) <= 1 or read(batch, rows) <= tokens


@given(grouped(), st.integers(1, 4))
def test_rows_that_read_one_prompt_are_together_where_a_device_has_space_for_them(drawn, devices):
    batch = numbered(drawn[1])
    spans, whole = share_prompts(batch.tokens, batch.mask), read(batch, list(range(len(batch.mask))))
    where = {
        row: (i, rank)
        for i, micro in enumerate(packed_split(batch, 10**6, devices))
        for rank in range(devices)
        for row in live(micro, rank, devices)
    }
    for first in {int(spans.first[row]) for row in where}:
        rows = [row for row in where if int(spans.first[row]) == first]
        if read(batch, rows) <= -(-whole // devices):
            assert len({where[row] for row in rows}) == 1


@given(grouped(), budgets)
def test_the_parts_add_up_to_the_whole(drawn, budget):
    logp, batch = drawn
    f = policy_objective(loss_aggregation=objective.sequence_mean, beta=0.1)
    number = batch._replace(logp_sampled=logp)
    parts = packed_split(number, *budget)

    def value(micro: Batch, logp: Tensor) -> tuple[Tensor, float]:
        loss = partial(f, batch=micro, totals=totals(batch), gains=UNMOVED)
        signal, (value, _) = grad_and_value(loss, has_aux=True)(Scores(logp, torch.zeros_like(logp)))
        return signal.logp, float(value)

    whole = value(number, logp)
    found = [value(micro, micro.logp_sampled) for micro in parts]
    assert sum(v for _, v in found) == pytest.approx(whole[1], abs=1e-9)
    assert sum(float(s.abs().sum()) for s, _ in found) == pytest.approx(float(whole[0].abs().sum()), abs=1e-9)


def test_a_device_may_be_full_to_the_last_token():
    pieces = [PromptPiece(4, [0]), PromptPiece(3, [1]), PromptPiece(3, [2]), PromptPiece(2, [3])]
    assert balance_pieces(pieces, capacity=6, devices=1) == [[0, 3], [1, 2]]
    assert balance_pieces(pieces, capacity=5, devices=1) == [[1, 3], [0], [2]]


# -- what is read


@given(grouped())
def test_every_row_finds_its_own_tokens_in_the_stream(drawn):
    batch = drawn[1]
    spans, column = share_prompts(batch.tokens, batch.mask), torch.arange(batch.tokens.shape[1])
    at = visible_positions(spans, len(column))
    stream = batch.tokens[(column >= spans.start[:, None]) & (column < spans.end[:, None])]
    for b, n in enumerate(read_lengths(batch.mask).tolist()):
        assert torch.equal(stream[at[b, :n]], batch.tokens[b, :n])
        assert (at[b, n:] == at[b, 0]).all()
