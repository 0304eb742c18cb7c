"""What a token weighs, by the formulas of the papers. Invariants are in test_invariants.py."""

from functools import partial

import hypothesis.strategies as st
import torch
from hypothesis import given

from grpo_fn.algo import objective
from grpo_fn.core.batch import count
from grpo_fn.testing.aggregations import MASKS, masked_rows
from grpo_fn.testing.strategies import masks


def weights(f, mask, groups=1):
    """Of a step that is these rows."""
    batch = masked_rows(mask, groups)
    return f(batch, count(batch))


@given(MASKS)
def test_token_mean_sums_to_one_and_treats_tokens_alike(mask):
    w = weights(objective.token_mean, mask)
    if mask.any():
        torch.testing.assert_close(w.sum().item(), 1.0)
        assert w[mask].unique().numel() == 1


@given(MASKS)
def test_sequence_mean_gives_every_row_the_same_weight(mask):
    w = weights(objective.sequence_mean, mask)
    rows = mask.any(-1)
    torch.testing.assert_close(w.sum(-1), rows / rows.sum().clamp(min=1).double())


@given(MASKS, st.integers(1, 9))
def test_constant_length_does_not_look_at_lengths(mask, length):
    w = weights(partial(objective.constant_length, max_length=length), mask)
    rows = int(mask.any(-1).sum())
    torch.testing.assert_close(w, mask.double() / max(1, rows * length))


def test_over_samples_a_row_that_is_left_out_still_counts():
    """Two rows of 1 and 3 tokens and two of which nothing is left: 4 samples."""
    rows = torch.tensor([[False, True, False, False], [False, True, True, True]])
    mask = torch.cat([rows, torch.zeros_like(rows)])
    over = weights(objective.sequence_mean_over_samples, mask)
    torch.testing.assert_close(over[mask].tolist(), [1 / 4] + [1 / 12] * 3)
    assert weights(partial(objective.constant_length_over_samples, max_length=4), mask)[mask].tolist() == [1 / 16] * 4
    torch.testing.assert_close(2 * over, weights(objective.sequence_mean, mask))


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_prompt_mean_gives_every_prompt_the_same_weight_and_its_tokens_each_alike(prompts, size, data):
    """By a loop over prompts; those without a token are none."""
    mask = data.draw(masks((prompts * size, 4)))
    of_prompts = [
        [(b, t) for b in range(p * size, (p + 1) * size) for t in range(4) if mask[b, t]] for p in range(prompts)
    ]
    filled = [tokens for tokens in of_prompts if tokens]
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for tokens in filled:
        for b, t in tokens:
            expected[b, t] = 1 / len(tokens) / len(filled)
    torch.testing.assert_close(weights(objective.prompt_mean, mask, prompts), expected)
