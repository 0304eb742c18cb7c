"""Is the run healthy? Rules on the metrics so far: `(history, *, knobs) -> str | None`, what was seen, meant and to do.

A history is the run's lines of metrics, oldest first: name to number, a line a step (README, "Reading the metrics").
A step may lack a metric: what depends on the newest value then says nothing, and windows are over the values that are
there. Numbers that are not finite are the business of `not_finite` alone. A rule raises ValueError for knobs that
cannot work, on any history; on knobs that can it never raises.

The limits in gin/health.gin are rules of thumb, not laws.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

Line = Mapping[str, float]
History = Sequence[Line]
Rule = Callable[[History], str | None]

# What is remembered of a run: its beginning, which some rules compare with, and its newest lines.
FIRST, LAST = 64, 1024

# A rule has to hold its peace for so many lines before it is news again.
CALM = 10

LOST_TO = ("timeouts", "worker_crashes", "protocol_errors", "exceptions")
SLOWER = "lower optimizer.adamw.lr"


class HealthFinding(NamedTuple):
    """What a rule says, and its name."""

    rule: str
    text: str


# What becomes of findings ---------------------------------------------------------------------------------------------


def history_line(step: int, figures: Mapping[str, float | None]) -> dict[str, float]:
    """A line as rules see it, the same from memory and from metrics.jsonl, where what is not finite is null."""
    found = {name: float(value) if is_finite_number(value) else math.nan for name, value in figures.items()}
    return {**found, "step": float(step)}


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


def check_rules(rules: Sequence[Rule]) -> None:
    """Ask every rule about no history at all: knobs that cannot work raise ValueError, with the rule's name."""
    for rule in rules:
        try:
            rule(())
        except ValueError as error:
            raise ValueError(f"{rule_name(rule)}: {error}") from error


def rule_name(rule: Rule) -> str:
    """The name of the function, without its knobs."""
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


def last(history: History, name: str, count: int) -> list[float]:
    """The last `count` values; none when there are fewer. Raises ValueError unless 1 <= count <= FIRST."""
    check_window("steps", count)
    values = finite_series(history[-LAST:], name)[-count:]
    return values if len(values) == count else []


def means_at_ends(history: History, name: str, window: int) -> tuple[float, float] | None:
    """Means of the first and the last `window` values; None while they would overlap."""
    check_window("window", window)
    values = finite_series(history, name)
    return (stable_mean(values[:window]), stable_mean(values[-window:])) if len(values) >= 2 * window else None


def stable_mean(values: Sequence[float]) -> float:
    """The mean; values that only differ in rounding do not move it out of their range."""
    return min(max(values), max(min(values), math.fsum(value / len(values) for value in values)))


def at(history: History) -> str:
    """The step of the newest line, ready to follow a number."""
    step = newest_value(history, "step")
    return "" if step is None else f" at step {step:.0f}"


def check_above_zero(name: str, value: float) -> None:
    """Raise ValueError unless the knob is a number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value}, wanted a number above 0")


def check_share(value: float) -> None:
    """Raise ValueError unless the knob is a share above 0."""
    if not 0 < value <= 1:
        raise ValueError(f"share: got {value}, wanted more than 0 and at most 1")


def check_window(name: str, value: int) -> None:
    """Raise ValueError unless the knob counts lines that are remembered."""
    if not 1 <= value <= FIRST:
        raise ValueError(f"{name}: got {value}, wanted 1 to {FIRST}: no more of a run's beginning is remembered")


# The newest line ------------------------------------------------------------------------------------------------------


def kl_high(history: History, *, limit: float) -> str | None:
    """loss/kl, or without a reference loss/kl_start, > limit.

    Args:
        history: the run's lines of metrics, oldest first.
        limit: largest mean KL to the reference or to the start model, in nats a token.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_above_zero("limit", limit)
    for start, origin in (("", "the reference"), ("_start", "the start model")):
        value = newest_value(history, f"loss/kl{start}")
        if value is not None and value > limit:
            return (
                f"loss/kl{start} is {value:.3g}{at(history)}, above {limit:g}: the policy has moved far from {origin}, "
                "where the reward may be all that it still gets right. Read samples; lower optimizer.adamw.lr or raise "
                "objective.policy_objective.beta"
            )
    return None


def grad_norm_high(history: History, *, limit: float) -> str | None:
    """loss/grad_norm > limit, before clipping.

    Args:
        history: the run's lines of metrics, oldest first.
        limit: largest gradient norm.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_above_zero("limit", limit)
    value = newest_value(history, "loss/grad_norm")
    if value is None or value <= limit:
        return None
    return (
        f"loss/grad_norm is {value:.3g}{at(history)}, above {limit:g}: a few samples or tokens drive the step. Look at "
        "advantage/max and loss/ratio_max: for large advantages raise step.Algorithm.group_size, for large ratios "
        "lower step.Algorithm.epochs or optimizer.adamw.lr; sections.PolicyUpdate.max_grad_norm bounds the step "
        "meanwhile"
    )


def logprob_diff_high(history: History, *, limit: float) -> str | None:
    """loss/logprob_diff_mean > limit: trainer and sampler disagree about the tokens that were sampled.

    Args:
        history: the run's lines of metrics, oldest first.
        limit: largest mean |logp - logp_sampled|, in nats a token.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_above_zero("limit", limit)
    value = newest_value(history, "loss/logprob_diff_mean")
    if value is None or value <= limit:
        return None
    return (
        f"loss/logprob_diff_mean is {value:.3g}{at(history)}, above {limit:g}: trainer and sampler give the same "
        "tokens other log-probs, so the gradient is that of another policy. Check that the sampler got the weights, "
        "and sections.Compute.dtype; or correct for it: step.Algorithm.old_logp = @step.from_trainer and "
        "objective.policy_objective.importance_correction = @importance.truncated_weight"
    )


def not_finite(history: History, *, groups: Sequence[str]) -> str | None:
    """A metric of these groups that is NaN or infinite.

    The gradient norm of a step that float16 skipped because it overflowed is none: `overflowing` counts those.

    Args:
        history: the run's lines of metrics, oldest first.
        groups: beginnings of metric names before "/", such as "loss" and "reward".

    Returns:
        What was seen and what to do about it; None where the rule is not met.

    Raises:
        ValueError: groups is empty, or a string.
    """
    if not groups or isinstance(groups, str):
        raise ValueError(f"groups: got {groups!r}, wanted a list such as ['loss', 'reward']")
    if not history:
        return None
    before, now = newest_value(history[:-1], "optimizer/overflows"), newest_value(history, "optimizer/overflows")
    skipped = now is not None and now > (before or 0.0)
    bad = sorted(
        name
        for name, value in history[-1].items()
        if name.partition("/")[0] in groups
        and not is_finite_number(value)
        and not (name == "loss/grad_norm" and skipped)
    )
    if not bad:
        return None
    shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    return (
        f"{shown} not finite{at(history)}: the step is broken, and what follows from its weights may be. Go back to a "
        f"checkpoint before it; look for infinite rewards (combine.combine.parts) and for loss/ratio_max, {SLOWER}, or "
        "compute in sections.Compute.dtype = 'bfloat16' or 'float32'"
    )


# Several steps in a row -----------------------------------------------------------------------------------------------


def few_groups_with_signal(history: History, *, share: float, steps: int) -> str | None:
    """advantage/zero_variance_groups >= share in each of the last `steps` steps.

    Args:
        history: the run's lines of metrics, oldest first.
        share: fraction of the groups from which the rule is met, above 0 to 1.
        steps: steps in a row, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_share(share)
    values = last(history, "advantage/zero_variance_groups", steps)
    if not values or min(values) < share or newest_value(history, "reward/invalid") == 1:  # `invalid_high` says why
        return None
    solved = newest_value(history, "reward/correct_rate")
    side = "" if solved is None else f" (reward/correct_rate {solved:.2f}: too {'easy' if solved > 0.5 else 'hard'})"
    return (
        f"advantage/zero_variance_groups was at least {min(values):.2f} for {steps} steps{at(history)}: so many "
        f"groups have only equal rewards and teach nothing{side}. Choose other problems (sections.Data.task), raise "
        "step.Algorithm.group_size or sections.Sampling.temperature, or sample until there is signal (algo/dapo.gin)"
    )


def invalid_high(history: History, *, share: float, steps: int) -> str | None:
    """reward/invalid >= share in each of the last `steps` steps.

    Args:
        history: the run's lines of metrics, oldest first.
        share: fraction of the rows from which the rule is met, above 0 to 1.
        steps: steps in a row, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_share(share)
    values = last(history, "reward/invalid", steps)
    if not values or min(values) < share:
        return None
    counts = {kind: newest_value(history, f"reward/{kind}") or 0.0 for kind in LOST_TO}
    lost = [f"{kind} {count:.0f}" for kind, count in counts.items() if count]
    shown = ", ".join(lost) or "none was lost: it said None"
    return (
        f"reward/invalid was at least {min(values):.2f} for {steps} steps{at(history)}: so many rows have no reward "
        f"and teach nothing ({shown}). log.txt has the first of each kind with its reason: mend the reward, or raise "
        "reward_pool.RewardPool.timeout_per_completion or reward_pool.RewardPool.memory_mb"
    )


def truncated_high(history: History, *, share: float, steps: int) -> str | None:
    """generation/truncated >= share in each of the last `steps` steps.

    Args:
        history: the run's lines of metrics, oldest first.
        share: fraction of the rows from which the rule is met, above 0 to 1.
        steps: steps in a row, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_share(share)
    values = last(history, "generation/truncated", steps)
    if not values or min(values) < share:
        return None
    return (
        f"generation/truncated was at least {min(values):.2f} for {steps} steps{at(history)}: so many answers ran into "
        "the limit, most of them before they came to a result, and lose their reward for it. Raise "
        "sections.Sampling.max_new_tokens, or reward shorter answers (docs/algorithms/catalogue.md)"
    )


def overflowing(history: History, *, steps: int) -> str | None:
    """optimizer/overflows rose in each of the last `steps` steps (float16): the weights hardly move.

    Args:
        history: the run's lines of metrics, oldest first.
        steps: steps in a row, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_window("steps", steps)
    values = finite_series(history[-LAST:], "optimizer/overflows")[-steps - 1 :]
    if len(values) <= steps or any(after <= before for before, after in pairwise(values)):
        return None
    return (
        f"optimizer/overflows rose from {values[0]:.0f} to {values[-1]:.0f} in {steps} steps{at(history)}: float16 "
        "gradients overflow in every step and no weight moves. If optimizer/loss_scale still falls, lower "
        "sections.PolicyUpdate.initial_scale; if it does not, the learning signal itself is too large: look at "
        "loss/ratio_max and advantage/max, or compute in sections.Compute.dtype = 'bfloat16'"
    )


# Now against the beginning, and against the best ----------------------------------------------------------------------


def entropy_collapsed(history: History, *, share: float, window: int) -> str | None:
    """The mean loss/entropy of the last `window` steps < share * that of the first `window`; not where that is below 0.

    An entropy relative to a teacher is below 0 and rises.

    Args:
        history: the run's lines of metrics, oldest first.
        share: fraction of the entropy at the beginning, above 0 to 1.
        window: steps of a mean, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_share(share)
    ends = means_at_ends(history, "loss/entropy", window)
    if ends is None or ends[0] < 0 or ends[1] >= share * ends[0]:
        return None
    return (
        f"loss/entropy fell from {ends[0]:.3g} to {ends[1]:.3g}{at(history)}, below {share:g} of its start: samples of "
        f"a group become alike and there is nothing left to compare. {SLOWER.capitalize()}, raise the loss's clip_high "
        "or objective.policy_objective.entropy_bonus, or sections.Sampling.temperature"
    )


def length_exploded(history: History, *, times: float, window: int) -> str | None:
    """The mean generation/length_mean of the last `window` steps > times * that of the first `window`.

    Args:
        history: the run's lines of metrics, oldest first.
        times: largest ratio to the length at the beginning.
        window: steps of a mean, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_above_zero("times", times)
    ends = means_at_ends(history, "generation/length_mean", window)
    if ends is None or ends[1] <= times * ends[0]:
        return None
    return (
        f"generation/length_mean grew from {ends[0]:.3g} to {ends[1]:.3g}{at(history)}, more than {times:g} times: "
        "unless the reward grew with it, length itself is being rewarded. Compare reward/mean; weigh by tokens or a "
        "constant (objective.policy_objective.loss_aggregation, docs/algorithms/catalogue.md), or add a length part to "
        "combine.combine.parts"
    )


def reward_without_accuracy(history: History, *, evaluations: int, rise: float, fall: float) -> str | None:
    """eval/accuracy fell by more than `fall` from its best among the last `evaluations`, and the reward rose meanwhile.

    Between that best and the newest evaluation, the mean reward/mean of the second half of the steps lies more than
    `rise` above that of the first half.

    Args:
        history: the run's lines of metrics, oldest first.
        evaluations: newest evaluations looked at, at least 2.
        rise: how much reward/mean has to rise, in units of the reward.
        fall: how much eval/accuracy has to fall, a fraction.

    Returns:
        What was seen and what to do about it; None where the rule is not met.

    Raises:
        ValueError: evaluations is below 2, or rise or fall below 0.
    """
    if evaluations < 2 or rise < 0 or fall < 0:
        raise ValueError(
            f"evaluations, rise, fall: got {evaluations}, {rise}, {fall}, wanted evaluations >= 2, rise >= 0, fall >= 0"
        )
    judged = [i for i, one in enumerate(history) if is_finite_number(one.get("eval/accuracy"))][-evaluations:]
    if len(judged) < 2:
        return None
    best = max(judged, key=lambda i: (history[i]["eval/accuracy"], i))
    high, now = history[best]["eval/accuracy"], history[judged[-1]]["eval/accuracy"]
    rewards = finite_series(history[best + 1 : judged[-1] + 1], "reward/mean")
    half = len(rewards) // 2
    if not half or high - now <= fall or stable_mean(rewards[-half:]) - stable_mean(rewards[:half]) <= rise:
        return None
    return (
        f"eval/accuracy fell from {high:.3f}{at(history[: best + 1])} to {now:.3f}{at(history[: judged[-1] + 1])} "
        f"while reward/mean rose from {stable_mean(rewards[:half]):.3g} to {stable_mean(rewards[-half:]):.3g}: what "
        "earns reward is no longer what is right, or the training problems are learned by heart. Read samples, lower "
        "that part's weight in combine.combine.weights, raise objective.policy_objective.beta, and take the best "
        "checkpoint (sections.Checkpoints.keep_best)"
    )
