"""Is the run healthy? Rules on the metrics so far, `(history) -> str | None`: what was seen, what it means, what to do.

A history is the run's lines of metrics, oldest first: name to number, a line a step (README, "Reading the metrics").
A step may lack a metric: a rule on the newest value is then silent, and windows are over the values that are
there. Numbers that are not finite are the business of `not_finite` alone. A rule never raises on a history.

`RULES` is the table of them. Their limits are rules of thumb, not laws.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

Line = Mapping[str, float]
History = Sequence[Line]
Rule = Callable[[History], str | None]

# What is remembered of a run: its beginning, which some rules compare with, and its newest lines.
FIRST, LAST = 64, 1024

# A rule has to be silent for so many lines before it is news again.
CALM = 10

LOST_TO = ("timeouts", "worker_crashes", "protocol_errors", "exceptions")
WATCHED = ("reward", "advantage", "loss")  # groups of metrics, by what their names have before "/", of `not_finite`


class HealthFinding(NamedTuple):
    """The text of a rule, and its name."""

    rule: str
    text: str


@dataclass(frozen=True)
class LimitRule:
    """A rule that fires beyond a limit."""

    name: str
    limit: int | float
    evidence: Callable[[History, int | float], str | None]  # (history, limit) -> what is seen beyond the limit
    advice: str  # what it means, and what to do
    largest: int | float = math.inf  # limit that the rule can have

    def __call__(self, history: History) -> str | None:
        """What was seen, what it means and what to do; None where the limit is not passed."""
        seen = self.evidence(history, self.limit)
        return None if seen is None else f"{seen}: {self.advice}"


# What becomes of findings ---------------------------------------------------------------------------------------------


def history_line(step: int, figures: Mapping[str, float | None]) -> dict[str, float]:
    """A line as rules see it, the same from memory and from metrics.jsonl, where what is not finite is null."""
    numbers = {name: float(value) if is_finite_number(value) else math.nan for name, value in figures.items()}
    return {**numbers, "step": float(step)}


def trim_history(history: History) -> list[Line]:
    """The first and the last lines, which rules look at.

    `trim_history([*trim_history(old), *new])` is `trim_history([*old, *new])`: a resumed run remembers the same.
    """
    return list(history) if len(history) <= FIRST + LAST else [*history[:FIRST], *history[-LAST:]]


def new_findings(rules: Sequence[Rule], history: History) -> list[HealthFinding]:
    """What the rules find now and found at none of the last CALM lines before: no finding is repeated while it lasts.

    A function of the history alone: a run that resumes finds what it would have found.
    """
    past = [history[: len(history) - k] for k in range(1, min(CALM, len(history)) + 1)]
    findings = [(rule, rule(history)) for rule in rules]
    return [
        HealthFinding(rule_name(rule), text)
        for rule, text in findings
        if text is not None and all(rule(before) is None for before in past)
    ]


def rules_with_limits(chosen: Sequence[str | Rule], limits: Mapping[str, int | float]) -> list[Rule]:
    """The rules of these names, with other limits where `limits` has one, and functions as they are.

    A function is called with no history at all, so that knobs that cannot work raise ValueError before the run begins.
    """
    rules: list[Rule] = []
    for rule in chosen:
        if isinstance(rule, str):
            if rule not in RULES:
                raise ValueError(f"sections.Health: got the rule {rule!r}, expected one of {', '.join(RULES)}")
            rules.append(replace(RULES[rule], limit=limits.get(rule, RULES[rule].limit)))
            continue
        try:
            rule(())
        except ValueError as error:
            raise ValueError(f"{rule_name(rule)}: {error}") from error
        rules.append(rule)
    return rules


def check_rule_limits(limits: Mapping[str, object]) -> None:
    """Raise ValueError for a limit of no rule, and for one that cannot work."""
    for name, limit in limits.items():
        if name not in RULES:
            raise ValueError(f"sections.Health.limits: got the rule {name!r}, expected one of {', '.join(RULES)}")
        most = RULES[name].largest
        if not isinstance(limit, int | float) or not 0 < limit < math.inf or limit > most:
            bound = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"sections.Health.limits: got {limit!r} for {name}, expected a number above 0{bound}")


def rule_name(rule: Rule) -> str:
    """The name of a rule of the table, or of the function without its knobs."""
    if isinstance(rule, LimitRule):
        return rule.name
    return rule_name(rule.func) if isinstance(rule, partial) else getattr(rule, "__name__", type(rule).__name__)


# A history, as rules read it ------------------------------------------------------------------------------------------


def is_finite_number(value: float | None) -> bool:
    """Whether it is there and a number."""
    return value is not None and math.isfinite(value)


def finite_series(history: History, name: str) -> list[float]:
    """The finite values of a metric, oldest first."""
    return [one[name] for one in history if is_finite_number(one.get(name))]


def newest_value(history: History, name: str) -> float | None:
    """The metric of the newest line; None when that line lacks it, or it is not finite."""
    value = history[-1].get(name) if history else None
    return value if is_finite_number(value) else None


def last_values(history: History, name: str, count: int) -> list[float]:
    """The last `count` values; none when there are fewer."""
    values = finite_series(history[-LAST:], name)[-count:]
    return values if len(values) == count else []


def stable_mean(values: Sequence[float]) -> float:
    """The mean; values that only differ in rounding do not move it out of their range."""
    return min(max(values), max(min(values), math.fsum(value / len(values) for value in values)))


def at(history: History) -> str:
    """The step of the newest line, ready to follow a number."""
    step = newest_value(history, "step")
    return "" if step is None else f" at step {step:.0f}"


# What rules see -------------------------------------------------------------------------------------------------------


def value_above(history: History, limit: int | float, *, metrics: Sequence[str]) -> str | None:
    """The first of the metrics whose newest value is above the limit."""
    for name in metrics:
        value = newest_value(history, name)
        if value is not None and value > limit:
            return f"{name} is {value:.3g}{at(history)}, above {limit:g}"
    return None


def values_not_finite(history: History, limit: int | float) -> str | None:
    """At least so many WATCHED metrics that are NaN or infinite; the norm of a step that float16 skipped is none."""
    if not history:
        return None
    before, now = newest_value(history[:-1], "optimizer/overflows"), newest_value(history, "optimizer/overflows")
    skipped = {"loss/grad_norm"} if now is not None and now > (before or 0.0) else set()
    watched = (name for name in history[-1] if name.partition("/")[0] in WATCHED)
    bad = sorted(name for name in watched if not is_finite_number(history[-1][name]) and name not in skipped)
    shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return f"{shown} not finite{at(history)}" if len(bad) >= limit else None


def share_reached(history: History, limit: int | float, *, metric: str, steps: int) -> str | None:
    """A metric that has been the limit or more in each of the last steps."""
    values = last_values(history, metric, steps)
    reached = bool(values) and min(values) >= limit
    return f"{metric} was at least {min(values):.2f} for {steps} steps{at(history)}" if reached else None


def signal_missing(history: History, limit: int | float, *, steps: int) -> str | None:
    """Groups of equal rewards, and on which side the problems are wrong; None where no row has a score."""
    seen = share_reached(history, limit, metric="advantage/zero_variance_groups", steps=steps)
    if seen is None or newest_value(history, "reward/invalid") == 1:
        return None
    solved = newest_value(history, "reward/correct_rate")
    side = "" if solved is None else f" (reward/correct_rate {solved:.2f}: too {'easy' if solved > 0.5 else 'hard'})"
    return seen + side


def scores_missing(history: History, limit: int | float, *, steps: int) -> str | None:
    """Rows without a score, and what they were lost to."""
    seen = share_reached(history, limit, metric="reward/invalid", steps=steps)
    counts = {kind: newest_value(history, f"reward/{kind}") or 0.0 for kind in LOST_TO}
    lost = ", ".join(f"{kind} {count:.0f}" for kind, count in counts.items() if count)
    return seen and f"{seen} ({lost or 'none was lost: it said None'})"


def overflows_in_a_row(history: History, limit: int | float) -> str | None:
    """A counter of overflows that rose in so many steps in a row."""
    values = finite_series(history[-LAST:], "optimizer/overflows")[-int(limit) - 1 :]
    if len(values) <= limit or any(after <= before for before, after in pairwise(values)):
        return None
    return f"optimizer/overflows rose from {values[0]:.0f} to {values[-1]:.0f} in {limit:.0f} steps{at(history)}"


def mean_moved(history: History, limit: int | float, *, metric: str, window: int, up: bool) -> str | None:
    """A metric whose mean over the last window is more, or less, than so many times that over the first window.

    It is not less where that mean is below 0, as an entropy relative to a teacher is, which rises.
    """
    values = finite_series(history, metric)
    if len(values) < 2 * window:
        return None
    first, now = stable_mean(values[:window]), stable_mean(values[-window:])
    means = f"from {first:.3g} to {now:.3g}{at(history)}"
    if up:
        return f"{metric} grew {means}, more than {limit:g} times" if now > limit * first else None
    return f"{metric} fell {means}, below {limit:g} of its start" if first >= 0 and now < limit * first else None


def accuracy_fell(history: History, limit: int | float, *, evaluations: int, rise: float) -> str | None:
    """Held-out accuracy that fell from its best of the last evaluations while the reward rose.

    Between that best and the newest evaluation, the mean reward/mean of the second half of the steps lies more than
    `rise` above that of the first half.
    """
    judged = [i for i, one in enumerate(history) if is_finite_number(one.get("eval/accuracy"))][-evaluations:]
    if len(judged) < 2:
        return None
    best = max(judged, key=lambda i: (history[i]["eval/accuracy"], i))
    high, now = history[best]["eval/accuracy"], history[judged[-1]]["eval/accuracy"]
    rewards = finite_series(history[best + 1 : judged[-1] + 1], "reward/mean")
    half = len(rewards) // 2
    if not half or high - now <= limit or stable_mean(rewards[-half:]) - stable_mean(rewards[:half]) <= rise:
        return None
    return (
        f"eval/accuracy fell from {high:.3f}{at(history[: best + 1])} to {now:.3f}{at(history[: judged[-1] + 1])} "
        f"while reward/mean rose from {stable_mean(rewards[:half]):.3g} to {stable_mean(rewards[-half:]):.3g}"
    )


def reward_standing(history: History, limit: int | float, *, steps: int, solved: float) -> str | None:
    """A mean reward that differs by the limit at most between the halves of the last steps, and is not solved yet."""
    values, half = last_values(history, "reward/mean", steps), steps // 2
    if not values:
        return None
    first, second = stable_mean(values[:half]), stable_mean(values[-half:])
    right = finite_series(history[-LAST:], "reward/correct_rate")[-half:]
    if abs(second - first) > limit or (right and stable_mean(right) >= solved):
        return None
    return f"reward/mean went from {first:.3g} to {second:.3g} in {steps} steps{at(history)}, within {limit:g}"


def reward_below_best(history: History, limit: int | float, *, window: int) -> str | None:
    """A mean reward of the last window that is more than the limit below the best window before it."""
    values = finite_series(history[-LAST:], "reward/mean")
    if len(values) < 2 * window:
        return None
    means = [stable_mean(values[i : i + window]) for i in range(len(values) - window + 1)]
    best, now = max(means[:-window]), means[-1]
    means = f"from {best:.3g} to {now:.3g}{at(history)} (means of {window} steps)"
    return f"reward/mean fell {means}, by more than {limit:g}" if best - now > limit else None


def far_from_median(history: History, limit: int | float, *, window: int) -> str | None:
    """A loss further from the median of the steps before than so many times the furthest of them."""
    now, before = newest_value(history, "loss/objective"), last_values(history[:-1], "loss/objective", window)
    if now is None or not before:
        return None
    middle = median(before)
    spread = max(abs(value - middle) for value in before)
    if not spread or not abs(now - middle) > limit * spread:
        return None
    return (
        f"loss/objective is {now:.3g}{at(history)}, {abs(now - middle) / spread:.3g} times as far from the median of "
        f"{window} steps, {middle:.3g}, as any of them"
    )


# The table ------------------------------------------------------------------------------------------------------------


TABLE = (
    LimitRule(
        "not_finite",  # metrics
        1,
        values_not_finite,
        "the step is broken, and what follows from its weights may be. Go back to a checkpoint before it; look for "
        "infinite rewards (combine.combine.parts) and for loss/ratio_max, lower optimizer.adamw.lr, or compute in "
        "sections.Compute.dtype = 'bfloat16' or 'float32'",
    ),
    LimitRule(
        "kl_high",  # nats a token
        0.5,
        partial(value_above, metrics=("loss/kl", "loss/kl_start")),
        "the policy has moved far from the reference (loss/kl) or the start model (loss/kl_start), where the reward "
        "may be all that it still gets right. Read samples; lower optimizer.adamw.lr or raise "
        "objective.policy_objective.beta",
    ),
    LimitRule(
        "grad_norm_high",  # before clipping
        10.0,
        partial(value_above, metrics=("loss/grad_norm",)),
        "a few samples or tokens drive the step. Look at advantage/max and loss/ratio_max: for large advantages raise "
        "step.Algorithm.group_size, for large ratios lower step.Algorithm.epochs or optimizer.adamw.lr; "
        "sections.PolicyUpdate.max_grad_norm bounds the step meanwhile",
    ),
    LimitRule(
        "logprob_diff_high",  # mean |logp - logp_sampled|, nats a token
        0.1,
        partial(value_above, metrics=("loss/logprob_diff_mean",)),
        "trainer and sampler give the same tokens other log-probs, so the gradient is that of another policy. Check "
        "that the sampler got the weights, and sections.Compute.dtype; or correct for it: step.Algorithm.old_logp = "
        "@step.from_trainer and objective.policy_objective.importance_correction = @corrections.truncated_weight",
    ),
    LimitRule(
        "few_groups_with_signal",  # share of the groups
        0.9,
        partial(signal_missing, steps=5),
        "so many groups have only equal rewards and teach nothing. Choose other problems (sections.Data.task), raise "
        "step.Algorithm.group_size or sections.Sampling.temperature, or sample until there is signal (algo/dapo.gin)",
        largest=1.0,
    ),
    LimitRule(
        "invalid_high",  # share of the rows
        0.5,
        partial(scores_missing, steps=1),
        "so many rows have no reward and teach nothing. log.txt has the first of each kind with its reason: mend the "
        "reward, or raise reward_pool.RewardPool.timeout_per_completion or reward_pool.RewardPool.memory_mb",
        largest=1.0,
    ),
    LimitRule(
        "truncated_high",  # share of the rows
        0.5,
        partial(share_reached, metric="generation/truncated", steps=5),
        "so many answers ran into the limit, most of them before they came to a result, and lose their reward for it. "
        "Raise sections.Sampling.max_new_tokens, or reward shorter answers (docs/algorithms/catalogue.md)",
        largest=1.0,
    ),
    LimitRule(
        "overflowing",  # steps in a row
        5,
        overflows_in_a_row,
        "float16 gradients overflow in every step and no weight moves. If optimizer/loss_scale still falls, lower "
        "sections.PolicyUpdate.initial_scale; if it does not, the learning signal itself is too large: look at "
        "loss/ratio_max and advantage/max, or compute in sections.Compute.dtype = 'bfloat16'",
        largest=FIRST,
    ),
    LimitRule(
        "entropy_collapsed",  # share of the entropy at the beginning
        0.1,
        partial(mean_moved, metric="loss/entropy", window=5, up=False),
        "samples of a group become alike and there is nothing left to compare. Lower optimizer.adamw.lr, raise the "
        "loss's clip_high or objective.policy_objective.entropy_bonus, or sections.Sampling.temperature",
        largest=1.0,
    ),
    LimitRule(
        "length_exploded",  # times the length at the beginning
        3.0,
        partial(mean_moved, metric="generation/length_mean", window=5, up=True),
        "unless the reward grew with it, length itself is being rewarded. Compare reward/mean; weigh by tokens or a "
        "constant (objective.policy_objective.loss_aggregation, docs/algorithms/catalogue.md), or add a length part to "
        "combine.combine.parts",
    ),
    LimitRule(
        "reward_without_accuracy",  # of the accuracy
        0.05,
        partial(accuracy_fell, evaluations=4, rise=0.02),
        "what earns reward is no longer what is right, or the training problems are learned by heart. Read samples, "
        "lower that part's weight in combine.combine.weights, raise objective.policy_objective.beta, and take the best "
        "checkpoint (sections.Checkpoints.keep_best)",
        largest=1.0,
    ),
    LimitRule(
        "reward_flat",  # units of the reward
        0.01,
        partial(reward_standing, steps=50, solved=0.9),
        "nothing is learned from it any more. If advantage/zero_variance_groups is high, choose other problems "
        "(sections.Data.task) or raise step.Algorithm.group_size; else raise optimizer.adamw.lr, or read samples: the "
        "reward may be one that the policy cannot find (combine.combine.parts)",
    ),
    LimitRule(
        "reward_falling",  # units of the reward
        0.2,
        partial(reward_below_best, window=10),
        "the policy gets worse at what is rewarded. Look at loss/grad_norm, loss/ratio_max, loss/entropy; lower "
        "optimizer.adamw.lr, lower step.Algorithm.epochs, and go back to the best checkpoint "
        "(sections.Checkpoints.keep_best)",
    ),
    LimitRule(
        "generation_slow",  # share of the rate at the beginning
        0.5,
        partial(mean_moved, metric="generation/tokens_per_second", window=5, up=False),
        "a few long answers keep the batch waiting (generation/length_max, generation/truncated), or something else "
        "uses the machine. Bound the length (sections.Sampling.max_new_tokens), sample more rows at once "
        "(sections.Sampling.max_rows), and look at system/memory_gb and the profile (sections.Logging.profile_steps)",
        largest=1.0,
    ),
    LimitRule(
        "loss_spike",  # times the furthest of the steps before
        10.0,
        partial(far_from_median, window=20),
        "one step is unlike the others. Look at advantage/max, loss/ratio_max and the samples of that step; "
        "sections.PolicyUpdate.max_grad_norm bounds what it moves, a truncated ratio (algo/dapo.gin) what one token "
        "may; lower optimizer.adamw.lr",
    ),
)
RULES = {rule.name: rule for rule in TABLE}
