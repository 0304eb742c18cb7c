"""Whether two things differ that were measured in pairs: accuracies on the same problems, runs with the same seeds.

Accuracies on the same problems: McNemar's test, and the paired bootstrap. Figures of runs that share their seeds, and
with them prompts, order and random numbers: the mean difference with Student's interval, and what the pairing saves.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from mpmath import betainc, findroot

CONFIDENCE = 0.95  # of the intervals over seeds
ROUNDING = 2.0**-40  # of the values: a difference that is no larger is none


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value that gains and losses among the same problems are equally likely: McNemar's test, exact.

        p = min(1, 2 sum_{i <= min(gained, lost)} C(n, i) / 2^n),   n = gained + lost

    Given the n problems on which two runs disagree, each is a gain with chance 1/2 under the hypothesis (McNemar 1947,
    Psychometrika 12, whose statistic approximates this binomial). 1 without any disagreement.
    """
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)


def paired_bootstrap(gained: int, lost: int, n: int) -> tuple[float, float]:
    """95 % percentile interval of a difference of accuracies on n problems, by the paired bootstrap (Efron 1979).

    A resample draws n problems with replacement; its difference is S / n, S the sum of +1 for a gain and -1 for a loss.
    Resamples without end give S its exact distribution, here instead of a random draw of some of them:

        P(S = s) = [x^s] ((lost x^-1 + same + gained x) / n)^n,   same = n - gained - lost

    The ends are the outermost s / n beyond which less than 2.5 % lie. Wants 0 <= gained + lost <= n and n >= 1.
    """
    return -_largest(lost, gained, n) / n, _largest(gained, lost, n) / n


def _largest(gained: int, lost: int, n: int) -> int:
    """The largest s with P(S >= s) > 0.025."""
    x = np.exp(2j * np.pi / (2 * n + 1) * np.arange(2 * n + 1))
    transform = ((lost * x.conj() + (n - gained - lost) + gained * x) / n) ** n
    chance = np.fft.fft(transform).real / (2 * n + 1)  # of s = 0, 1, ..., n, -n, ..., -1
    falling = np.roll(chance, n)[::-1].cumsum()  # P(S >= s) for s = n, n-1, ..., -n
    return n - int(np.argmax(falling > 0.025))


class PairedDifference(NamedTuple):
    """Figures of two settings that were run with the same seeds, compared seed by seed."""

    n: int  # seeds
    first: float  # mean of the first setting
    second: float
    difference: float  # mean of second - first
    low: float  # of the 95 % interval of the difference: Student's t over the n differences; nan of one seed
    high: float
    worth: float  # how many unpaired seeds a paired one is worth: (Var first + Var second) / Var(second - first)
    worth_low: float  # of the 95 % interval of that
    worth_high: float


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """The mean difference of values of the same seeds, in the same order, with intervals over the seeds.

    Without pairing, n seeds a setting leave the difference a variance of (Var first + Var second) / n, with it
    Var(second - first) / n: so n pairs are as good as `worth` times n unpaired seeds a setting. That is 1 / (1 - r) for
    equal variances with correlation r; below 1 the pairing does harm, and it is inf where all pairs differ alike while
    the values vary, nan where nothing varies. Its interval rests on Var sum / Var difference being a multiple of
    F(n-1, n-1), which holds for normal values of equal variance.

    Raises ValueError for no values, and for as many that are not pairs.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"got {len(first)} and {len(second)} values, expected as many of each, one or more")
    n, apart = len(first), [b - a for a, b in zip(first, second, strict=True)]
    error, mean = ROUNDING * max(map(abs, (*first, *second))), fmean(apart)
    means = fmean(first), fmean(second), mean if abs(mean) > error else 0.0
    if n == 1:
        return PairedDifference(n, *means, *(math.nan,) * 5)
    t, noise, alone = student_quantile(n - 1), variance(apart), variance(first) + variance(second)
    if max(apart) - min(apart) <= error:  # differences that are one number
        noise = 0.0
    half = t * math.sqrt(noise / n)
    together = max(0.0, 2 * alone - noise)  # Var(first + second)
    slope = t / math.sqrt(n - 1)
    limit = (slope + math.hypot(1, slope)) ** 2  # F's quantile by t's: Cacoullos 1965, J. Am. Stat. Assoc. 60
    ratio = together / noise if noise else math.inf if together else math.nan
    worth = [(1 + ratio * factor) / 2 for factor in (1.0, 1 / limit, limit)]
    return PairedDifference(n, *means, means[2] - half, means[2] + half, *worth)


def paired_cells(paired: PairedDifference) -> dict[str, str]:
    """A line of a table about it; a dash for what is not known, `equal` for the worth where no seed differs."""
    n, first, second, difference, low, high, worth, worth_low, worth_high = paired
    no_seed_differs = n > 1 and difference == low == high == 0
    return {
        "seeds": str(n),
        "first": three_digits(first),
        "this": three_digits(second),
        "difference": f"{difference:+.3g}",
        "95 %": f"{low:+.3g} to {high:+.3g}" if n > 1 else "-",
        "worth": "equal" if no_seed_differs else three_digits(worth),
        "worth, 95 %": f"{worth_low:.3g} to {worth_high:.3g}" if math.isfinite(worth) else "-",
    }


def three_digits(x: float) -> str:
    """Three digits; a dash for what is not known."""
    return "-" if math.isnan(x) else f"{x:.3g}"


@cache
def student_quantile(degrees: int) -> float:
    """The t for which Student's distribution with that many degrees of freedom has P(|T| <= t) = CONFIDENCE."""
    p = 1 - CONFIDENCE  # = I_x(degrees / 2, 1 / 2): Abramowitz and Stegun 1964, 26.7.1
    tail = partial(betainc, degrees / 2, 0.5, 0, regularized=True)
    # The brackets are the quantiles of infinitely many degrees of freedom and of one, and some.
    return float(findroot(lambda t: tail(degrees / (degrees + t * t)) - p, (1.9, 13), solver="anderson"))
