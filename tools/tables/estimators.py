"""The update of a step in a tiny world: its mean and its variance over all steps, and the gradients it may aim at."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from tiny_worlds import EOS, MASK, PROMPTS, ROWS, TRUNCATED, V, World, chances, energies, logps, steps
from torch import Tensor
from torch.func import grad, jacfwd, vmap

from grpo_fn.algo import advantage, credit, losses, objective
from grpo_fn.core.batch import outcome_reward, tokens_of_group
from grpo_fn.core.types import Batch, Rollout, Totals
from grpo_fn.testing.steps import scored_step

# Nothing depends on length under this weight: the sum over a row's tokens, the mean over rows.
row_sum = partial(objective.constant_length, max_length=1)
leave_one_out = partial(credit.outcome, advantage=advantage.leave_one_out)


class Estimator(NamedTuple):
    """What a step makes of its rows. The reference is the teacher, too."""

    credit: Callable = leave_one_out
    size: int = 2  # of a group
    loss: Callable = losses.reinforce
    weigh: Callable = row_sum
    keeps: Callable | None = None  # a filter of samples
    mark: Callable | None = None  # chooses tokens of a step for the loss to treat apart
    together: bool = True  # whether the prompts' groups are one step, or each a step by itself
    worth: str = "reward"  # of World: what a row is paid
    paid: float = 1.0  # times that
    loops: bool = False  # over steps: vmap cannot take the moments of as many tokens as a step happens to have


def moments(how: Estimator, w: World) -> tuple[Tensor, Tensor]:
    """Mean, [PROMPTS, 1 + V, V], and variance E |g - E g|^2 of the update g of a world's policies."""
    mean, variance = [], torch.zeros(())
    for prompts in [[*range(PROMPTS)]] if how.together else [[p] for p in range(PROMPTS)]:
        value, chance = step_losses(how, w, prompts)
        g = jacfwd(value)(w.theta[prompts]) * len(prompts) / PROMPTS  # [N, P, 1 + V, V]
        center = torch.einsum("n,npij->pij", chance, g)
        mean.append(center)
        variance = variance + chance @ (g - center).square().sum((1, 2, 3))  # steps are independent
    return torch.cat(mean), variance


def step_losses(how: Estimator, w: World, prompts: list[int]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The weighted loss of each of the N steps of `prompts`, as a function of their policies, and its chance, [N]."""
    rows, often = steps(len(prompts), how.size)
    n, prompt = len(rows), torch.arange(len(prompts))[:, None]
    over = vmap if not how.loops else lambda f: lambda xs: map(torch.stack, zip(*map(f, xs), strict=True))
    adv, keep = over(partial(credited, how, w, prompts))(rows)

    def of_rows(policies: Tensor) -> Tensor:
        return vmap(logps)(policies)[prompt, rows].flatten(1, 2)

    old, ref = of_rows(w.old[prompts]), of_rows(w.ref[prompts])
    mask = (MASK[rows] & keep[..., None]).flatten(1, 2)
    of_group = vmap(partial(tokens_of_group, groups=len(prompts)))(mask)
    batch = Batch(ROWS[rows].flatten(1, 2), mask, old, old, ref, ref, adv.flatten(1, 2), ~mask & mask, of_group)
    if how.mark is not None:  # by old log-probs that are the policy's own
        own = batch._replace(logp_old=of_rows(w.theta[prompts]))
        batch = batch._replace(selected=torch.stack([how.mark(Batch(*(x[i] for x in own))) for i in range(n)]))
    filled, groups = mask.any(-1), mask.unflatten(1, (len(prompts), how.size)).any(-1).any(-1)
    sizes = (mask.sum((1, 2)), filled.sum(1), torch.full((n,), filled.shape[1]), groups.sum(1))
    weight = vmap(how.weigh)(batch, Totals(*(x.double() for x in sizes)))

    def token_loss(logp: Tensor, row: Batch) -> Tensor:
        found = how.loss(logp, row)
        return found[0] if isinstance(found, tuple) else found

    def value(policies: Tensor) -> Tensor:
        return (weight * vmap(vmap(token_loss))(of_rows(policies), batch)).sum((1, 2))

    return value, often * old.sum((1, 2)).exp()


def credited(how: Estimator, w: World, prompts: list[int], step: Tensor) -> tuple[Tensor, Tensor]:
    """What the tokens of a step [P, G] get, [P, G, 2], and which samples may learn."""
    valid, written = torch.ones(step.shape, dtype=torch.bool), MASK[step]
    parts = {"graded": w.reward[prompts].gather(1, step), "solved": w.solved[prompts].gather(1, step)}
    paid = getattr(w, how.worth)[prompts].gather(1, step)
    there = step[..., None].expand(written.shape)
    drift, energy = (
        torch.stack([figure(p) for p in prompts]).gather(1, there)
        for figure in (lambda p: logps(w.old[p]) - logps(w.ref[p]), lambda p: energies(w.old[p]))
    )
    reward = outcome_reward(how.paid * paid, valid, parts)
    adv = how.credit(scored_step(reward, written, drift=drift, teacher_gap=-drift, energy=energy))
    if how.keeps is None:
        return adv, valid
    chosen = step.flatten()
    rollout = Rollout(ROWS[chosen], MASK[chosen], torch.zeros(len(chosen), 2), TRUNCATED[chosen], ("",) * len(chosen))
    return adv, how.keeps(rollout, adv)


# -- objectives, to be minimised


def gradient(objective: Callable[[Tensor, World, int], Tensor], w: World) -> Tensor:
    """That of objective(logits, world, prompt), averaged over prompts."""
    return torch.stack([grad(objective)(w.theta[p], w, p) for p in range(PROMPTS)]) / PROMPTS


def minus_reward(logits: Tensor, w: World, p: int) -> Tensor:
    """-E[R]."""
    return -chances(logits) @ w.reward[p]


def failure(logits: Tensor, w: World, p: int) -> Tensor:
    """1 - P(success)."""
    return 1 - chances(logits) @ w.solved[p]


def row_kl(logits: Tensor, w: World, p: int) -> Tensor:
    """KL(pi || pi_ref) of whole rows."""
    return chances(logits) @ (logps(logits) - logps(w.ref[p])).sum(-1)


def token_kl(logits: Tensor, w: World, p: int) -> Tensor:
    """sum_t KL(pi(. | o_<t) || pi_ref(. | o_<t)) over prefixes of the sampling policy, held fixed."""
    first = w.old[p].log_softmax(-1)[0].exp()
    visits = torch.cat([torch.ones(1), first]) * (torch.arange(1 + V) != 1 + EOS)
    here, there = logits.log_softmax(-1), w.ref[p].log_softmax(-1)
    return (visits * (here.exp() * (here - there)).sum(-1)).sum()
