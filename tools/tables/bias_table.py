"""Bias and noise of every estimator, by enumerating all outcomes: the tables of docs/algorithms/bias.md.

In the worlds of tiny_worlds.py the expectation of any update is a finite sum over all groups, or all steps of two
groups. It is compared with the exact gradient of the objective, for POLICIES random policies.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from estimators import (
    Estimator,
    failure,
    gradient,
    leave_one_out,
    minus_reward,
    moments,
    row_kl,
    row_sum,
    token_kl,
)
from tiny_worlds import POLICIES, World, chances, world
from torch import Tensor

from grpo_fn.algo import advantage, corrections, credit, distillation, losses, masking, objective
from grpo_fn.core.types import Batch

Objective = Callable[[Tensor, World, int], Tensor]
SIZE = 4  # samples of a group that is a step by itself
EXACT = 1e-12  # an error below it is rounding
FILTERS = (masking.drop_truncated, masking.drop_incomparable, masking.drop_zero_advantage)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
to_go = partial(credit.reward_to_go, beta=0.0)
group_normalized = partial(advantage.group_normalized, eps=1e-4, ddof=1)
pass_at_2 = partial(advantage.pass_at_k, k=2, threshold=1.0)
labels = partial(advantage.rewards_as_labels, tau=0.5, threshold=1.0)


class Section(NamedTuple):
    """Estimators by name, the gradient that each is held against, and how far away the sampling policy is."""

    title: str
    estimators: Mapping[str, Estimator]
    objective: Objective | Mapping[str, Objective]  # of all, or of each
    drift: float = 0.0


def sections() -> Iterator[Section]:
    """What is measured."""
    yield Section("Groups of 4, graded rewards, against the gradient of E[R]", groups("reward"), minus_reward)
    yield Section("Groups of 4, rewards 0 and 1, against the gradient of P(success)", groups("solved"), failure)
    yield Section("Steps of 2 x 2, graded rewards, against the gradient of E[R]", step_credits(), minus_reward)
    yield Section("Advantages against the gradient of another objective", *other_objectives())
    title = "Weights and filters, `leave_one_out`, steps of 2 x 2, against the gradient of E[R]"
    yield Section(title, weights_and_filters(), minus_reward)
    for drift in (0.1, 1.0):
        title = f"Token losses, sampled from logits up to {drift:g} away, against the gradient of E[R]"
        yield Section(title, token_losses(), minus_reward, drift)
    title = "Corrections of `reinforce`, sampled from logits up to 1 away, against the gradient of E[R]"
    yield Section(title, importance_corrections(), minus_reward, 1.0)
    for drift in (0.0, 1.0):
        title = f"KL in the loss, sampled from logits up to {drift:g} away, against the KL of tokens"
        yield Section(title, {**kl_in_loss(), **({} if drift else teacher_gaps())}, token_kl, drift)
    yield Section("KL in the reward or in the loss, against the KL of whole rows", kl_anywhere(), row_kl)


def groups(worth: str) -> dict[str, Estimator]:
    """Credits and advantages, a group of a prompt being a step."""
    compared = {
        "`mean_centered`": advantage.mean_centered,
        "`leave_one_out`": advantage.leave_one_out,
        "`group_normalized`": group_normalized,
        "`leave_one_out_normalized`": partial(advantage.leave_one_out_normalized, eps=1e-4, ddof=1),
        "`leave_one_out_others_std`": partial(advantage.leave_one_out_others_std, eps=1e-6),
        "`max_rl`": advantage.max_rl,
    }
    if worth == "solved":
        compared |= {"`pass_at_k`, k = 2": pass_at_2, "`rewards_as_labels` 0.5": labels}
    credits = {
        "no baseline: `reward_to_go`": to_go,
        "`outcome_length_baseline`": credit.outcome_length_baseline,
        "`optimal_token_baseline` of `reward_to_go`": partial(credit.token_baseline, credit=to_go, energy_weight=None),
        **{name: partial(credit.outcome, advantage=f) for name, f in compared.items()},
    }
    return {name: Estimator(f, SIZE, together=False, worth=worth) for name, f in credits.items()}


def step_credits() -> dict[str, Estimator]:
    """Credits that look at a whole step."""
    reweighted = partial(distillation.teacher_reweighted, credit=leave_one_out, share=None, lam=0.5, clip=0.2)
    whole = {
        "`token_whitened` of `reward_to_go`": partial(credit.token_whitened, credit=to_go, eps=1e-8),
        "`token_whitened` of `leave_one_out`": partial(credit.token_whitened, credit=leave_one_out, eps=1e-8),
        "`row_whitened` of `leave_one_out`": partial(credit.row_whitened, credit=leave_one_out, eps=1e-8),
        "`batch_scaled` of `leave_one_out`": partial(credit.batch_scaled, credit=leave_one_out, eps=1e-4),
    }
    return {
        "no baseline: `reward_to_go`": Estimator(to_go),
        "`leave_one_out`": Estimator(),
        "`teacher_reweighted` of `leave_one_out`": Estimator(reweighted),
        **{name: Estimator(f, loops=True) for name, f in whole.items()},
    }


def other_objectives() -> tuple[dict[str, Estimator], dict[str, Objective]]:
    """Advantages that are made for something else than E[R]."""
    parts = partial(credit.per_part, weights={"graded": 1.0, "solved": 1.0})
    max_rl, pass_at_k = (
        Estimator(partial(credit.outcome, advantage=f), SIZE, together=False, worth="solved")
        for f in (advantage.max_rl, pass_at_2)
    )
    rows = {
        "`max_rl`: log P(success)": (max_rl, log_success),
        f"`max_rl`: log P(success), the first {SIZE - 1} terms": (max_rl, partial(first_terms, terms=SIZE - 1)),
        f"`max_rl`: log P(success), the first {SIZE} terms": (max_rl, partial(first_terms, terms=SIZE)),
        "`pass_at_k`, k = 2: P(one of 2 is a success)": (pass_at_k, lambda *x: failure(*x) ** 2),
        "`per_part` of `leave_one_out`: E[R] + P(success)": (
            Estimator(partial(parts, advantage=advantage.leave_one_out)),
            minus_both,
        ),
        "`per_part` of `group_normalized`: E[R] + P(success)": (
            Estimator(partial(parts, advantage=group_normalized)),
            minus_both,
        ),
    }
    return {name: how for name, (how, _) in rows.items()}, {name: objective for name, (_, objective) in rows.items()}


def minus_both(logits: Tensor, w: World, p: int) -> Tensor:
    """-(E[R] + P(success)), two parts of a reward."""
    return minus_reward(logits, w, p) - chances(logits) @ w.solved[p]


def log_success(logits: Tensor, w: World, p: int) -> Tensor:
    """-log P(success)."""
    return -(1 - failure(logits, w, p)).log()


def first_terms(logits: Tensor, w: World, p: int, *, terms: int) -> Tensor:
    """sum_{k <= terms} (1 - P(success))^k / k: the expansion of -log P(success), cut off."""
    return sum(failure(logits, w, p) ** k / k for k in range(1, terms + 1))


def weights_and_filters() -> dict[str, Estimator]:
    weights = {
        "`constant_length` 1": row_sum,
        "`constant_length` 2": partial(objective.constant_length, max_length=2),
        "`sequence_mean`": objective.sequence_mean,
        "`token_mean`": objective.token_mean,
        "`prompt_mean`": objective.prompt_mean,
    }
    over_samples = {
        "`constant_length_over_samples` 1": partial(objective.constant_length_over_samples, max_length=1),
        "`sequence_mean`": objective.sequence_mean,
        "`sequence_mean_over_samples`": objective.sequence_mean_over_samples,
    }
    return {
        **{name: Estimator(weigh=f) for name, f in weights.items()},
        **{f"`constant_length` 1, filter `{f.__name__}`": Estimator(keeps=f) for f in FILTERS},
        **{
            f"{name}, filter `drop_truncated`": Estimator(weigh=f, keeps=masking.drop_truncated)
            for name, f in over_samples.items()
        },
    }


def token_losses() -> dict[str, Estimator]:
    """With the numbers of the presets; of whole rows' ratios with the weights that GSPO and LUSPO give their tokens."""
    row_ratio = losses.sequence_ratio
    found = {
        "`reinforce`": losses.reinforce,
        "`clipped_ratio` without a clip": partial(losses.clipped_ratio, clip_low=1e9, clip_high=1e9),
        "`clipped_ratio` 0.2, 0.28": partial(losses.clipped_ratio, **CLIP),
        "`dual_clip` 0.2, 0.28, 3": partial(losses.dual_clip, **CLIP, cap=3.0),
        "`sequence_ratio` without a clip": partial(row_ratio, clip_low=1e9, clip_high=1e9),
        "`sequence_ratio` 0.2, 0.28": partial(row_ratio, **CLIP),
        "`sequence_ratio_token` 0.2, 0.28": partial(losses.sequence_ratio_token, **CLIP),
        "`cispo` 4": partial(losses.cispo, clip_high=4.0),
        "`cispo` 0.28": partial(losses.cispo, clip_high=0.28),
        "`sapo` 1, 1.05": partial(losses.sapo, tau_positive=1.0, tau_negative=1.05),
        "`gmpo` 0.4, 0.4": partial(losses.gmpo, log_low=0.4, log_high=0.4),
        "`dppo_tv` 0.2, no penalty": partial(losses.dppo_tv, delta=0.2, kappa=0.0),
        "`dppo_tv` 0.2, 1e-3": partial(losses.dppo_tv, delta=0.2, kappa=1e-3),
        "`clip_cov` 0.2, 0.2, nothing selected": partial(losses.clip_cov, clip_low=0.2, clip_high=0.2),
        "`kl_cov` nothing selected": partial(losses.kl_cov, coef=1.0),
        "`masked_ratio` nothing selected": losses.masked_ratio,
        "`vespo` 2, 3 and 3, 2": partial(
            losses.vespo, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0
        ),
        "`dppo_kl` 0.05, 20": partial(losses.dppo_kl, delta=0.05, cap=20.0),
        "`masked_reinforce` 0.2, 0.28": partial(losses.masked_reinforce, low=0.2, high=0.28),
        "`dro` 0.1": partial(losses.dro, beta=0.1),
        "`future_weighted` 0.2, 0.28, 10, 32, 1 to 1.2, 4": partial(
            losses.future_weighted,
            **CLIP,
            **{"cap": 10.0, "half_life": 32.0, "weight_low": 1.0, "weight_high": 1.2, "safety": 4.0},
        ),
    }
    rows = {
        "`sequence_ratio` without a clip, `sequence_mean`": (1e9, 1e9, objective.sequence_mean),
        "GSPO: `sequence_ratio` 3e-4, 4e-4, `sequence_mean`": (3e-4, 4e-4, objective.sequence_mean),
        "LUSPO: `sequence_ratio` 2e-3, 2.5e-3, `constant_length` 1": (2e-3, 2.5e-3, row_sum),
    }

    def far(batch: Batch) -> Tensor:
        """The tokens of a group of two that M2PO leaves out: those furthest from the sampler."""
        return masking.second_moment_tokens(batch, torch.zeros(len(batch.mask), 2, dtype=torch.long), limit=0.04)

    alone = partial(Estimator, together=False)
    return {
        **{name: alone(loss=f) for name, f in found.items()},
        **{
            name: alone(loss=partial(row_ratio, clip_low=low, clip_high=high), weigh=weigh)
            for name, (low, high, weigh) in rows.items()
        },
        "`masked_ratio` without `second_moment_tokens` 0.04": alone(loss=losses.masked_ratio, mark=far),
    }


def importance_corrections() -> dict[str, Estimator]:
    """Bounds that leave out some of this world's rows; published ones are wider."""
    truncated, bounds = partial(corrections.truncated_weight, ratio=corrections.token_ratio), {"low": 0.5, "high": 2.0}
    near = partial(corrections.masked_weight, ratio=corrections.row_ratio, **bounds)
    whole = partial(truncated, cap=math.inf)
    found = {
        "`None`": None,
        "`truncated_weight` without a cap": whole,
        "`truncated_weight` 2": partial(truncated, cap=2.0),
        "`masked_weight` 0.5, 2": partial(near, ratio=corrections.token_ratio),
        "`truncated_weight` of `row_ratio` 2": partial(truncated, ratio=corrections.row_ratio, cap=2.0),
        "`masked_weight` of `row_ratio` 0.5, 2": near,
        "`off_policy_sequence_mask` 0.1": partial(corrections.off_policy_sequence_mask, delta=0.1),
        "`weight_and_mask` of `truncated_weight` and `masked_weight` of `row_ratio` 0.5, 2": partial(
            corrections.weight_and_mask, weight=whole, mask=near
        ),
    }
    return {name: Estimator(loss=corrected(f), together=False) for name, f in found.items()}


def corrected(correction: Callable | None) -> Callable:
    """REINFORCE whose tokens weigh as a correction says, where the old log-probs are the policy's own."""

    def loss(logp: Tensor, row: Batch) -> Tensor:
        plain, _ = losses.reinforce(logp, row)
        return plain if correction is None else correction(logp, row._replace(logp_old=logp.detach())) * plain

    return loss


def kl_in_loss() -> dict[str, Estimator]:
    """KL estimates by themselves, of single rows."""
    nothing = partial(Estimator, lambda scored: torch.zeros(scored.mask.shape).double(), size=1, together=False)
    return {
        f"`{f.__name__}`": nothing(loss=f) for f in (objective.k3, objective.k3_ratio, objective.k1_ratio, objective.k2)
    }


def teacher_gaps() -> dict[str, Estimator]:
    """The gap to a teacher without rewards."""
    alone = {"credit": None, "share": None, "coef": 1.0}
    gaps = (distillation.teacher_gap, partial(distillation.early_teacher_gap, gamma=0.5))
    return {
        f"`{getattr(f, 'func', f).__name__}` alone": Estimator(partial(f, **alone), size=1, together=False)
        for f in gaps
    }


def kl_anywhere() -> dict[str, Estimator]:
    """A KL in a reward of nothing else, and in the loss."""
    minus_kl = partial(credit.outcome_minus_kl, advantage=advantage.leave_one_out, beta=1.0)
    return {
        "`reward_to_go`": Estimator(partial(credit.reward_to_go, beta=1.0), size=1, together=False, paid=0.0),
        "`outcome_minus_kl` of `leave_one_out`, groups of 2": Estimator(minus_kl, together=False, paid=0.0),
        **kl_in_loss(),
    }


# -- the tables


def table(_: str) -> str:
    """Every section."""
    torch.set_num_threads(1)
    head = ["", "| | scale | error | worst | cosine | worst | noise | worst |", "|---|---|---|---|---|---|---|---|"]
    parts = ([f"**{section.title}**", *head, *lines(section)] for section in sections())
    return "\n\n".join("\n".join(part) for part in parts)


def lines(section: Section) -> Iterator[str]:
    """A line for each estimator; noise is in units of the first one's, world by world."""
    worlds = [world(seed, section.drift) for seed in range(POLICIES)]
    unit: list[float] = []
    for name, how in section.estimators.items():
        objective = section.objective[name] if isinstance(section.objective, Mapping) else section.objective
        figures = [measured(how, objective, w) for w in worlds]
        unit = unit or [noise for *_, noise in figures]
        scale, error, cosine, noise = zip(*figures, strict=True)
        relative = [x / first for x, first in zip(noise, unit, strict=True)]
        errors = ["0" if x < EXACT else f"{x:.2g}" for x in (mean(error), max(error))]
        cells = [f"{mean(scale):.2f}", *errors, f"{mean(cosine):.3f}", f"{min(cosine):.3f}"]
        yield f"| {name} | {' | '.join(cells)} | {mean(relative):.2g} | {max(relative):.2g} |"


def measured(how: Estimator, objective: Objective, w: World) -> tuple[float, float, float, float]:
    """Scale: the projection on the true gradient, in its units. Error: the distance from it, too. Cosine, noise."""
    (update, variance), right = moments(how, w), gradient(objective, w)
    along, length, size = (update * right).sum(), right.norm(), update.norm()
    figures = along / length**2, (update - right).norm() / length, along / (length * size), variance / size**2
    return tuple(map(float, figures))


def mean(values: tuple[float, ...] | list[float]) -> float:
    return sum(values) / len(values)
