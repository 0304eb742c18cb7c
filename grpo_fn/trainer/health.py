"""Is the run healthy? Rules on the metrics so far, `(history) -> str | None`: what was seen, what it means, what to do.

A history is the run's lines of metrics, oldest first: name to number, a line a step. A step may lack a metric: what
depends on the newest value then says nothing, and windows are over the values that are there. Numbers that are not
finite are the business of `not_finite` alone. A rule never raises on a history.

`RULES` is the table of them: what each measures, and the limit that this is compared with. Limits are rules of thumb.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from operator import ge, gt, le, lt
from statistics import median
from typing import NamedTuple

Line = Mapping[str, float]
History = Sequence[Line]
Rule = Callable[[History], str | None]
Measured = tuple[int | float, str] | None  # the number that is compared with the limit, and what it is, for people
Measure = Callable[[History], Measured]

# What is remembered of a run: its beginning, which some rules compare with, and its newest lines.
FIRST, LAST = 64, 1024
CALM = 10  # lines that a rule has to be silent for before it is news again
LOST_TO = ("timeouts", "worker_crashes", "protocol_errors", "exceptions")
WATCHED = ("reward", "advantage", "loss")  # groups of metrics, by what their names have before "/", of `not_finite`
BEYOND = {gt: "above", ge: "at least", lt: "below", le: "within"}


class HealthFinding(NamedTuple):
    """What a rule says, and its name."""

    rule: str
    text: str


@dataclass(frozen=True)
class LimitRule:
    """A rule that fires when what it measures is beyond a limit."""

    name: str
    limit: int | float
    measure: Measure
    beyond: Callable[[float, float], bool] = gt
    largest: int | float = math.inf  # that the limit can be

    def __call__(self, history: History) -> str | None:
        """What was seen, what it means and what to do; None where the limit is not passed."""
        measured = self.measure(history)
        if measured is None or not self.beyond(measured[0], self.limit):
            return None
        step = newest_value(history, "step")
        at = "" if step is None else f" at step {step:.0f}"
        return f"{measured[1]}{at}, {BEYOND[self.beyond]} {self.limit:g}: {ADVICE[self.name]}"


# -- findings


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


# -- a history, as rules read it


def is_finite_number(value: float | None) -> bool:
    """Whether it is there and a number."""
    return value is not None and math.isfinite(value)


def finite_series(history: History, name: str) -> list[float]:
    """The finite values of a metric, oldest first."""
    return [line[name] for line in history if is_finite_number(line.get(name))]


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


# -- what rules measure


def count_not_finite(history: History) -> Measured:
    """WATCHED metrics that are NaN or infinite; the gradient norm of a step that float16 skipped is none."""
    if not history:
        return None
    before, now = newest_value(history[:-1], "optimizer/overflows"), newest_value(history, "optimizer/overflows")
    skipped = {"loss/grad_norm"} if now is not None and now > (before or 0.0) else set()
    watched = (name for name in history[-1] if name.partition("/")[0] in WATCHED)
    bad = sorted(name for name in watched if not is_finite_number(history[-1][name]) and name not in skipped)
    shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return len(bad), f"{shown} not finite"


def newest(history: History, *, metrics: Sequence[str]) -> Measured:
    """The newest value, of several metrics the largest."""
    values = [
        (value, f"{name} is {value:.3g}") for name in metrics if (value := newest_value(history, name)) is not None
    ]
    return max(values, default=None)


def least(history: History, *, metric: str, steps: int) -> Measured:
    """The smallest of the last values: a limit on it is reached in each of these steps."""
    values = last_values(history, metric, steps)
    return (min(values), f"{metric} was at least {min(values):.2f} for {steps} steps") if values else None


def least_without_signal(history: History, *, steps: int) -> Measured:
    """Groups of equal rewards, and on which side the problems are wrong; where no row has a score others say why."""
    measured = least(history, metric="advantage/zero_variance_groups", steps=steps)
    if measured is None or newest_value(history, "reward/invalid") == 1:
        return None
    solved = newest_value(history, "reward/correct_rate")
    side = "" if solved is None else f" (reward/correct_rate {solved:.2f}: too {'easy' if solved > 0.5 else 'hard'})"
    return measured[0], measured[1] + side


def least_without_score(history: History, *, steps: int) -> Measured:
    """Rows without a score, and what they were lost to."""
    measured = least(history, metric="reward/invalid", steps=steps)
    counts = {kind: newest_value(history, f"reward/{kind}") or 0.0 for kind in LOST_TO}
    lost = ", ".join(f"{kind} {count:.0f}" for kind, count in counts.items() if count)
    return measured and (measured[0], f"{measured[1]} ({lost or 'none was lost: it said None'})")


def overflows_in_a_row(history: History) -> Measured:
    """The newest steps in each of which the counter of overflows rose."""
    values = finite_series(history[-LAST:], "optimizer/overflows")[::-1]
    rises = sum(1 for _ in takewhile(lambda pair: pair[0] > pair[1], pairwise(values)))
    return rises, f"optimizer/overflows rose to {values[0] if values else 0:.0f} in {rises} steps in a row"


def ratio_to_start(history: History, *, metric: str, window: int) -> Measured:
    """The mean of the last window over that of the first one.

    None where that is not above 0: an entropy relative to a teacher begins below, and rises.
    """
    values = finite_series(history, metric)
    if len(values) < 2 * window or (first := stable_mean(values[:window])) <= 0:
        return None
    now = stable_mean(values[-window:])
    return now / first, f"{metric} went from {first:.3g} to {now:.3g}, {now / first:.3g} times as much"


def accuracy_lost(history: History, *, evaluations: int, rise: float) -> Measured:
    """How far held-out accuracy fell from its best of the last evaluations while the reward rose.

    Between that best and the newest evaluation, the mean reward/mean of the second half of the steps lies more than
    `rise` above that of the first half.
    """
    judged = [i for i, line in enumerate(history) if is_finite_number(line.get("eval/accuracy"))][-evaluations:]
    if len(judged) < 2:
        return None
    best, last = max(judged, key=lambda i: (history[i]["eval/accuracy"], i)), judged[-1]
    high, now = history[best]["eval/accuracy"], history[last]["eval/accuracy"]
    rewards = finite_series(history[best + 1 : last + 1], "reward/mean")
    half = len(rewards) // 2
    if not half or stable_mean(rewards[-half:]) - stable_mean(rewards[:half]) <= rise:
        return None
    return high - now, (
        f"eval/accuracy fell from {high:.3f} of step {newest_value(history[: best + 1], 'step') or 0:.0f} to {now:.3f} "
        f"while reward/mean rose from {stable_mean(rewards[:half]):.3g} to {stable_mean(rewards[-half:]):.3g}"
    )


def reward_change(history: History, *, steps: int, solved: float) -> Measured:
    """How far the mean reward differs between the halves of the last steps; None where the problems are solved."""
    values, half = last_values(history, "reward/mean", steps), steps // 2
    if not values:
        return None
    first, second = stable_mean(values[:half]), stable_mean(values[-half:])
    right = finite_series(history[-LAST:], "reward/correct_rate")[-half:]
    if right and stable_mean(right) >= solved:
        return None
    return abs(second - first), f"reward/mean went from {first:.3g} to {second:.3g} in {steps} steps"


def reward_lost(history: History, *, window: int) -> Measured:
    """How far the mean reward of the last window lies below that of the best window before it."""
    values = finite_series(history[-LAST:], "reward/mean")
    if len(values) < 2 * window:
        return None
    means = [stable_mean(values[i : i + window]) for i in range(len(values) - window + 1)]
    best, now = max(means[:-window]), means[-1]
    return best - now, f"reward/mean fell from {best:.3g} to {now:.3g} (means of {window} steps), by {best - now:.3g}"


def distance_from_median(history: History, *, window: int) -> Measured:
    """How far a loss is from the median of the steps before, in distances of the furthest of them."""
    now, before = newest_value(history, "loss/objective"), last_values(history[:-1], "loss/objective", window)
    middle = median(before) if before else 0.0
    spread = max((abs(value - middle) for value in before), default=0.0)
    if now is None or not spread:
        return None
    times = abs(now - middle) / spread
    return times, (
        f"loss/objective is {now:.3g}, {times:.3g} times as far from the median of {window} steps, {middle:.3g}, as "
        "any of them"
    )


# -- the table: name, limit (its unit is that of the metric, docs/monitoring/metrics.md) and what is compared with it


TABLE = (
    LimitRule("not_finite", 1, count_not_finite, ge),
    LimitRule("kl_high", 0.5, partial(newest, metrics=("loss/kl", "loss/kl_start"))),
    LimitRule("grad_norm_high", 10.0, partial(newest, metrics=("loss/grad_norm",))),
    LimitRule("logprob_diff_high", 0.1, partial(newest, metrics=("loss/logprob_diff_mean",))),
    LimitRule("few_groups_with_signal", 0.9, partial(least_without_signal, steps=5), ge, largest=1),
    LimitRule("invalid_high", 0.5, partial(least_without_score, steps=1), ge, largest=1),
    LimitRule("truncated_high", 0.5, partial(least, metric="generation/truncated", steps=5), ge, largest=1),
    LimitRule("overflowing", 5, overflows_in_a_row, ge, largest=FIRST),
    LimitRule("entropy_collapsed", 0.1, partial(ratio_to_start, metric="loss/entropy", window=5), lt, largest=1),
    LimitRule("length_exploded", 3.0, partial(ratio_to_start, metric="generation/length_mean", window=5)),
    LimitRule("reward_without_accuracy", 0.05, partial(accuracy_lost, evaluations=4, rise=0.02), largest=1),
    LimitRule("reward_flat", 0.01, partial(reward_change, steps=50, solved=0.9), le),
    LimitRule("reward_falling", 0.2, partial(reward_lost, window=10)),
    LimitRule(
        "generation_slow", 0.5, partial(ratio_to_start, metric="generation/tokens_per_second", window=5), lt, largest=1
    ),
    LimitRule("loss_spike", 10.0, partial(distance_from_median, window=20)),
)
RULES = {rule.name: rule for rule in TABLE}
ADVICE = {  # what it means, and what to do
    "not_finite": (
        "the step is broken, and what follows from its weights may be. Go back to a checkpoint before it; look for "
        "infinite rewards (combine.combine.parts) and for loss/ratio_max, lower optimizer.adamw.lr, or compute in "
        "sections.Compute.dtype = 'bfloat16' or 'float32'"
    ),
    "kl_high": (
        "the policy has moved far from the reference (loss/kl) or the start model (loss/kl_start), where the reward "
        "may be all that it still gets right. Read samples; lower optimizer.adamw.lr or raise "
        "objective.policy_objective.beta"
    ),
    "grad_norm_high": (
        "a few samples or tokens drive the step. Look at advantage/max and loss/ratio_max: for large advantages raise "
        "step.Algorithm.group_size, for large ratios lower step.Algorithm.epochs or optimizer.adamw.lr; "
        "sections.PolicyUpdate.max_grad_norm bounds the step meanwhile"
    ),
    "logprob_diff_high": (
        "trainer and sampler give the same tokens other log-probs, so the gradient is that of another policy. Check "
        "that the sampler got the weights, and sections.Compute.dtype; or correct for it: step.Algorithm.old_logp = "
        "@step.from_trainer and objective.policy_objective.importance_correction = @corrections.truncated_weight"
    ),
    "few_groups_with_signal": (
        "so many groups have only equal rewards and teach nothing. Choose other problems (sections.Data.task), raise "
        "step.Algorithm.group_size or sections.Sampling.temperature, or sample until there is signal (algo/dapo.gin)"
    ),
    "invalid_high": (
        "so many rows have no reward and teach nothing. log.txt has the first of each kind with its reason: mend the "
        "reward, or raise reward_pool.RewardPool.timeout_per_completion or reward_pool.RewardPool.memory_mb"
    ),
    "truncated_high": (
        "so many answers ran into the limit, most of them before they came to a result, and lose their reward for it. "
        "Raise sections.Sampling.max_new_tokens, or reward shorter answers (docs/algorithms/catalogue.md)"
    ),
    "overflowing": (
        "float16 gradients overflow in every step and no weight moves. If optimizer/loss_scale still falls, lower "
        "sections.PolicyUpdate.initial_scale; if it does not, the learning signal itself is too large: look at "
        "loss/ratio_max and advantage/max, or compute in sections.Compute.dtype = 'bfloat16'"
    ),
    "entropy_collapsed": (
        "samples of a group become alike and there is nothing left to compare. Lower optimizer.adamw.lr, raise the "
        "loss's clip_high or objective.policy_objective.entropy_bonus, or sections.Sampling.temperature"
    ),
    "length_exploded": (
        "unless the reward grew with it, length itself is being rewarded. Compare reward/mean; weigh by tokens or a "
        "constant (objective.policy_objective.loss_aggregation, docs/algorithms/catalogue.md), or add a length part "
        "to combine.combine.parts"
    ),
    "reward_without_accuracy": (
        "what earns reward is no longer what is right, or the training problems are learned by heart. Read samples, "
        "lower that part's weight in combine.combine.weights, raise objective.policy_objective.beta, and take the "
        "best checkpoint (sections.Checkpoints.keep_best)"
    ),
    "reward_flat": (
        "nothing is learned from it any more. If advantage/zero_variance_groups is high, choose other problems "
        "(sections.Data.task) or raise step.Algorithm.group_size; else raise optimizer.adamw.lr, or read samples: the "
        "reward may be one that the policy cannot find (combine.combine.parts)"
    ),
    "reward_falling": (
        "the policy gets worse at what is rewarded. Look at loss/grad_norm, loss/ratio_max, loss/entropy; lower "
        "optimizer.adamw.lr, lower step.Algorithm.epochs, and go back to the best checkpoint "
        "(sections.Checkpoints.keep_best)"
    ),
    "generation_slow": (
        "a few long answers keep the batch waiting (generation/length_max, generation/truncated), or something else "
        "uses the machine. Bound the length (sections.Sampling.max_new_tokens), sample more rows at once "
        "(sections.Sampling.max_rows), and look at system/memory_gb and the profile (sections.Logging.profile_steps)"
    ),
    "loss_spike": (
        "one step is unlike the others. Look at advantage/max, loss/ratio_max and the samples of that step; "
        "sections.PolicyUpdate.max_grad_norm bounds what it moves, a truncated ratio (algo/dapo.gin) what one token "
        "may; lower optimizer.adamw.lr"
    ),
}
