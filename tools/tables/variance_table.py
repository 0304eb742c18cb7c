"""Measure the gradient's variance under every advantage and baseline: the table of docs/algorithms/bias.md.

python tools/tables/variance_table.py

The worlds of bias_table.py, on-policy where the title does not say otherwise: REINFORCE, summed over a row's tokens, is
enumerated over all groups of rows of a prompt, over all steps of two prompts with groups of 2, or row by row against a
baseline that is the expectation itself, what groups without end would give. The variance is E |g - E g|^2, the trace of
the covariance of the update g.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import bias_table as bias
import tiny_worlds as tiny
import torch
from bias_turns import CREDITS, with_turns
from torch import Tensor
from torch.func import jacfwd, vmap

from grpo_fn.algo import advantage, credit, losses
from grpo_fn.core.batch import outcome_reward
from grpo_fn.testing.steps import scored_step

Weight = Callable[[Tensor, Tensor], Tensor]  # energy, written [7, 2] -> the weight of each token of each row
RatioWeight = Callable[[Tensor, Tensor, Tensor], Tensor]  # with the ratio of each token, [7, 2]
AWAY = 1.0  # how far the logits of the policy that sampled are from the policy's, where they differ


class Estimator(NamedTuple):
    """What one step makes of its rows, and which rows a step has."""

    judge: Callable[[tiny.World, list[int], Tensor], Tensor]  # world, prompts, rows [P, G] -> advantages [P, G, 2]
    steps: Sequence[list[int]]  # the prompts of each step; g is the mean over all prompts
    size: int
    over: Callable = vmap


class Moments(NamedTuple):
    """Of the update over all steps of a world."""

    mean: Tensor  # [PROMPTS, 1 + V, V]
    variance: Tensor


def moments(how: Estimator, w: tiny.World) -> Moments:
    """Mean and variance of g; the steps of different prompts are independent, so their variances add up."""
    mean, variance = [], torch.zeros(())
    for prompts in how.steps:
        rows, _ = tiny.steps(len(prompts), how.size)
        adv = how.over(partial(how.judge, w, prompts))(rows)
        keep = torch.ones(rows.shape, dtype=torch.bool)
        of_steps, chance = tiny.step_losses(w, prompts, how.size, adv, keep, reinforce, tiny.row_sum)
        g = jacfwd(of_steps)(w.theta[prompts]) * len(prompts) / tiny.PROMPTS  # [N, P, 1 + V, V]
        center = torch.einsum("n,npij->pij", chance, g)
        mean.append(center)
        variance = variance + chance @ (g - center).square().sum((1, 2, 3))
    return Moments(torch.cat(mean), variance)


def reinforce(logp: Tensor, row: object) -> Tensor:
    return losses.reinforce(logp, row)[0]


# -- what is measured


def judged(of_step: Callable, worth: str, w: tiny.World, prompts: list[int], step: Tensor) -> Tensor:
    """By a credit, [P, G, 2]."""
    of_rows, written = getattr(w, worth)[prompts], tiny.MASK[step]
    reward = outcome_reward(of_rows.gather(1, step), torch.ones(step.shape, dtype=torch.bool), {})
    reward = with_turns(reward, of_rows, tiny.ROWS, tiny.MASK, step)
    drift, energy = (
        torch.stack([table(p)[rows] for p, rows in zip(prompts, step, strict=True)])
        for table in (lambda p: tiny.logps(w.old[p]) - tiny.logps(w.ref[p]), lambda p: tiny.energies(w.old[p]))
    )
    return of_step(scored_step(reward, written, drift=drift, energy=energy))


def against_expectation(weigh: Weight, worth: str, w: tiny.World, prompts: list[int], step: Tensor) -> Tensor:
    """R - E[x_t R] / E[x_t] of token t, x its weight, over the rows that have a token t."""
    adv = []
    for p, rows in zip(prompts, step, strict=True):
        weight = tiny.chances(w.old[p])[:, None] * weigh(tiny.energies(w.old[p]), tiny.MASK)
        reward = getattr(w, worth)[p]
        adv.append((reward[:, None] - reward @ weight / weight.sum(0))[rows])
    return torch.stack(adv)


def against_weighted_expectation(
    weigh: RatioWeight, worth: str, w: tiny.World, prompts: list[int], step: Tensor
) -> Tensor:
    """rho_t (R - E[x_t R] / E[x_t]) of rows of another policy, E over those; rho the ratio of token t, x its weight."""
    adv = []
    for p, rows in zip(prompts, step, strict=True):
        ratio = (tiny.logps(w.theta[p]) - tiny.logps(w.old[p])).exp()
        weight = tiny.chances(w.old[p])[:, None] * weigh(tiny.energies(w.theta[p]), tiny.MASK, ratio)
        reward = getattr(w, worth)[p]
        adv.append((ratio * (reward[:, None] - reward @ weight / weight.sum(0).clamp(min=1e-300)))[rows])
    return torch.stack(adv)


NOTHING = "no baseline: `reward_to_go`"
OTB = "`optimal_token_baseline` of `reward_to_go`"
WEIGHTED = "by ratio^2 energy so far, of `optimal_token_baseline` with `energy_weight`"
DIVIDED = {
    "`group_normalized`": bias.group_normalized,
    "`leave_one_out_normalized`": bias.leave_one_out_normalized,
    "`leave_one_out_others_std`": bias.leave_one_out_others_std,
    "`max_rl`": advantage.max_rl,
}
WEIGHTS: dict[str, Weight] = {
    "the mean, of `mean_centered`": lambda energy, written: torch.ones(energy.shape),
    "by length, of `outcome_length_baseline`": lambda energy, written: written.sum(1, keepdim=True).expand(7, 2),
    "by energy so far, of `optimal_token_baseline`": lambda energy, written: torch.where(
        written, energy.cumsum(1), 0.0
    ),
    "by the energy of the token alone": lambda energy, written: energy,
}
RATIO_WEIGHTS: dict[str, RatioWeight] = {
    NOTHING: lambda energy, written, ratio: torch.zeros(energy.shape),
    "the mean": lambda energy, written, ratio: torch.where(written, 1.0, 0.0),
    "by energy so far": lambda energy, written, ratio: torch.where(written, energy.cumsum(1), 0.0),
    WEIGHTED: lambda energy, written, ratio: torch.where(written, (ratio**2 * energy).cumsum(1), 0.0),
    "by energy so far times the token's ratio^2": lambda energy, written, ratio: torch.where(
        written, ratio**2 * energy.cumsum(1), 0.0
    ),
    "by ratio^2 energy of the token alone": lambda energy, written, ratio: ratio**2 * energy,
}
STEP = bias.compared
IN_STEPS: dict[str, Callable] = {
    "`leave_one_out`": STEP,
    "`token_whitened` of `reward_to_go`": partial(credit.token_whitened, credit=bias.to_go, eps=1e-8),
    "`token_whitened` of `leave_one_out`": partial(credit.token_whitened, credit=STEP, eps=1e-8),
    "`row_whitened` of `leave_one_out`": partial(credit.row_whitened, credit=STEP, eps=1e-8),
    "`batch_scaled` of `leave_one_out`": partial(credit.batch_scaled, credit=STEP, eps=1e-4),
    **CREDITS,  # each token a turn
}
SCALED = ("whitened", "batch_scaled")  # by moments of a step, which vmap cannot take


def in_groups(of_step: Callable, worth: str, size: int) -> Estimator:
    """Each prompt's group is a step by itself."""
    return Estimator(partial(judged, of_step, worth), [[p] for p in range(tiny.PROMPTS)], size)


def in_steps(name: str, of_step: Callable) -> Estimator:
    """Both prompts' groups of 2 are one step."""
    over = tiny.one_by_one if any(word in name for word in SCALED) else vmap
    return Estimator(partial(judged, of_step, "reward"), [[*range(tiny.PROMPTS)]], 2, over)


def compared(compare: Callable) -> Callable:
    return partial(credit.outcome, advantage=compare)


def baselines(worth: str, size: int) -> dict[str, Estimator]:
    """What takes something off the reward and divides by nothing."""
    found = {
        NOTHING: bias.to_go,
        "`mean_centered`": compared(advantage.mean_centered),
        "`leave_one_out`": compared(advantage.leave_one_out),
        "`outcome_length_baseline`": credit.outcome_length_baseline,
        OTB: bias.optimal_to_go,
    }
    return {name: in_groups(of_step, worth, size) for name, of_step in found.items()}


def divided(worth: str) -> dict[str, Estimator]:
    """The advantages that divide by what the group is like."""
    labels = partial(advantage.rewards_as_labels, tau=0.5, threshold=1.0)
    of_two = {"`pass_at_k`, k = 2": bias.pass_at_2, "`rewards_as_labels` 0.5": labels}
    binary = {} if worth == "reward" else of_two
    return {name: in_groups(compared(f), worth, 4) for name, f in (DIVIDED | binary).items()}


def expected(worth: str) -> dict[str, Estimator]:
    """Each baseline as groups without end would have it; a row by itself then."""
    singly = [[p] for p in range(tiny.PROMPTS)]
    return {NOTHING: in_groups(bias.to_go, worth, 1)} | {
        name: Estimator(partial(against_expectation, weigh, worth), singly, 1) for name, weigh in WEIGHTS.items()
    }


def weighted(worth: str) -> dict[str, Estimator]:
    """Of rows of another policy, each token weighed with its ratio, against baselines that are expectations."""
    singly = [[p] for p in range(tiny.PROMPTS)]
    return {
        name: Estimator(partial(against_weighted_expectation, weigh, worth), singly, 1)
        for name, weigh in RATIO_WEIGHTS.items()
    }


def sections() -> Iterator[tuple[str, dict[str, Estimator], float]]:
    """Title, estimators, the first of which is what the others are measured in, and how far away rows come from."""
    for worth, title in {"reward": "graded rewards", "solved": "rewards 0 and 1"}.items():
        yield f"Variance, baselines that are expectations, {title}", expected(worth), 0.0
        yield f"Variance, groups of 4, {title}", baselines(worth, 4) | divided(worth), 0.0
        yield f"Variance, groups of 8, {title}", baselines(worth, 8), 0.0
        away = f"sampled from logits up to {AWAY:g} away, tokens weighed with their ratios, {title}"
        yield f"Variance, baselines that are expectations, {away}", weighted(worth), AWAY
    steps = {NOTHING: in_steps(NOTHING, bias.to_go)}
    yield (
        "Variance, steps of 2 x 2, graded rewards",
        steps | {name: in_steps(name, of_step) for name, of_step in IN_STEPS.items()},
        0.0,
    )


# -- the table


def figures(estimators: dict[str, Estimator], worlds: tiny.World) -> dict[str, tuple[Tensor, Tensor]]:
    """Variance and noise of each in every world, in units of the first one's there, [POLICIES] each."""
    found = {}
    for name, how in estimators.items():
        mean, variance = how.over(partial(moments, how))(worlds)
        found[name] = variance, variance / mean.square().sum((1, 2, 3))
    first = next(iter(found.values()))
    return {name: tuple(x / unit for x, unit in zip(both, first, strict=True)) for name, both in found.items()}


def worlds(away: float) -> tiny.World:
    """The worlds of the bias table, on-policy or not."""
    return tiny.World(*map(torch.stack, zip(*(tiny.world(seed, away) for seed in range(tiny.POLICIES)), strict=True)))


def rows(estimators: dict[str, Estimator], away: float) -> list[str]:
    """A line of the table for each estimator."""
    found = figures(estimators, worlds(away))
    return [
        f"| {name} | " + " | ".join(f"{float(x):.2g}" for each in both for x in (each.mean(), each.max())) + " |"
        for name, both in found.items()
    ]


def table() -> str:
    """Every section as markdown."""
    head = ["", "| | variance | worst | noise | worst |", "|---|---|---|---|---|"]
    return (
        "\n\n".join("\n".join([f"**{title}**", *head, *rows(found, away)]) for title, found, away in sections()) + "\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(table())
