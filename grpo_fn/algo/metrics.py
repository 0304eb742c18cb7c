"""Numbers that merge: a statistic of a whole step is the merge of those of its micro-batches and ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo import objective
from grpo_fn.algo.credit import ScoredStep, first_token
from grpo_fn.algo.losses import capped_exp, ratio
from grpo_fn.core.batch import by_group
from grpo_fn.core.problem import LIMITS, Turn
from grpo_fn.core.types import Batch, Groups, Reward, Rollout, Scores, Undeclared


class Stat(NamedTuple):
    """Count, mean, sum of squared deviations and range of values, in float64: a commutative monoid under `merge`."""

    count: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    m2: Float[Tensor, ""]
    low: Float[Tensor, ""]
    high: Float[Tensor, ""]


def stat(values: Tensor, mask: Bool[Tensor, "..."]) -> Stat:
    """The Stat of the values where `mask`; of no values it is the monoid's identity."""
    chosen = values.detach()[mask].double()
    if not chosen.numel():
        zero = torch.zeros((), dtype=torch.float64, device=values.device)
        return Stat(zero, zero, zero, zero + float("inf"), zero - float("inf"))
    mean = chosen.mean()
    return Stat(mean.new_tensor(chosen.numel()), mean, ((chosen - mean) ** 2).sum(), chosen.min(), chosen.max())


def merge(a: Stat, b: Stat) -> Stat:
    """The Stat of both sets of values together (Chan, Golub and LeVeque 1979, pairwise update)."""
    count = a.count + b.count
    share = b.count / count.clamp(min=1)
    delta = b.mean - a.mean
    return Stat(
        count,
        a.mean + delta * share,
        a.m2 + b.m2 + delta**2 * a.count * share,
        torch.minimum(a.low, b.low),
        torch.maximum(a.high, b.high),
    )


def merge_all(tables: list[dict[str, Stat]]) -> dict[str, Stat]:
    """Merge tables of statistics name by name."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: reduce(merge, (table[name] for table in tables if name in table)) for name in names}


def extent(prefix: str, s: Stat) -> dict[str, float]:
    """Mean, smallest and largest value, as `prefix` + mean, min, max; zeros of no values."""
    low, high = (float(s.low), float(s.high)) if s.count else (0.0, 0.0)
    return {f"{prefix}mean": float(s.mean), f"{prefix}min": low, f"{prefix}max": high}


def extent_and_std(prefix: str, s: Stat) -> dict[str, float]:
    """`extent` and the population standard deviation."""
    return {**extent(prefix, s), f"{prefix}std": float((s.m2 / s.count.clamp(min=1)).sqrt())}


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Lengths in sampled tokens and the share of rows that ran into the limit."""
    length = rollout.mask.sum(-1)
    return {
        "generation/rows": float(len(length)),
        "generation/tokens": float(length.sum()),
        "generation/truncated": float(rollout.truncated.double().mean()),
        **extent("generation/length_", stat(length, torch.ones_like(rollout.truncated))),
        **(episode_metrics(rollout.turns) if rollout.turns else {}),
    }


def episode_metrics(episodes: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Turns of an episode and tokens of a turn; tool calls, malformed ones and failures; the share of each limit.

    Calls and errors are counted, an episode; limits are shares of all episodes.
    """
    rows, turns = len(episodes), [turn for episode in episodes for turn in episode]
    limits = Counter(turn.limit for turn in turns)
    return {
        "episode/turns_mean": len(turns) / rows,
        "episode/turns_max": float(max(map(len, episodes))),
        "episode/tokens_per_turn": sum(turn.length for turn in turns) / len(turns),
        "episode/tool_calls": sum(turn.calls for turn in turns) / rows,
        "episode/tool_errors": sum(turn.error != "" for turn in turns) / rows,
        **{f"episode/truncated_{limit}": limits[limit] / rows for limit in LIMITS},
    }


def reward_metrics(reward: Reward) -> dict[str, float]:
    """Spread of the total over valid samples, mean of each part, share fully correct, share that could not be scored.

    The first part is the verdict: a sample is correct when that part is 1.
    """
    parts = {f"reward/{name}": float(stat(value, reward.valid).mean) for name, value in reward.parts.items()}
    verdict = next(iter(reward.parts.values()))
    return {
        **extent_and_std("reward/", stat(reward.value, reward.valid)),
        "reward/correct_rate": float(stat((verdict >= 1.0).double(), reward.valid).mean),
        "reward/invalid": float((~reward.valid).double().mean()),
        **parts,
    }


def of_advantage(adv: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"]) -> dict[str, float]:
    """Spread over valid samples and the share of groups without signal (every advantage zero)."""
    silent = float((adv == 0).all(-1).double().mean())
    return {**extent_and_std("advantage/", stat(adv, valid)), "advantage/zero_variance_groups": silent}


def teacher_metrics(
    gap: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], sampled: Bool[Tensor, "B T"]
) -> dict[str, float]:
    """The teacher's distance from the sampling policy before an update; gap = log pi_teacher - log pi_old.

    `teacher/reverse_kl`, the mean of -gap, in nats: the estimate of KL(pi_old || pi_teacher) a token that distillation
    lowers; `teacher/gap_abs`, the mean of |gap|; `teacher/gap_min`, that of the token it likes least;
    `teacher/rows_taught`, the share of all rows in which it disagrees with the policy about some token.
    """
    gaps = stat(gap, mask)
    apart = (sampled & (gap != 0)).any(-1)
    return {
        "teacher/reverse_kl": -float(gaps.mean),
        "teacher/gap_abs": float(stat(gap.abs(), mask).mean),
        "teacher/gap_min": extent("", gaps)["min"],
        "teacher/rows_taught": float(stat(apart.to(gap.dtype), sampled.any(-1)).mean),
    }


def of_learning(stats: Mapping[str, Stat], *, reference: bool) -> dict[str, float]:
    """Per-token diagnostics of the objective, over every micro-batch and epoch of a step.

    Without a reference "kl" is one to pi_old, `loss/approx_kl`.
    """
    return {
        "loss/kl" if reference else "loss/approx_kl": float(stats["kl"].mean),
        **{f"loss/{name}": float(stats[name].mean) for name in ("entropy", "clip_low", "clip_high")},
        **extent("loss/ratio_", stats["ratio"]),
        "loss/ratio_capped": float(stats["ratio_capped"].mean),
        "loss/correction_mean": float(stats["correction"].mean),
        "loss/importance_masked_frac": float(stats["importance_masked"].mean),
    }


def of_supervised(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Figures of the given tokens that were learned from, over every micro-batch and epoch of a step: `sft/` of
    demonstrations, with what a token weighs, `observation/` of what environments wrote; nothing of a step without any.
    """
    figures = likelihood("observation/", stats["observation_nll"]) if "observation_nll" in stats else {}
    if "nll" not in stats:
        return figures
    return {**figures, **likelihood("sft/", stats["nll"]), "sft/weight_mean": float(stats["token_weight"].mean)}


def likelihood(prefix: str, nll: Stat) -> dict[str, float]:
    """Likelihood of given tokens: `loss`, the mean of -log p, in nats; `perplexity`, its exponential; `tokens`."""
    figures = {"loss": float(nll.mean), "perplexity": float(nll.mean.exp()), "tokens": float(nll.count)}
    return {f"{prefix}{name}": value for name, value in figures.items()}


def mismatch(x: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]) -> dict[str, Stat]:
    """Statistics of x = logp - logp_sampled, trainer against sampler, in nats, over the sampled tokens: |x|, k3, ratio.

    With w = exp(x) and tokens drawn from the sampler, w - 1 - x estimates KL(sampler || trainer) without bias.
    """
    x = x.detach().double()
    log_w = capped_exp(x)
    return {
        "logprob_diff": stat(x.abs(), mask),
        "mismatch_kl": stat(torch.expm1(log_w) - log_w, mask),
        "mismatch_ratio": stat(log_w.exp(), mask),
    }


def of_mismatch(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Trainer against sampler, before a step's first update, from what `mismatch` gathered; nothing of no tokens."""
    gap = stats.get("logprob_diff")
    if gap is None or not gap.count:
        return {}
    return {
        "loss/logprob_diff_mean": float(gap.mean),
        "loss/logprob_diff_max": float(gap.high),
        "loss/mismatch_kl": float(stats["mismatch_kl"].mean),
        "loss/mismatch_ess": effective(stats["mismatch_ratio"]),
    }


def effective(w: Stat) -> float:
    """(sum w)^2 / (N sum w^2), the effective sample size of N weights as a share of N: 1 when all are equal.

    mean^2 / (mean^2 + variance), so it is the same whatever micro-batches the Stat was merged from. 0 of weights that
    are all 0. Kish 1965; Kong 1992 for importance weights.
    """
    square = w.mean**2
    total = square + w.m2 / w.count.clamp(min=1)
    return float(square / total) if total else 0.0


class UpdateResult(NamedTuple):
    """One optimizer step: the objective's value, per-token statistics, what the optimizer did."""

    objective: float
    stats: dict[str, Stat]
    mismatch: dict[str, Stat]  # this update's log-probs against the sampler's
    ratio: Float[Tensor, "N"]  # of the sampled tokens
    update: dict[str, float]
    batch: Batch  # with the log-probs that it was compared with
    micro_batches: int  # whose gradients were added up


def of_tokens(scores: Scores, batch: Batch, diagnostics: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "B T"]]:
    """Per-token figures of sampled rows, [B, T] each: what the loss says of itself, and what can be said without it.

    "ratio" (to pi_old), "clip_low" and "clip_high" (0) and "correction" (1), unless the diagnostics have them; "kl", k3
    in nats, to the reference, or to pi_old in a run without one; "entropy" in nats.
    """
    ref = batch.logp_old if isinstance(batch.logp_ref, Undeclared) else batch.logp_ref
    kls = vmap(objective.k3)(scores.logp, batch._replace(logp_ref=ref))
    defaults = {} if "ratio" in diagnostics else {"ratio": vmap(ratio)(scores.logp, batch.logp_old, batch.mask)}
    for name, value in (("clip_low", 0.0), ("clip_high", 0.0), ("correction", 1.0)):
        if name not in diagnostics:
            defaults[name] = torch.full_like(scores.logp, value)
    figures = {**defaults, **diagnostics, "kl": kls, "entropy": scores.entropy}
    return {name: value.detach() for name, value in figures.items()}


def diagnose(micro: Batch, tokens: dict[str, Tensor]) -> dict[str, Stat]:
    """Statistics of the objective's per-token diagnostics over the tokens that learn; given ones have no ratio.

    A ratio is "capped" where it is the largest that `capped_exp` lets through: there the loss is a constant to the
    gradient, however large it is.
    """
    if "ratio" not in tokens:
        return {name: stat(x, micro.mask) for name, x in tokens.items()}
    largest = capped_exp(torch.full_like(tokens["ratio"], torch.inf)).exp()
    more = {
        "importance_masked": (tokens["correction"] == 0).double(),
        "ratio_capped": (tokens["ratio"] >= largest).double(),
    }
    return {name: stat(x, micro.mask) for name, x in {**tokens, **more}.items()}


def mismatch_before_update(batch: Batch, learned: list[UpdateResult]) -> dict[str, Stat]:
    """The trainer's distance from the sampler before the first update, by the statistics of `mismatch`.

    Over every token of the step where logp_old is the trainer's own. Where it is the sampler's, no other log-prob is
    known before the first update than the first update's: then over the tokens of that minibatch.
    """
    if bool((batch.logp_old == batch.logp_sampled)[batch.mask].all()):
        return learned[0].mismatch
    return mismatch(batch.logp_old - batch.logp_sampled, batch.mask)


def start_kl(batch: Batch, logp_start: Float[Tensor, "B T"]) -> dict[str, float]:
    """The mean k3 of a step's tokens, before its updates: the KL to the model that the run started with, in nats."""
    estimates = vmap(objective.k3)(batch.logp_old, batch._replace(logp_ref=logp_start))[batch.mask]
    return {"loss/kl_start": float(estimates.mean())} if len(estimates) else {}


def summarise_updates(batch: Batch, learned: list[UpdateResult], *, reference: bool) -> dict[str, float]:
    """Metrics of a step's updates: statistics merged, the optimizer's own figures from the last."""
    counts = {"system/micro_batches": float(sum(step.micro_batches for step in learned))}
    if not learned:  # a refused step
        return {"loss/objective": 0.0, **counts}
    stats = merge_all([step.stats for step in learned])
    sampled = "ratio" in stats  # not where every sample was unscorable, or tokens are given ones
    return {
        "loss/objective": sum(step.objective for step in learned) / len(learned),
        **counts,
        **(of_learning(stats, reference=reference) if sampled else {}),
        **(of_mismatch(mismatch_before_update(batch, learned)) if sampled else {}),
        **of_supervised(stats),
        **learned[-1].update,
    }


def sample_advantages(adv: Float[Tensor, "P G T"], groups: Groups) -> Float[Tensor, "P G"]:
    """Each sample's advantage, which is that of its first sampled token, [P, G]."""
    return first_token(adv, by_group(groups.rollout.mask, len(adv)))


def step_metrics(
    batch: Batch,
    adv: Float[Tensor, "P G T"],
    groups: Groups,
    fresh: Groups,
    learned: list[UpdateResult],
    scored: ScoredStep,
) -> dict[str, float]:
    """All metrics of a GRPO step by name."""
    taught = scored.results.get("logp_teacher")
    teacher = {} if taught is None else teacher_metrics(taught - batch.logp_old, batch.mask, groups.rollout.mask)
    return {
        **scored.figures,
        **rollout_metrics(fresh.rollout),
        **reward_metrics(fresh.reward),
        **of_advantage(sample_advantages(adv, groups), groups.reward.valid),
        **teacher,
        "train/skipped_step": float(not learned),
        "loss/kl_coef_multiplier": scored.gains.kl,
        "loss/entropy_coef_multiplier": scored.gains.entropy,
        **summarise_updates(batch, learned, reference="logp_ref" in scored.needs),
    }
