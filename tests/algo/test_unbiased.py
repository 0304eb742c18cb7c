"""What the estimators estimate, by enumerating every outcome: no sampling, no tolerance for luck.

Expectations are sums over the 9 sequences of helpers/enumerated.py, or over all groups of them. These tests prove what
is exact, test_invariants.py what holds for every KL; docs/algorithms/bias.md says how far off the rest is, as measured
by tools/tables/bias_table.py.
"""

from itertools import product

import hypothesis.strategies as st
import torch
from catalogue import each, token_losses
from enumerated import FULL, SEQUENCES, V, expected_in, logps, policy
from hypothesis import given, settings
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.algo import (
    advantage,
    losses,
    objective,
)
from grpo_fn.core.types import Batch, Totals

LOSSES = token_losses()
EOS = 0  # written first it ends the row: the second token is then not sampled
ENDS_EARLY = torch.stack([torch.ones(9, dtype=torch.bool), SEQUENCES[:, 0] != EOS], dim=1)

seeds = st.integers(0, 2**31)
FEW = settings(max_examples=max(2, settings.default.max_examples // 20))


def exactly(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# -- KL


@given(seeds, seeds)
def test_the_gradient_of_k3_is_that_of_the_other_kl(a, b):
    """KL(pi_ref || pi_theta), token by token, over prefixes of pi_theta."""
    theta, ref = policy(a), policy(b)

    def other(x):
        visits = torch.cat([torch.ones(1), theta.log_softmax(-1)[0].exp()])
        p, q = x.log_softmax(-1), ref.log_softmax(-1)
        return (visits * (q.exp() * (q - p)).sum(-1)).sum()

    exactly(grad(expected_in(objective.k3, ref, theta))(theta), grad(other)(theta))


# -- policy gradient


def expected_reward(theta: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    return ((logps(theta) * mask).sum(-1).exp() * reward)[distinct(mask)].sum()


def distinct(mask: Tensor) -> Tensor:
    """One representative of each row: what would come after the end is not written."""
    return mask[:, 1] | (SEQUENCES[:, 1] == 0)


def expected_signal(theta: Tensor, reward: Tensor, mask: Tensor, f, weigh, size: int, loss) -> Tensor:
    """E over all groups of `size` rows of pi_theta of the gradient of the weighted token losses, for theta."""
    keep = distinct(mask).nonzero()[:, 0]
    groups = torch.tensor(list(product(keep.tolist(), repeat=size)))
    logp = (logps(theta) * mask).detach()
    chance = logp.sum(-1)[groups].sum(-1).exp()

    def one_group(x, rows):
        row_mask = mask[rows]
        adv = f(reward[rows], torch.ones(size, dtype=torch.bool))
        old = logp[rows]
        of_group = row_mask.sum().expand(size, 2)
        batch = Batch(SEQUENCES[rows], row_mask, old, old, old, old, adv[:, None].expand(size, 2), ~row_mask, of_group)
        all_rows = torch.tensor(float(size), dtype=torch.float64)
        totals = Totals(row_mask.sum().double(), all_rows, all_rows, torch.ones_like(all_rows))
        return (weigh(batch, totals) * vmap(loss)(logps(x)[rows], batch)[0]).sum()

    return grad(lambda x: (chance * vmap(one_group, in_dims=(None, 0))(x, groups)).sum())(theta)


def row_sum(batch, totals):
    return objective.constant_length(batch, totals, max_length=1)


def successes(seed: int, mask: Tensor) -> Tensor:
    """1 for the sequences that are worth most, 0 for the others; some of both."""
    reward = rewards(seed, mask)
    return (reward >= reward[distinct(mask)].sort().values[-2]).double()


def rewards(seed: int, mask: Tensor) -> Tensor:
    """A reward of each row; sequences that are the same row have the same."""
    reward = torch.rand(9, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return torch.where(mask[:, 1], reward, reward[SEQUENCES[:, 0] * V])


@each(LOSSES)
@FEW
@given(seeds, st.sampled_from([FULL, ENDS_EARLY]), st.sampled_from([2, 3]))
def test_on_policy_leave_one_out_is_the_policy_gradient_and_centered_a_share_of_it(f, seed, mask, size):
    """Minus the gradient of E[R], whatever the loss; `centered` gives (G - 1) / G of it."""
    theta, reward = policy(seed), rewards(seed, mask)
    expected = -grad(lambda x: expected_reward(x, reward, mask))(theta)
    exactly(expected_signal(theta, reward, mask, advantage.leave_one_out, row_sum, size, f), expected)
    centered = expected_signal(theta, reward, mask, advantage.mean_centered, row_sum, size, f)
    exactly(centered, expected * (size - 1) / size)


@given(seeds, st.sampled_from([FULL, ENDS_EARLY]), st.sampled_from([(2, 1), (3, 1), (3, 2)]))
def test_pass_at_k_climbs_pass_at_k_at_a_pace_of_its_own(seed, mask, sizes):
    """For one prompt its direction is exact; how fast it goes is not, since every group is divided by its std."""
    theta, solved, (size, k) = policy(seed), successes(seed, mask), sizes

    def by_pass_at_k(reward: Tensor, valid: Tensor) -> Tensor:
        return advantage.pass_at_k(reward, valid, k=k, threshold=1.0)

    got = expected_signal(theta, solved, mask, by_pass_at_k, row_sum, size, losses.reinforce)
    expected = -grad(lambda x: -((1 - expected_reward(x, solved, mask)) ** k))(theta)
    assert abs(off_direction(got, expected)) < 1e-10


def off_direction(got: Tensor, expected: Tensor) -> float:
    """1 - cosine."""
    return 1 - torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), dim=0).item()
