"""Given rows beside sampled ones: the cross entropy of each prompt's best row, as a term of a tiny step."""

from collections.abc import Callable
from functools import partial

import torch
from tiny_worlds import MASK, PROMPTS, ROWS, World, logps, row_sum
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.algo import aggregation, supervised
from grpo_fn.algo.step import Term, weighted_objective
from grpo_fn.core.batch import count, given_batch
from grpo_fn.core.types import Gains, Rollout, Scores

MU = 0.5  # share of the given rows


def mixed_objective(minus_reward: Callable, logits: Tensor, w: World, p: int) -> Tensor:
    """(1 - mu) (-E[R]) + mu (-log pi(y)), y the row of highest reward."""
    return (1 - MU) * minus_reward(logits, w, p) - MU * logps(logits).sum(-1).gather(0, w.reward[p].argmax()[None])[0]


def given_rows(w: World, token_weight: Callable | None, weigh: Callable) -> Tensor:
    """The gradient of mu times the cross entropy of every prompt's best row, [P, 1 + V, V]."""
    best = w.reward.argmax(-1)
    nothing = torch.zeros(PROMPTS, 2).double()
    batch = given_batch(Rollout(ROWS[best], MASK[best], nothing, nothing[:, 0] > 0, ("",) * PROMPTS))
    entropy = partial(supervised.cross_entropy, token_weight=token_weight, loss_aggregation=weigh)
    term, unmoved = Term(batch, entropy, MU), Gains(1.0, 1.0)

    def value(policies: Tensor) -> Tensor:
        logp = vmap(logps)(policies)[torch.arange(PROMPTS), best]
        return weighted_objective(Scores(logp, -logp), term=term, batch=batch, totals=count(batch), gains=unmoved)[0]

    return grad(value)(w.theta)


def beside(sampled: Callable, token_weight: Callable | None, weigh: Callable) -> Callable:
    """(1 - mu) of an expected update of sampled rows, and the given rows."""
    return lambda w: (1 - MU) * sampled(w) + vmap(partial(given_rows, token_weight=token_weight, weigh=weigh))(w)


def with_given(exact: Callable, published: Callable) -> dict[str, Callable]:
    """Expected updates by the name of their line: of `leave_one_out`, and of what CHORD has in its place."""
    uncertain = supervised.uncertain_tokens
    return {
        "`token_weight` None, `constant_length` 1 of both": beside(exact, None, row_sum),
        "`token_weight` None, `token_mean` of the given": beside(exact, None, aggregation.token_mean),
        "`uncertain_tokens`, `constant_length` 1 of both": beside(exact, uncertain, row_sum),
        "`chord` with `token_weight` None": beside(published, None, aggregation.token_mean),
        "`chord` with `uncertain_tokens`": beside(published, uncertain, aggregation.token_mean),
    }
