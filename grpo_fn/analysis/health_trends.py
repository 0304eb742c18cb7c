"""Rules of health on how metrics have moved lately: a reward that stands still or falls, slow sampling, a loss spike.

As in `health`, a rule is `(history, *, knobs) -> str | None`. These look at the newest `health.LAST` lines alone.
"""

from statistics import median

from grpo_fn.analysis.health import (
    LAST,
    SLOWER,
    History,
    at,
    check_above_zero,
    check_share,
    check_window,
    finite_series,
    last,
    means_at_ends,
    newest_value,
    stable_mean,
)


def reward_flat(history: History, *, steps: int, rise: float, solved: float) -> str | None:
    """A reward that stands still: the mean reward/mean of the last `steps` steps' halves differs by at most `rise`.

    Args:
        history: the run's lines of metrics, oldest first.
        steps: steps looked at, 2 to 64.
        rise: difference that counts as movement, in units of the reward.
        solved: reward/correct_rate of the second half from which there is nothing left to gain; a share.

    Returns:
        What was seen and what to do about it; None where the rule is not met.

    Raises:
        ValueError: for knobs that cannot work.
    """
    check_above_zero("rise", rise)
    check_share(solved)
    if steps < 2:
        raise ValueError(f"steps: got {steps}, wanted at least 2")
    values = last(history, "reward/mean", steps)
    if not values:
        return None
    first, second = stable_mean(values[: steps // 2]), stable_mean(values[-(steps // 2) :])
    right = finite_series(history[-LAST:], "reward/correct_rate")[-(steps // 2) :]
    if abs(second - first) > rise or (right and stable_mean(right) >= solved):
        return None
    return (
        f"reward/mean went from {first:.3g} to {second:.3g} in {steps} steps{at(history)}, within {rise:g}: nothing is "
        "learned from it any more. If advantage/zero_variance_groups is high, choose other problems "
        "(sections.Data.task) or raise step.Algorithm.group_size; else raise optimizer.adamw.lr, or read samples: the "
        "reward may be one that the policy cannot find (combine.combine.parts)"
    )


def reward_falling(history: History, *, window: int, fall: float) -> str | None:
    """A reward that falls: the mean reward/mean of the last `window` steps is `fall` below the best such mean before.

    Args:
        history: the run's lines of metrics, oldest first.
        window: steps of a mean, 1 to 64; the windows compared do not overlap.
        fall: in units of the reward.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_above_zero("fall", fall)
    check_window("window", window)
    values = finite_series(history[-LAST:], "reward/mean")
    if len(values) < 2 * window:
        return None
    means = [stable_mean(values[i : i + window]) for i in range(len(values) - window + 1)]
    best, now = max(means[:-window]), means[-1]
    if not best - now > fall:
        return None
    return (
        f"reward/mean fell from {best:.3g} to {now:.3g}{at(history)} (means of {window} steps), by more than {fall:g}: "
        f"the policy gets worse at what is rewarded. Look at loss/grad_norm, loss/ratio_max, loss/entropy; {SLOWER}, "
        "lower step.Algorithm.epochs, and go back to the best checkpoint (sections.Checkpoints.keep_best)"
    )


def generation_slow(history: History, *, share: float, window: int) -> str | None:
    """Sampling that slows down: mean generation/tokens_per_second of the last `window` < share * that of the first.

    Args:
        history: the run's lines of metrics, oldest first.
        share: of the rate at the beginning.
        window: steps of a mean, 1 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.
    """
    check_share(share)
    ends = means_at_ends(history, "generation/tokens_per_second", window)
    if ends is None or ends[1] >= share * ends[0]:
        return None
    length, truncated = (newest_value(history, f"generation/{name}") for name in ("length_max", "truncated"))
    seen = "" if length is None else f"; longest answer {length:.0f} tokens"
    seen += "" if truncated is None else f", {truncated:.0%} truncated"
    return (
        f"generation/tokens_per_second fell from {ends[0]:.3g} to {ends[1]:.3g}{at(history)}, below {share:g} of its "
        f"start{seen}: a few long answers keep the batch waiting, or something else uses the machine. Bound the length "
        "(sections.Sampling.max_new_tokens), sample more rows at once (sections.Sampling.max_rows), and look at "
        "system/memory_gb and the profile (sections.Logging.profile_steps)"
    )


def loss_spike(history: History, *, times: float, window: int) -> str | None:
    """A loss that jumps: loss/objective is further from the last `window` steps' median than `times` their furthest.

    Args:
        history: the run's lines of metrics, oldest first.
        times: the largest distance from the median among the steps before, times this, is still no spike.
        window: steps before the newest one, 2 to 64.

    Returns:
        What was seen and what to do about it; None where the rule is not met.

    Raises:
        ValueError: for knobs that cannot work.
    """
    check_above_zero("times", times)
    if window < 2:
        raise ValueError(f"window: got {window}, wanted at least 2")
    now, before = newest_value(history, "loss/objective"), last(history[:-1], "loss/objective", window)
    if now is None or not before:
        return None
    middle = median(before)
    spread = max(abs(value - middle) for value in before)
    if not spread or not abs(now - middle) > times * spread:
        return None
    return (
        f"loss/objective is {now:.3g}{at(history)}, {abs(now - middle) / spread:.3g} times as far from the median of "
        f"{window} steps, {middle:.3g}, as any of them: one step is unlike the others. Look at advantage/max, "
        "loss/ratio_max and the samples of that step; sections.PolicyUpdate.max_grad_norm bounds what it moves, a "
        f"truncated ratio (algo/dapo.gin) what one token may; {SLOWER}"
    )
