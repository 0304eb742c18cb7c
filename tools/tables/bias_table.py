"""Measure the bias of every estimator by enumerating all outcomes: the table of docs/algorithms/bias.md.

python tools/tables/bias_table.py

In the worlds of tiny_worlds.py the expectation of any update is a finite sum over all groups, or all steps of two
groups. It is compared with the exact gradient of the objective, for POLICIES random policies.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from bias_given import mixed_objective, with_given
from bias_losses import CORRECTIONS, LOSSES, corrected
from bias_turns import CREDITS, with_turns
from tiny_worlds import (
    EOS,
    MASK,
    POLICIES,
    PROMPTS,
    ROWS,
    TRUNCATED,
    V,
    World,
    chances,
    energies,
    logps,
    one_by_one,
    row_sum,
    steps,
    update,
    world,
)
from torch import Tensor
from torch.func import grad, vmap

from grpo_fn.algo import advantage, aggregation, credit, distillation, kl, losses, masking
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Batch, Rollout
from grpo_fn.testing.steps import scored_step

# The expected update in each of S worlds, or the gradient that it is held against: [S, PROMPTS, 1 + V, V].
Signal = Callable[[World], Tensor]


# -- objectives, to be minimised


def gradient(objective: Callable[[Tensor, World, int], Tensor]) -> Signal:
    """That of objective(logits, world, prompt), averaged over prompts."""
    return vmap(lambda w: torch.stack([grad(objective)(w.theta[p], w, p) for p in range(PROMPTS)]) / PROMPTS)


def minus_reward(logits: Tensor, w: World, p: int) -> Tensor:
    """-E[R]."""
    return -chances(logits) @ w.reward[p]


def minus_both(logits: Tensor, w: World, p: int) -> Tensor:
    """-(E[R] + P(success)), two parts of a reward."""
    return minus_reward(logits, w, p) - chances(logits) @ w.solved[p]


def failure(logits: Tensor, w: World, p: int) -> Tensor:
    """1 - P(success)."""
    return 1 - chances(logits) @ w.solved[p]


def surprise(logits: Tensor, w: World, p: int) -> Tensor:
    """-log P(success)."""
    return -(1 - failure(logits, w, p)).log()


def surprise_up_to(logits: Tensor, w: World, p: int, *, terms: int) -> Tensor:
    """sum_{k <= terms} (1 - P(success))^k / k: the expansion of -log P(success), cut off."""
    return sum(failure(logits, w, p) ** k / k for k in range(1, terms + 1))


def all_fail(logits: Tensor, w: World, p: int, *, k: int) -> Tensor:
    """1 - pass@k."""
    return failure(logits, w, p) ** k


def row_kl(logits: Tensor, w: World, p: int) -> Tensor:
    """KL(pi || pi_ref) of whole rows."""
    return chances(logits) @ (logps(logits) - logps(w.ref[p])).sum(-1)


def token_kl(logits: Tensor, w: World, p: int) -> Tensor:
    """sum_t KL(pi(. | o_<t) || pi_ref(. | o_<t)) over prefixes of the sampling policy, held fixed."""
    first = w.old[p].log_softmax(-1)[0].exp()
    visits = torch.cat([torch.ones(1), first]) * (torch.arange(1 + V) != 1 + EOS)
    here, there = logits.log_softmax(-1), w.ref[p].log_softmax(-1)
    return (visits * (here.exp() * (here - there)).sum(-1)).sum()


# -- expected updates


def by_group(compare: Callable, worth: str = "reward") -> Signal:
    """REINFORCE on groups that an advantage function compares."""
    return off_policy(losses.reinforce, compare, row_sum, size=SIZE, worth=worth)


def off_policy(
    loss: Callable,
    compare: Callable,
    weigh: Callable,
    *,
    size: int,
    worth: str = "reward",
    mark: Callable | None = None,
    over: Callable = vmap,
) -> Signal:
    """Groups of one prompt, drawn from the old policy; one prompt after the other."""

    def signal(w: World) -> Tensor:
        rows, _ = steps(1, size)
        keep = torch.ones(rows.shape, dtype=torch.bool)
        found = []
        for p in range(PROMPTS):
            adv = vmap(compare)(getattr(w, worth)[p][rows[:, 0]], keep[:, 0])[:, None, :, None].expand(*rows.shape, 2)
            found.append(update(w, [p], size, adv, keep, lambda logp, row: loss(logp, row)[0], weigh, mark))
        return torch.cat(found) / PROMPTS

    return over(signal)


def by_step(
    assign: Callable,
    keeps: Callable | None = None,
    *,
    size: int,
    paid: float = 1.0,
    over: Callable = vmap,
    weigh: Callable = row_sum,
) -> Signal:
    """REINFORCE on steps of all prompts, with credit from `paid` times the reward, and a filter on samples.

    The reference is the teacher, too.
    """

    def judged(w: World, drift: Tensor, energy: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        valid, written = torch.ones(step.shape, dtype=torch.bool), MASK[step]
        graded, solved = (x.gather(1, step) for x in (w.reward, w.solved))
        reward = outcome_reward(paid * graded, valid, {"graded": graded, "solved": solved})
        reward = with_turns(reward, paid * w.reward, ROWS, MASK, step)
        there = step[..., None].expand(written.shape)
        apart = drift.gather(1, there)
        adv = assign(scored_step(reward, written, drift=apart, teacher_gap=-apart, energy=energy.gather(1, there)))
        return adv, valid if keeps is None else keeps(rollout(step.flatten()), adv)

    def signal(w: World) -> Tensor:
        drift = torch.stack([logps(w.old[p]) - logps(w.ref[p]) for p in range(PROMPTS)])
        energy = torch.stack([energies(w.old[p]) for p in range(PROMPTS)])
        adv, keep = over(partial(judged, w, drift, energy))(steps(PROMPTS, size)[0])
        return update(w, [*range(PROMPTS)], size, adv, keep, lambda *row: losses.reinforce(*row)[0], weigh)

    return over(signal)


def rollout(rows: Tensor) -> Rollout:
    """What a filter sees of them."""
    return Rollout(ROWS[rows], MASK[rows], torch.zeros(len(rows), 2), TRUNCATED[rows], ("",) * len(rows))


def of_kl(estimate: Callable) -> Signal:
    """A KL estimate in the loss, by itself."""

    def signal(w: World) -> Tensor:
        rows, _ = steps(1, 1)
        nothing, keep = torch.zeros(*rows.shape, 2).double(), torch.ones(rows.shape, dtype=torch.bool)
        return torch.cat([update(w, [p], 1, nothing, keep, estimate, row_sum) for p in range(PROMPTS)]) / PROMPTS

    return vmap(signal)


# -- what is measured


class Comparison(NamedTuple):
    """An estimator by name, its expected update, and the gradient that it is held against."""

    name: str
    got: Signal
    wanted: Signal


group_normalized = partial(advantage.group_normalized, eps=1e-4, ddof=1)
leave_one_out_normalized = partial(advantage.leave_one_out_normalized, eps=1e-4, ddof=1)
leave_one_out_others_std = partial(advantage.leave_one_out_others_std, eps=1e-6)
pass_at_2 = partial(advantage.pass_at_k, k=2, threshold=1.0)
to_go = partial(credit.reward_to_go, beta=0.0)
optimal_to_go = partial(credit.token_baseline, credit=to_go, energy_weight=None)
compared = partial(credit.outcome, advantage=advantage.leave_one_out)
OVER_SAMPLES = {
    "`constant_length_over_samples` 1": partial(aggregation.constant_length_over_samples, max_length=1),
    "`sequence_mean`": aggregation.sequence_mean,
    "`sequence_mean_over_samples`": aggregation.sequence_mean_over_samples,
}
SIZE = 4  # samples of a group, where nothing else is said
EXACT = 1e-12  # an error below it is rounding


def sections() -> Iterator[tuple[str, float, list[Comparison]]]:
    """Title, how far the sampling policy is away, comparisons."""
    yield "Advantages, graded rewards, against the gradient of E[R]", 0.0, against(minus_reward, graded())
    yield "Advantages, rewards 0 and 1, against the gradient of P(success)", 0.0, against(failure, binary())
    yield "Advantages against the gradient of another objective", 0.0, elsewhere()
    in_turns = {name: by_step(assign, size=2) for name, assign in CREDITS.items()}
    yield (
        "Credit of turns, each token a turn, steps of 2 x 2, against the gradient of E[R]",
        0.0,
        against(minus_reward, in_turns),
    )
    yield "Weights and filters, `leave_one_out`, against the gradient of E[R]", 0.0, against(minus_reward, lengths())
    for drift in (0.0, 0.1, 1.0):
        title = f"A row's ratio and its length weight, sampled from logits up to {drift:g} away"
        yield f"{title}, against the gradient of E[R]", drift, against(minus_reward, of_whole_rows())
    for drift in (0.0, 0.1, 1.0):
        title = f"Token losses, sampled from logits up to {drift:g} away, against the gradient of E[R]"
        found = {name: off_policy(f, advantage.leave_one_out, row_sum, size=2) for name, f in LOSSES.items()}
        found |= {"`masked_ratio` without `second_moment_tokens` 0.04": apart_from_the_sampler(0.04)}
        yield title, drift, against(minus_reward, found)
    title = "Corrections of `reinforce`, sampled from logits up to 1 away, against the gradient of E[R]"
    weighed = {
        name: off_policy(corrected(f), advantage.leave_one_out, row_sum, size=2) for name, f in CORRECTIONS.items()
    }
    yield title, 1.0, against(minus_reward, weighed)
    for drift in (0.0, 1.0):
        title = f"KL in the loss, sampled from logits up to {drift:g} away, against the KL of tokens"
        yield title, drift, against(token_kl, in_loss())
    title = "Distillation, on-policy, against the KL of tokens to the teacher"
    yield title, 0.0, against(token_kl, from_teacher())
    given = with_given(
        by_step(compared, size=2),
        by_step(partial(credit.outcome, advantage=group_normalized), weigh=aggregation.token_mean, size=2),
    )
    title = (
        "Given rows beside sampled ones, mu 0.5, against the gradient of E[R] + log pi of the given row, half of each"
    )
    yield title, 0.0, against(partial(mixed_objective, minus_reward), given)
    yield "KL in the reward or in the loss, against the KL of whole rows", 0.0, against(row_kl, in_reward() | in_loss())


def graded() -> dict[str, Signal]:
    return {
        "no baseline: `reward_to_go`": by_step(to_go, size=1),
        "`mean_centered`": by_group(advantage.mean_centered),
        "`leave_one_out`": by_group(advantage.leave_one_out),
        "`group_normalized`": by_group(group_normalized),
        "`leave_one_out_normalized`": by_group(leave_one_out_normalized),
        "`leave_one_out_others_std`": by_group(leave_one_out_others_std),
        "`max_rl`": by_group(advantage.max_rl),
        "`token_whitened` of `reward_to_go`, steps of 2 rows": whitened(credit.token_whitened, to_go, 1),
        "`token_whitened` of `leave_one_out`, steps of 2 x 2": whitened(credit.token_whitened, compared, 2),
        "`row_whitened` of `leave_one_out`, steps of 2 x 2": whitened(credit.row_whitened, compared, 2),
        "`batch_scaled` of `leave_one_out`, steps of 2 x 2": by_step(
            partial(credit.batch_scaled, credit=compared, eps=1e-4), size=2, over=one_by_one
        ),
        "`outcome_length_baseline`, steps of 2 x 2": by_step(credit.outcome_length_baseline, size=2),
        "`optimal_token_baseline` of `reward_to_go`, steps of 2 x 2": by_step(optimal_to_go, size=2),
        "`teacher_reweighted` of `leave_one_out`, steps of 2 x 2": by_step(
            partial(distillation.teacher_reweighted, credit=compared, share=None, lam=0.5, clip=0.2), size=2
        ),
    }


def apart_from_the_sampler(limit: float) -> Signal:
    """M2PO: the tokens furthest from the sampler are left out, within groups of two."""

    def far(batch: Batch) -> Tensor:
        return masking.second_moment_tokens(batch, torch.zeros(len(batch.mask), 2, dtype=torch.long), limit=limit)

    return off_policy(losses.masked_ratio, advantage.leave_one_out, row_sum, size=2, mark=far, over=one_by_one)


def whitened(over_a_step: Callable, inner: Callable, size: int) -> Signal:
    return by_step(partial(over_a_step, credit=inner, eps=1e-8), size=size, over=one_by_one)


def binary() -> dict[str, Signal]:
    normalized = (group_normalized, leave_one_out_normalized, leave_one_out_others_std)
    found = (advantage.leave_one_out, *normalized, advantage.max_rl)
    named = {f"`{getattr(f, 'func', f).__name__}`": by_group(f, "solved") for f in found}
    labels = by_group(partial(advantage.rewards_as_labels, tau=0.5, threshold=1.0), "solved")
    return named | {"`pass_at_k`, k = 2": by_group(pass_at_2, "solved"), "`rewards_as_labels` 0.5": labels}


def elsewhere() -> list[Comparison]:
    max_rl, pass_at_k = by_group(advantage.max_rl, "solved"), by_group(pass_at_2, "solved")
    cut = {k: gradient(partial(surprise_up_to, terms=k)) for k in (SIZE - 1, SIZE)}
    return [
        Comparison("`max_rl`: log P(success)", max_rl, gradient(surprise)),
        *(Comparison(f"`max_rl`: log P(success), the first {k} terms", max_rl, wanted) for k, wanted in cut.items()),
        Comparison("`pass_at_k`, k = 2: P(one of 2 is a success)", pass_at_k, gradient(partial(all_fail, k=2))),
        *(
            Comparison(f"`per_part` of `{name}`: E[R] + P(success)", by_step(of_parts(f), size=2), gradient(minus_both))
            for name, f in {"leave_one_out": advantage.leave_one_out, "group_normalized": group_normalized}.items()
        ),
    ]


def of_parts(compare: Callable) -> Callable:
    return partial(credit.per_part, advantage=compare, weights={"graded": 1.0, "solved": 1.0})


def lengths() -> dict[str, Signal]:
    def weighed(weigh: Callable) -> Signal:
        return off_policy(losses.reinforce, advantage.leave_one_out, weigh, size=3)

    filters = (masking.drop_truncated, masking.drop_incomparable, masking.drop_zero_advantage)
    return {
        "`constant_length` 1": weighed(row_sum),
        "`constant_length` 2": weighed(partial(aggregation.constant_length, max_length=2)),
        "`sequence_mean`": weighed(aggregation.sequence_mean),
        "`token_mean`": weighed(aggregation.token_mean),
        **{
            f"`{f.__name__}`, steps of 2 x 2": by_step(compared, weigh=f, size=2)
            for f in (aggregation.token_mean, aggregation.prompt_mean)
        },
        **{f"`constant_length` 1, filter `{f.__name__}`": by_step(compared, f, size=2) for f in filters},
        **{
            f"{name}, filter `drop_truncated`": by_step(compared, masking.drop_truncated, weigh=f, size=2)
            for name, f in OVER_SAMPLES.items()
        },
    }


def of_whole_rows() -> dict[str, Signal]:
    """The ratio of a row under the weights that GSPO and LUSPO give its tokens, with their clips and without."""
    weights = {"`sequence_mean`": aggregation.sequence_mean, "`constant_length` 1": row_sum}
    clips = {
        "`sequence_mean`": ("GSPO: `sequence_ratio` 3e-4, 4e-4", 3e-4, 4e-4),
        "`constant_length` 1": ("LUSPO: `sequence_ratio` 2e-3, 2.5e-3", 2e-3, 2.5e-3),
    }

    def by_ratio(low: float, high: float, weigh: Callable) -> Signal:
        loss = partial(losses.sequence_ratio, clip_low=low, clip_high=high)
        return off_policy(loss, advantage.leave_one_out, weigh, size=3)

    free = {f"`sequence_ratio` without a clip, {name}": by_ratio(1e9, 1e9, f) for name, f in weights.items()}
    return free | {f"{said}, {name}": by_ratio(low, high, weights[name]) for name, (said, low, high) in clips.items()}


def in_loss() -> dict[str, Signal]:
    return {f"`{f.__name__}`": of_kl(f) for f in (kl.k3, kl.k3_ratio, kl.k1_ratio, kl.k2)}


def from_teacher() -> dict[str, Signal]:
    alone = {"credit": None, "share": None, "coef": 1.0}
    return {
        "`teacher_gap` alone": by_step(partial(distillation.teacher_gap, **alone), size=1),
        "`early_teacher_gap` alone": by_step(partial(distillation.early_teacher_gap, **alone, gamma=0.5), size=1),
    }


def in_reward() -> dict[str, Signal]:
    minus_kl = partial(credit.outcome_minus_kl, advantage=advantage.leave_one_out, beta=1.0)
    return {
        "`outcome_minus_kl` of `leave_one_out`": by_step(minus_kl, size=2, paid=0.0),
        "`reward_to_go`": by_step(partial(credit.reward_to_go, beta=1.0), size=1, paid=0.0),
    }


def against(objective: Callable, found: dict[str, Signal]) -> list[Comparison]:
    return [Comparison(name, got, gradient(objective)) for name, got in found.items()]


# -- the table


def measured(got: Tensor, wanted: Tensor) -> tuple[float, float, float]:
    """Scale: the projection on the true gradient, in units of it. Error: the distance from it, likewise. Cosine."""
    along, length = (got * wanted).sum(), wanted.norm()
    return float(along / length**2), float((got - wanted).norm() / length), float(along / (length * got.norm()))


def line(name: str, figures: list[tuple[float, float, float]]) -> str:
    """The means of scale, error and cosine, and the worst error and cosine."""
    scale, error, cosine = zip(*figures, strict=True)
    means = [sum(values) / len(values) for values in (scale, error, cosine)]
    errors = ("0" if x < EXACT else f"{x:.2g}" for x in (means[1], max(error)))
    return f"| {name} | {means[0]:.2f} | {' | '.join(errors)} | {means[2]:.3f} | {min(cosine):.3f} |"


def rows(drift: float, comparisons: list[Comparison]) -> list[str]:
    """A line of the table for each comparison."""
    worlds = World(*map(torch.stack, zip(*(world(seed, drift) for seed in range(POLICIES)), strict=True)))
    return [line(name, [*map(measured, got(worlds), wanted(worlds))]) for name, got, wanted in comparisons]


def table() -> str:
    """Every section as markdown."""
    head = ["", "| | scale | error | worst | cosine | worst |", "|---|---|---|---|---|---|"]
    parts = ([f"**{title}**", *head, *rows(drift, comparisons)] for title, drift, comparisons in sections())
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(table())
