"""The presets of gin/algo once more, by loops over plain numbers, written from the equations of the papers.

Nothing here knows torch or grpo_fn. A function has the name of its preset and returns what a step minimises, as a Dual:
the number and its derivative by every token's logp. The rules for what papers leave open are those of the catalogue: a
sample without a reward is in no mean and no count; one that is filtered was part of its group's mean and is in no
count; a group of one, like a group of equals, has advantage 0.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain, combinations
from typing import NamedTuple


class Dual:
    """A number and its partial derivatives, by name of the variable."""

    def __init__(self, x: float, slope: dict | None = None) -> None:
        self.x, self.slope = x, slope or {}

    def through(self, value: float, derivative: float) -> "Dual":
        """f(self), given f and f' there."""
        return Dual(value, {name: derivative * s for name, s in self.slope.items()})

    def __add__(self, other: "Dual | float") -> "Dual":
        if not isinstance(other, Dual):
            return Dual(self.x + other, self.slope)
        names = self.slope.keys() | other.slope.keys()
        return Dual(self.x + other.x, {n: self.slope.get(n, 0.0) + other.slope.get(n, 0.0) for n in names})

    def __mul__(self, other: "Dual | float") -> "Dual":
        if not isinstance(other, Dual):
            return self.through(self.x * other, other)
        return Dual(self.x * other.x) + (self * other.x).flat() + (other * self.x).flat()

    def flat(self) -> "Dual":
        """Its slope alone."""
        return Dual(0.0, self.slope)

    def __neg__(self) -> "Dual":
        return self * -1.0

    def __sub__(self, other: "Dual | float") -> "Dual":
        return self + -other

    def __rsub__(self, other: float) -> "Dual":
        return -self + other

    def __truediv__(self, other: float) -> "Dual":
        return self * (1.0 / other)

    def __pow__(self, exponent: float) -> "Dual":
        return self.through(self.x**exponent, exponent * self.x ** (exponent - 1))

    __radd__, __rmul__ = __add__, __mul__


def exp(z: Dual) -> Dual:
    return z.through(math.exp(z.x), math.exp(z.x))


def sigmoid(z: Dual) -> Dual:
    s = 1 / (1 + math.exp(-z.x))
    return z.through(s, s * (1 - s))


def magnitude(z: Dual) -> Dual:
    return z if z.x > 0 else -z if z.x < 0 else Dual(0.0)


def smaller(a: Dual, b: Dual) -> Dual:
    return a if a.x <= b.x else b


def clip(z: Dual, low: float, high: float) -> Dual:
    return Dual(low) if z.x < low else Dual(high) if z.x > high else z


class Sample(NamedTuple):
    """A completion: what it got, what four policies say of its tokens, and a random number for each of them."""

    reward: float
    parts: dict[str, float]
    scored: bool
    truncated: bool
    logp: list[Dual]
    old: list[float]
    ref: list[float]
    sampled: list[float]
    luck: list[float]
    teacher: list[float]
    energy: list[float]
    column: list[int]  # of each token

    def ratio(self, t: int) -> Dual:
        """pi_theta / pi_old of token t."""
        return exp(self.logp[t] - self.old[t])

    def weighted_energy(self, cap: float | None) -> list[float]:
        """Each token's energy times min(pi_old / pi_sampled, cap)^2; the energies themselves without a cap."""
        if cap is None:
            return self.energy
        ratio = [min(math.exp(old - drawn), cap) for old, drawn in zip(self.old, self.sampled, strict=True)]
        return [w * w * e for w, e in zip(ratio, self.energy, strict=True)]


Groups = Sequence[Sequence[Sample]]
Advantages = Sequence[tuple[Sample, float]]


class Undecided(Exception):
    """Two tokens are so near to a tie that rounding decides between them."""


# -- advantages, one group of scored samples


def mean(values: Sequence[float]) -> float:
    """To the last bit, so that equal numbers have no distance from it."""
    return float(sum(map(Fraction, values)) / len(values))


def spread(values: Sequence[float], ddof: int) -> float:
    center = mean(values)
    return math.sqrt(sum((v - center) ** 2 for v in values) / (len(values) - ddof)) if len(values) > ddof else 0.0


def standard(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / std of the group; the sample's std, 1e-4 added to it."""
    return [(r - mean(rewards)) / (spread(rewards, 1) + 1e-4) for r in rewards]


def central(rewards: Sequence[float]) -> list[float]:
    return [r - mean(rewards) for r in rewards]


def compared(groups: Groups, compare: Callable[[Sequence[float]], list[float]]) -> list[Advantages]:
    """Each group's scored samples with the advantage of their rewards."""
    scored = [[s for s in group if s.scored] for group in groups]
    return [list(zip(group, compare([s.reward for s in group]), strict=True)) for group in scored if group]


def all_of(groups: Sequence[Advantages]) -> Advantages:
    return list(chain.from_iterable(groups))


# -- means over tokens and rows


def row_means(rows: Advantages, token: Callable[[Sample, int, float], Dual]) -> Dual:
    """Over a row's tokens, then over rows."""
    total = sum((token(s, t, a) / len(s.logp) for s, a in rows for t in range(len(s.logp))), Dual(0.0))
    return total / max(1, len(rows))


def token_mean(rows: Advantages, token: Callable[[Sample, int, float], Dual]) -> Dual:
    """Over all tokens of the step."""
    each = [token(s, t, a) for s, a in rows for t in range(len(s.logp))]
    return sum(each, Dual(0.0)) / max(1, len(each))


def row_sums(rows: Advantages, token: Callable[[Sample, int, float], Dual], length: int) -> Dual:
    """Over a row's tokens, divided by the same length for each, then the mean over rows."""
    return sum((token(s, t, a) for s, a in rows for t in range(len(s.logp))), Dual(0.0)) / (length * max(1, len(rows)))


def ppo(low: float, high: float) -> Callable[[Sample, int, float], Dual]:
    """-min(r A, clip(r) A)."""

    def token(s: Sample, t: int, a: float) -> Dual:
        return -smaller(s.ratio(t) * a, clip(s.ratio(t), 1 - low, 1 + high) * a)

    return token


# -- the presets


def grpo(groups: Groups, limit: int) -> Dual:
    """arXiv:2402.03300, eq. 3 and 4."""

    def token(s: Sample, t: int, a: float) -> Dual:
        apart = s.ref[t] - s.logp[t]
        return ppo(0.2, 0.2)(s, t, a) + 0.04 * (exp(apart) - apart - 1.0)

    return row_means(all_of(compared(groups, standard)), token)


def echo(groups: Groups, limit: int) -> Dual:
    """arXiv:2605.24517: the sampled tokens' part, GRPO without KL; that of observations is test_components.py's."""
    return row_means(all_of(compared(groups, standard)), ppo(0.2, 0.2))


def dr_grpo(groups: Groups, limit: int) -> Dual:
    """arXiv:2503.20783: neither the std nor the row's own length."""
    return row_sums(all_of(compared(groups, central)), ppo(0.2, 0.2), limit)


def dapo(groups: Groups, limit: int) -> Dual:
    """arXiv:2503.14476, eq. 8 to 10, with the overlong filtering of section 3.4."""
    rows = [(s, a) for s, a in all_of(compared(groups, standard)) if not s.truncated]
    return token_mean(rows, ppo(0.2, 0.28))


def gspo(groups: Groups, limit: int) -> Dual:
    """arXiv:2507.18071, eq. 5 to 7: one term a row."""
    rows = all_of(compared(groups, standard))
    loss = Dual(0.0)
    for s, a in rows:
        ratio = exp(sum((now - before for now, before in zip(s.logp, s.old, strict=True)), Dual(0.0)) / len(s.logp))
        loss += -smaller(ratio * a, clip(ratio, 1 - 3e-4, 1 + 4e-4) * a)
    return loss / max(1, len(rows))


def cispo(groups: Groups, limit: int) -> Dual:
    """arXiv:2506.13585, eq. 4 and 5, weights of at most 5 and no lower bound."""

    def token(s: Sample, t: int, a: float) -> Dual:
        return -min(s.ratio(t).x, 5.0) * a * s.logp[t]

    return token_mean(all_of(compared(groups, standard)), token)


def rloo(groups: Groups, limit: int, beta: float = 0.0) -> Dual:
    """arXiv:2402.14740: REINFORCE with the others' mean as the baseline; R - beta log(pi / pi_ref) is the reward."""
    loss, rows = Dual(0.0), 0
    for group in groups:
        scored = [s for s in group if s.scored]
        paid = [s.reward - beta * sum(o - r for o, r in zip(s.old, s.ref, strict=True)) for s in scored]
        for i, s in enumerate(scored):
            others = paid[:i] + paid[i + 1 :]
            loss += -(paid[i] - mean(others) if others else 0.0) * sum(s.logp, Dual(0.0))
            rows += 1
    return loss / max(1, rows)


def reinforce_plus_plus(groups: Groups, limit: int) -> Dual:
    """arXiv:2501.03262v9, eq. 1, 4 and 5: R minus the KL to come, standardised over the tokens of the step."""
    scored = [s for group in groups for s in group if s.scored]
    to_come = [
        [s.reward - 0.001 * sum(s.old[i] - s.ref[i] for i in range(t, len(s.old))) for t in range(len(s.old))]
        for s in scored
    ]
    return over_the_step(scored, to_come)


def reinforce_plus_plus_baseline(groups: Groups, limit: int) -> Dual:
    """arXiv:2501.03262v9, eq. 1, 6, 7 and 8: R minus the group's mean, standardised likewise; k2 in the loss."""
    rows = all_of(compared(groups, central))

    def penalty(s: Sample, t: int, a: float) -> Dual:
        return 1e-3 * 0.5 * (s.ref[t] - s.logp[t]) ** 2

    return over_the_step([s for s, _ in rows], [[a] * len(s.logp) for s, a in rows]) + row_means(rows, penalty)


def over_the_step(rows: Sequence[Sample], advantages: Sequence[Sequence[float]]) -> Dual:
    """PPO's loss, row by row, with the advantages standardised over all tokens."""
    tokens = list(chain.from_iterable(advantages))
    if not tokens:
        return Dual(0.0)
    center, scale = mean(tokens), spread(tokens, 0) + 1e-8
    loss = Dual(0.0)
    for s, row in zip(rows, advantages, strict=True):
        each = [ppo(0.2, 0.2)(s, t, (a - center) / scale) for t, a in enumerate(row)]
        loss += sum(each, Dual(0.0)) / len(each)
    return loss / len(rows)


def otb(groups: Groups, limit: int, cap: float | None = None) -> Dual:
    """arXiv:2602.07078, from verl's code: rewards weighed with their rows' energy so far; none for a row alone.

    With a cap each token's energy counts min(pi_old / pi_sampled, cap)^2 times, as in verl's code with rollout weights.
    """
    loss, rows = Dual(0.0), 0
    for group in groups:
        scored = [s for s in group if s.scored]
        so_far = [{c: sum(s.weighted_energy(cap)[: t + 1]) for t, c in enumerate(s.column)} for s in scored]
        for s in scored:
            for t, c in enumerate(s.column):
                there = [(o.reward, w[c]) for o, w in zip(scored, so_far, strict=True) if c in w]
                total, least = sum(w for _, w in there), min(r for r, _ in there)
                baseline = least + (sum(w * (r - least) for r, w in there) / total if total else 0.0)
                loss += -(s.reward - (baseline if len(there) > 1 else 0.0)) * s.logp[t]
            rows += 1
    return loss / max(1, rows)


def real(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.05630, from ms-swift's code, tau 0.5; the slope is the loss's, the value its rows' shares of it."""
    slope, value = Dual(0.0), 0.0
    for group in groups:
        sides = [[s for s in group if s.scored and (s.reward >= 1.0) is right] for right in (True, False)]
        if not all(sides):
            continue
        for rows, sign in zip(sides, (-1.0, 1.0), strict=True):
            scores = [sum((s.logp[t] - s.old[t] for t in range(len(s.logp))), Dual(0.0)) / len(s.logp) for s in rows]
            powers = [exp(score * (sign / 0.5)) for score in scores]
            total = 1.0 + sum(powers, Dual(0.0))
            slope += total.through(math.log(total.x), 1 / total.x)
            for s, power in zip(rows, powers, strict=True):
                value += sign / 0.5 * power.x / total.x * sum(x.x for x in s.logp) / len(s.logp)
    samples = sum(map(len, groups))
    return Dual(value / samples, (slope / samples).slope)


def sapo(groups: Groups, limit: int) -> Dual:
    """arXiv:2511.20347, eq. 5 and 6."""

    def token(s: Sample, t: int, a: float) -> Dual:
        tau = 1.0 if a > 0 else 1.05
        return -sigmoid(tau * (s.ratio(t) - 1.0)) * (4 / tau) * a

    return row_means(all_of(compared(groups, standard)), token)


def gmpo(groups: Groups, limit: int) -> Dual:
    """arXiv:2507.20673, eq. 4: (prod_t min(r^s, clip(r)^s)^s)^(1/|o|) A, s the sign of A."""
    rows = all_of(compared(groups, standard))
    loss = Dual(0.0)
    for s, a in rows:
        if a == 0:
            continue
        sign, product = math.copysign(1.0, a), Dual(1.0)
        for t in range(len(s.logp)):
            r = s.ratio(t)
            product = product * smaller(r**sign, clip(r, math.exp(-0.4), math.exp(0.4)) ** sign) ** sign
        loss += -(product ** (1 / len(s.logp))) * a
    return loss / max(1, len(rows))


def dppo(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.04879, eq. 12 and 13, by the sampler's probabilities; 1e-3 (log r)^2 is the preset's own."""

    def token(s: Sample, t: int, a: float) -> Dual:
        log_r = s.logp[t] - s.sampled[t]
        moved = math.exp(s.logp[t].x) - math.exp(s.sampled[t])
        outside = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.2)
        return (Dual(0.0) if outside else -exp(log_r) * a) + 1e-3 * log_r * log_r

    return row_sums(all_of(compared(groups, central)), token, limit)


def luspo(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.05261: GSPO's term of a row times the row's length."""
    rows = all_of(compared(groups, standard))
    loss = Dual(0.0)
    for s, a in rows:
        ratio = exp(sum((now - before for now, before in zip(s.logp, s.old, strict=True)), Dual(0.0)) / len(s.logp))
        loss += -smaller(ratio * a, clip(ratio, 1 - 2e-3, 1 + 2.5e-3) * a) * len(s.logp)
    return loss / max(1, len(rows))


def vespo(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.10693: -phi(W) A log p, phi a constant."""

    def token(s: Sample, t: int, a: float) -> Dual:
        total = sum(max(-20.0, min(20.0, now.x - then)) for now, then in zip(s.logp, s.sampled, strict=True))
        log_w = max(math.log(1e-8), min(20.0, total))
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return s.logp[t] * (-math.exp(decay + k * log_w - decay * math.exp(log_w)) * a)

    return token_mean(all_of(compared(groups, standard)), token)


def dppo_kl(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.04879 with the KL between two coins: this token or another."""

    def token(s: Sample, t: int, a: float) -> Dual:
        p, q = math.exp(s.logp[t].x), math.exp(s.sampled[t])
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        if abs(divergence - 0.05) < 1e-9:
            raise Undecided
        ahead = (p > q) if a > 0 else (p < q)
        return Dual(0.0) if divergence > 0.05 and ahead else s.logp[t] * (-min(p / q, 20.0) * a)

    return row_sums(all_of(compared(groups, central)), token, limit)


def glm5(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.15763, section 4.1.2: outside of the range, on either side, a token teaches nothing."""

    def token(s: Sample, t: int, a: float) -> Dual:
        r = math.exp(s.logp[t].x - s.sampled[t])
        return s.logp[t] * (-r * a) if 0.8 < r < 1.28 else Dual(0.0)

    return token_mean(all_of(compared(groups, standard)), token)


def dro(groups: Groups, limit: int) -> Dual:
    """-(A log p - 0.05 (log r)^2)."""

    def token(s: Sample, t: int, a: float) -> Dual:
        apart = s.logp[t] - s.old[t]
        return s.logp[t] * -a + apart * apart * 0.05

    return token_mean(all_of(compared(groups, standard)), token)


def fipo(groups: Groups, limit: int) -> Dual:
    """arXiv:2603.19835: DAPO's term times what comes after the token."""

    def token(s: Sample, t: int, a: float) -> Dual:
        log_r = [now.x - then for now, then in zip(s.logp, s.old, strict=True)]
        future = sum(2 ** (-(k - t) / 32) * x for k, x in enumerate(log_r) if k >= t and math.exp(x) <= 10.0)
        weight = max(1.0, min(1.2, math.exp(future)))
        if a < 0 and math.exp(log_r[t]) > 4.0:
            weight = 1.0  # 0.8 to 1 of what is at least 1
        loss = ppo(0.2, 0.28)(s, t, a)
        return (Dual(-10.0 * a) if a < 0 and math.exp(log_r[t]) > 10.0 else loss) * weight

    return token_mean(all_of(compared(groups, standard)), token)


def m2po(groups: Groups, limit: int) -> Dual:
    """arXiv:2510.01161: the furthest tokens go until the others' mean square is below 0.04."""
    rows = all_of(compared(groups, standard))
    squares = sorted((s.old[t] - s.sampled[t]) ** 2 for s, _ in rows for t in range(len(s.logp)))
    while squares and mean(squares) >= 0.04:
        if abs(mean(squares) - 0.04) < 1e-9:
            raise Undecided
        edge = squares[-1]
        squares = [x for x in squares if x < edge]
    largest = squares[-1] if squares else -1.0

    def token(s: Sample, t: int, a: float) -> Dual:
        kept = (s.old[t] - s.sampled[t]) ** 2 <= largest
        return exp(s.logp[t] - s.sampled[t]) * -a if kept else Dual(0.0)

    return token_mean(rows, token)


def opo(groups: Groups, limit: int) -> Dual:
    """arXiv:2505.23585: R minus the mean reward of a token of the group."""
    rows = []
    for group in groups:
        scored = [s for s in group if s.scored]
        lengths = [len(s.logp) for s in scored]
        for s in scored:
            rest = [n * (other.reward - s.reward) for n, other in zip(lengths, scored, strict=True)]
            rows.append((s, -sum(rest) / sum(lengths)))
    return row_sums(rows, lambda s, t, a: s.logp[t] * -a, 1)


def prompt_mean(groups: Groups, limit: int) -> Dual:
    """SkyRL's code: the mean over a prompt's tokens, then over the prompts that have some."""
    means = [token_mean(rows, ppo(0.2, 0.2)) for rows in compared(groups, standard)]
    return sum(means, Dual(0.0)) / max(1, len(means))


def chord(groups: Groups, limit: int) -> Dual:
    """arXiv:2508.11408, its sampled tokens: PPO's clip, the mean over tokens. Its given ones are in test_supervised."""
    return token_mean(all_of(compared(groups, standard)), ppo(0.2, 0.2))


def opd(groups: Groups, limit: int) -> Dual:
    """arXiv:2306.13649, on the sampled tokens: how much likelier the teacher finds each."""
    rows = [(s, 0.0) for group in groups for s in group if s.scored]
    return token_mean(rows, lambda s, t, a: s.logp[t] * (s.old[t] - s.teacher[t]))


def mopd(groups: Groups, limit: int) -> Dual:
    """arXiv:2601.02780, eq. 8: as opd, weighed with the ratio to the sampler where that is within 0.2 to 5."""

    def token(s: Sample, t: int, a: float) -> Dual:
        r = math.exp(s.logp[t].x - s.sampled[t])
        return s.logp[t] * (r * (s.old[t] - s.teacher[t])) if 0.2 < r < 5.0 else Dual(0.0)

    return token_mean([(s, 0.0) for group in groups for s in group if s.scored], token)


def sdft(groups: Groups, limit: int) -> Dual:
    """arXiv:2601.19897, on the sampled tokens: as opd, weighed with the ratio up to 2."""
    return token_mean([(s, 0.0) for group in groups for s in group if s.scored], _self_taught)


def sdpo(groups: Groups, limit: int) -> Dual:
    """arXiv:2601.20802: as sdft, the mean over the rows with a token on which teacher and policy differ."""
    rows = [(s, 0.0) for group in groups for s in group if s.scored]
    return token_mean([(s, a) for s, a in rows if s.teacher != s.old], _self_taught)


def _self_taught(s: Sample, t: int, a: float) -> Dual:
    return s.logp[t] * (min(s.ratio(t).x, 2.0) * (s.old[t] - s.teacher[t]))


def iw_opd(groups: Groups, limit: int) -> Dual:
    """arXiv:2606.22600: a token after little disagreement weighs up to 1.5 times one after all of it."""

    def token(s: Sample, t: int, a: float) -> Dual:
        apart = [teacher - old for teacher, old in zip(s.teacher, s.old, strict=True)]
        whole = max(sum(map(abs, apart)), 1e-8)
        weight = 1.5 - 0.5 * sum(map(abs, apart[:t])) / whole
        return s.logp[t] * (-weight * apart[t])

    return token_mean([(s, 0.0) for group in groups for s in group if s.scored], token)


def rlsd(groups: Groups, limit: int, lam: float = 0.5) -> Dual:
    """arXiv:2604.03128: GRPO's term, its advantage 1 - lam + lam w times as large, w in [0.8, 1.2] by the teacher."""

    def token(s: Sample, t: int, a: float) -> Dual:
        side = (a > 0) - (a < 0)
        clipped = min(max(math.exp(side * (s.teacher[t] - s.old[t])), 0.8), 1.2)
        return ppo(0.2, 0.2)(s, t, a * (1 - lam + lam * clipped))

    return row_means(all_of(compared(groups, standard)), token)


def informative(groups: Groups) -> list[tuple[Sample, float]]:
    """The samples of groups that are not without signal."""
    return all_of([group for group in compared(groups, standard) if any(a for _, a in group)])


def covariances(rows: Advantages) -> list[tuple[float, float, tuple[int, int]]]:
    """arXiv:2505.22617, eq. 10: (log pi - mean)(A - mean) over the tokens of the step; luck; row and token."""
    logp = mean([x for s, _ in rows for x in s.old])
    adv = mean([a for s, a in rows for _ in s.old])
    return [
        ((s.old[t] - logp) * (a - adv), s.luck[t], (i, t)) for i, (s, a) in enumerate(rows) for t in range(len(s.old))
    ]


def clip_cov(groups: Groups, limit: int, share: float = 2e-4) -> Dual:
    """arXiv:2505.22617, eq. 11 and 12: of the tokens of covariance 1 to 5 some are drawn and teach nothing."""
    rows = informative(groups)
    if not rows:
        return Dual(0.0)
    found = covariances(rows)
    if any(abs(cov - edge) < 1e-9 for cov, _, _ in found for edge in (1.0, 5.0)):
        raise Undecided
    drawn = sorted((luck, where) for cov, luck, where in found if 1.0 < cov < 5.0)
    left_out = {where for _, where in drawn[: max(1, math.floor(share * len(found)))]}
    losses = [
        ppo(0.2, 0.2)(s, t, a) for i, (s, a) in enumerate(rows) for t in range(len(s.logp)) if (i, t) not in left_out
    ]
    return sum(losses, Dual(0.0)) / len(found)


def kl_cov(groups: Groups, limit: int, share: float = 2e-3) -> Dual:
    """arXiv:2505.22617, eq. 13 and 14: the tokens of highest covariance pay |log r|; nothing is clipped."""
    rows = informative(groups)
    if not rows:
        return Dual(0.0)
    found = sorted(covariances(rows), key=lambda token: -token[0])
    count = max(1, math.floor(share * len(found)))
    if count < len(found) and found[count - 1][0] - found[count][0] < 1e-9:
        raise Undecided
    dear = {where for _, _, where in found[:count]}
    loss = Dual(0.0)
    for i, (s, a) in enumerate(rows):
        for t in range(len(s.logp)):
            loss += -s.ratio(t) * a
            if (i, t) in dear:
                loss += magnitude(s.logp[t] - s.old[t])
    return loss / len(found)


def gdpo(groups: Groups, limit: int) -> Dual:
    """arXiv:2601.05242, eq. 4, 6 and 7: parts normalised one by one, added, standardised over the rows of the step."""
    rows, advantages = [], []
    for group in groups:
        scored = [s for s in group if s.scored]
        parts = [standard([s.parts[name] for s in scored]) for name in ("correct", "boxed") if scored]
        rows += scored
        advantages += [sum(values) for values in zip(*parts, strict=True)]
    if not rows:
        return Dual(0.0)
    center, scale = mean(advantages), spread(advantages, 0) + 1e-4
    return row_means([(s, (a - center) / scale) for s, a in zip(rows, advantages, strict=True)], ppo(0.2, 0.2))


def max_rl(groups: Groups, limit: int) -> Dual:
    """arXiv:2602.02710: (R - mean) / mean. Where a reward is negative, the mean above the lowest of the group."""

    def by_mean(rewards: Sequence[float]) -> list[float]:
        above = mean(rewards) - min(0.0, *rewards, 0.0)
        return [(r - mean(rewards)) / above if above else 0.0 for r in rewards]

    return row_sums(all_of(compared(groups, by_mean)), ppo(0.2, 0.2), limit)


def pass_at_k(groups: Groups, limit: int) -> Dual:
    """arXiv:2508.10751: all groups of 4, each scored by its best; a sample's advantage is its groups' on average."""

    def of_fours(rewards: Sequence[float]) -> list[float]:
        drawn = list(combinations(range(len(rewards)), 4))
        best = [float(any(rewards[i] >= 1.0 for i in four)) for four in drawn]
        if not drawn or not spread(best, 0):
            return [0.0] * len(rewards)
        scaled = [(b - mean(best)) / spread(best, 0) for b in best]
        return [mean([x for x, four in zip(scaled, drawn, strict=True) if i in four]) for i in range(len(rewards))]

    return token_mean(all_of(compared(groups, of_fours)), ppo(0.2, 0.28))
