"""Whether two accuracies on the same problems differ: McNemar's test, and the paired bootstrap."""

from itertools import accumulate

import torch


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value that gains and losses among the same problems are equally likely: McNemar's test, exact.

        p = min(1, 2 sum_{i <= min(gained, lost)} C(n, i) / 2^n),   n = gained + lost

    Given the n problems on which two runs disagree, each is a gain with chance 1/2 under the hypothesis (McNemar 1947,
    Psychometrika 12, whose statistic approximates this binomial). 1 without any disagreement.
    """
    n = gained + lost
    choices = accumulate(range(min(gained, lost)), lambda ways, i: ways * (n - i) // (i + 1), initial=1)  # C(n, i)
    return min(1.0, 2 * sum(choices) / 2**n)


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
    turn = torch.arange(2 * n + 1, dtype=torch.float64) * (2 * torch.pi / (2 * n + 1))
    x = torch.polar(torch.ones_like(turn), turn)
    transform = ((lost * x.conj() + (n - gained - lost) + gained * x) / n) ** n
    chance = torch.fft.fft(transform).real / (2 * n + 1)  # of s = 0, 1, ..., n, -n, ..., -1
    falling = chance.roll(n).flip(0).cumsum(0)  # P(S >= s) for s = n, n-1, ..., -n
    return n - int((falling > 0.025).nonzero()[0])
