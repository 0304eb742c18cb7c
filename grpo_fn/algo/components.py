"""What the optimizer steps of a GRPO step minimise: sampled rows and given ones beside them, each over its tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from grpo_fn.algo.objective import Component
from grpo_fn.core.batch import count, given_batch, minibatches, observed_tokens
from grpo_fn.core.types import Batch, Gains, Groups, Rollout, Scores, Totals

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # scores; batch=, totals=, gains= -> loss, diagnostics


class GivenRows(NamedTuple):
    """Rows of tokens that the policy did not sample, and how they are learned beside those that it did."""

    batch: Batch
    objective: Objective
    weight: float  # of the objective
    share: float  # of the step, which is taken from the weight of the sampled rows


def given_beside(
    groups: Groups, shown: Rollout | None, *, objective: Objective, mu: float, observation_coef: float
) -> list[GivenRows]:
    """The rows that a step learns beside its sampled tokens: demonstrations, and what environments wrote between turns.

    With observations the step minimises policy objective + observation_coef * cross entropy of the observed tokens, as
    ECHO does (arXiv:2605.24517); each is a mean over its own tokens, as in prime-rl's code.

    Args:
        groups: P problems, their samples and rewards; samples without a valid reward teach nothing.
        shown: demonstrations, [D, T']; None: there are none.
        objective: of given tokens, such as `supervised.cross_entropy`.
        mu: share of the demonstrations in the step, in [0, 1].
        observation_coef: weight of the observations' objective; 0: they are left out.

    Returns:
        The rows with objective and weight; no observations where no row has any.
    """
    given = [] if shown is None else [GivenRows(given_batch(shown), objective, mu, mu)]
    if observation_coef:
        mask = groups.rollout.mask
        valid = groups.reward.valid.flatten()[:, None].to(mask.device)
        observed = given_batch(groups.rollout._replace(mask=observed_tokens(mask) & valid))
        learn = partial(observation_objective, objective=objective)
        given += [GivenRows(observed, learn, observation_coef, 0.0)] if observed.mask.any() else []
    return given


def observation_objective(
    scores: Scores, *, batch: Batch, totals: Totals, gains: Gains, objective: Objective
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, "B T"]]]:
    """An objective of given tokens, for what environments wrote: its diagnostics under a name of their own.

    Args:
        scores: log-probs and entropies under the policy, [B, T] each, in nats.
        batch: the micro-batch, each field [B, T]; its mask are the observations.
        totals: observed tokens and rows of the whole optimizer step.
        gains: as of any objective.
        objective: of given tokens; has "nll" among its diagnostics.

    Returns:
        The objective, a scalar; and per token, [B, T] and detached, "observation_nll" (-logp, nats).
    """
    value, seen = objective(scores, batch=batch, totals=totals, gains=gains)
    return value, {"observation_nll": seen["nll"]}


def components_of_updates(
    batch: Batch, beside: Sequence[GivenRows], *, objective: Objective, parts: int, enough: bool
) -> list[list[Component]]:
    """The components of each optimizer step of a pass, each over its own tokens.

    Args:
        batch: the sampled rows of the step, each field [B, T].
        beside: given rows, dealt out to the optimizer steps too.
        objective: of the sampled rows; its weight is 1 less the shares of the given ones.
        parts: optimizer steps in a pass.
        enough: whether the sampled rows may be learned from; given ones always are.

    Returns:
        The components of each optimizer step, that of the sampled rows first; none of a refused step.
    """
    if not (enough or beside):
        return []
    left = (1.0 - sum(one.share for one in beside)) * enough
    terms = [(batch, objective, left), *(one[:3] for one in beside)]
    dealt = [
        [Component(mini, count(mini), f, weight) for mini in minibatches(rows, parts)] for rows, f, weight in terms
    ]
    return [list(update) for update in zip(*dealt, strict=True)]
