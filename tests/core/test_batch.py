"""Rows survive every cut: minibatches and micro-batches hold the same rows and add up to the same objective."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from batches import batches, split
from hypothesis import given
from torch import Tensor

from grpo_fn.core.batch import (
    check_rollout,
    count,
    given_batch,
    lengths,
    make_batch,
    minibatches,
    tokens_of_group,
)
from grpo_fn.core.types import Batch, Rollout
from grpo_fn.testing.strategies import masks

budgets = st.tuples(st.one_of(st.integers(1, 8), st.integers(1, 30)), st.integers(1, 3))  # micro_tokens, devices


def numbered(batch: Batch) -> Batch:
    """The batch with its row numbers as advantages, so that a row can be recognised wherever it goes."""
    numbers = torch.arange(len(batch.adv), dtype=torch.float64)
    return batch._replace(adv=numbers[:, None].expand(batch.adv.shape))


def rows_of(micro: Batch) -> list[int]:
    return [int(a) for a in micro.adv[:, 0]]


# -- split


@given(batches(), budgets)
def test_split_deals_out_every_row_that_sampled_something_once(drawn, budget):
    batch = numbered(drawn[1])
    dealt = sorted(b for micro in split(batch, *budget) for b in rows_of(micro))
    assert dealt == batch.mask.any(-1).nonzero()[:, 0].tolist()


@given(batches(), budgets)
def test_a_micro_batch_holds_its_rows_up_to_the_last_sampled_token(drawn, budget):
    batch = numbered(drawn[1])
    for micro in split(batch, *budget):
        rows, width = rows_of(micro), micro.tokens.shape[1]
        assert width == int(lengths(batch.mask)[rows].max())
        for got, whole in zip(micro, batch, strict=True):
            assert torch.equal(got, whole[rows, :width] if whole.ndim == 2 else whole[rows])


@given(batches(), budgets)
def test_no_two_neighbouring_micro_batches_could_be_one(drawn, budget):
    parts = split(drawn[1], *budget)
    for a, b in pairwise(parts):
        assert a.tokens.shape[1] >= b.tokens.shape[1]  # longest first
        fullest = -(-(len(a.tokens) + 1) // budget[1])  # rows of a device, had `a` one more
        assert fullest > 1
        assert fullest * a.tokens.shape[1] > budget[0]


@given(batches())
def test_a_group_counts_once_however_its_rows_are_dealt_out(drawn):
    batch = drawn[1]
    found = {int(n) for n in batch.group_tokens[batch.mask]}
    assert len(found) <= int(count(batch).groups) <= int(batch.mask.any(-1).sum())
    given = given_batch(Rollout(batch.tokens, batch.mask, batch.logp_old, batch.mask[:, 0], ("",) * len(batch.mask)))
    assert int(count(given).groups) == int(count(given).rows)  # each given row is its own group


# -- minibatches


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_minibatches_are_equal_runs_of_whole_groups_in_order(parts, each, group_size, data):
    _, batch = data.draw(batches(rows=parts * each * group_size))
    minis = minibatches(numbered(batch), parts)
    assert [rows_of(mini) for mini in minis] == torch.arange(len(batch.adv)).view(parts, -1).tolist()
    groups = [{b // group_size for b in rows_of(mini)} for mini in minis]
    assert sum(map(len, groups)) == len(set().union(*groups)) == parts * each


# -- make_batch

P, G, T = 2, 3, 5


def rollout(**changes) -> Rollout:
    mask = torch.zeros(P * G, T, dtype=torch.bool)
    mask[:, 2:4] = True
    tokens = torch.arange(P * G * T).view(P * G, T)
    fields = {"tokens": tokens, "mask": mask, "logp_sampled": torch.full((P * G, T), -1.0)}
    ended = torch.zeros(P * G, dtype=torch.bool)
    return Rollout(**{**fields, "truncated": ended, "text": ("",) * (P * G), **changes})


EVERYONE = torch.ones(P, G, dtype=torch.bool)


def adv() -> Tensor:
    return torch.arange(6.0 * T, dtype=torch.float64).view(P, G, T)


@given(masks((P, G)))
def test_unscored_rows_neither_learn_nor_count(valid):
    seen = rollout()
    batch = make_batch(seen, valid, adv(), torch.full((6, T), -2.0), torch.full((6, T), -3.0), torch.full((6, T), -4.0))
    assert torch.equal(batch.mask, seen.mask & valid.flatten()[:, None])
    assert int(count(batch).rows) == int(valid.sum())
    assert int(count(batch).tokens) == 2 * int(valid.sum())
    assert int(count(batch).groups) == int(valid.any(-1).sum())
    each = (2 * valid.sum(-1)).repeat_interleave(G)  # tokens of a prompt
    assert torch.equal(batch.group_tokens, each[:, None].expand(batch.mask.shape))
    assert {b // T for micro in split(batch, 7, 1) for b in rows_of(micro)} == set(
        valid.flatten().nonzero()[:, 0].tolist()
    )


def test_row_b_is_sample_g_of_prompt_p():
    old, ref = torch.full((6, T), -2.0), torch.full((6, T), -3.0)
    seen = rollout()
    batch = make_batch(seen, EVERYONE, adv(), old, ref, ref)
    assert batch.adv.tolist() == [adv()[p, g].tolist() for p in range(P) for g in range(G)]
    assert not batch.selected.any()
    assert batch.adv.dtype == seen.logp_sampled.dtype
    assert batch.tokens is seen.tokens
    assert (batch.logp_sampled, batch.logp_old, batch.logp_ref) == (seen.logp_sampled, old, ref)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_advantages_that_are_not_finite_are_refused(broken):
    bad, some = adv(), torch.zeros(6, T)
    bad[1, 2, 3] = broken
    with pytest.raises(ValueError, match=rf"got advantages that are not finite, \[{broken}\], expected finite ones"):
        make_batch(rollout(), EVERYONE, bad, some, some, some)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_number_of_tokens_is_counted_exactly_whatever_the_log_probs_are_in(dtype):
    """float16 ends at 65,504, bfloat16 takes 257 for 256."""
    tokens = torch.zeros(257, 257, dtype=torch.long)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    x = torch.zeros(257, 257, dtype=dtype)
    found = count(Batch(tokens, mask, x, x, x, x, x, ~mask, tokens_of_group(mask, len(mask))))
    assert (found.tokens.item(), found.rows.item()) == (66049, 257)
    assert found.tokens.dtype == torch.promote_types(dtype, torch.float32)


# -- the data seam


def changed(name: str, b: int, t: int, value: object) -> Rollout:
    x = getattr(rollout(), name).clone()
    x[b, t] = value
    return rollout(**{name: x})


def silent(b: int) -> Rollout:
    mask = rollout().mask.clone()
    mask[b] = False
    return rollout(mask=mask)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: changed("mask", 2, 0, True), "got a row whose first token is marked as sampled, expected a prompt"),
        (lambda: silent(4), "got row 4 without a sampled token, expected at least one"),
        (
            lambda: changed("logp_sampled", 3, 2, 0.5),
            "got logp_sampled 0.5 at row 3, token 2; expected a finite log-pr",
        ),
        (
            lambda: changed("logp_sampled", 3, 2, -200.0),
            "got logp_sampled -200.0 at row 3, token 2; expected a finite log-probability <= 0 and >= -103.3, of a "
            "token",
        ),
    ],
)
def test_a_broken_rollout_says_what_was_got_and_expected(bad, message):
    with pytest.raises(ValueError, match=message):
        check_rollout(bad())


class Unchecked:
    """A rollout from a sampler that checks no shapes of its own."""

    def __init__(self, **changes) -> None:
        self.__dict__.update({**rollout()._asdict(), **changes})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"mask": torch.ones(6, 4, dtype=torch.bool)},
            r"got rollout.mask \(6, 4\), expected the shape of tokens, \(6, 5",
        ),
        (
            {"logp_sampled": torch.zeros(5, 5)},
            r"got rollout.logp_sampled \(5, 5\), expected the shape of tokens, \(6, 5",
        ),
        ({"truncated": torch.zeros(7, dtype=torch.bool)}, r"got 6 texts and truncated \(7,\), expected 6 of each"),
    ],
)
def test_fields_that_do_not_agree_are_named(bad, message):
    unchecked = check_rollout.__wrapped__ if hasattr(check_rollout, "__wrapped__") else check_rollout
    with pytest.raises(ValueError, match=message):
        unchecked(Unchecked(**bad))
