"""What a token weighs, by the formulas of the papers. Invariants are in test_invariants.py."""

from functools import partial

import torch

from grpo_fn.algo import objective
from grpo_fn.core.batch import count
from grpo_fn.testing.aggregations import masked_rows


def weights(f, mask, groups=1):
    """Of a step that is these rows."""
    batch = masked_rows(mask, groups)
    return f(batch, count(batch))


def test_over_samples_a_row_that_is_left_out_still_counts():
    """Two rows of 1 and 3 tokens and two of which nothing is left: 4 samples."""
    rows = torch.tensor([[False, True, False, False], [False, True, True, True]])
    mask = torch.cat([rows, torch.zeros_like(rows)])
    over = weights(objective.sequence_mean_over_samples, mask)
    torch.testing.assert_close(over[mask].tolist(), [1 / 4] + [1 / 12] * 3)
    assert weights(partial(objective.constant_length_over_samples, max_length=4), mask)[mask].tolist() == [1 / 16] * 4
    torch.testing.assert_close(2 * over, weights(objective.sequence_mean, mask))
