"""Accuracy of a policy on held-out problems."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from grpo_fn.problem import Problem, RewardFn, Scorer
from grpo_fn.rewards.combine import completions_of
from grpo_fn.types import Sampler


class Judged(NamedTuple):
    """One evaluated problem, as a person would read it."""

    uid: int
    prompt: str
    text: str
    answer: str
    verdict: str  # right, wrong or unscorable


def evaluate(
    sampler: Sampler, problems: Sequence[Problem], *, key: Tensor, verdict: RewardFn, score: Scorer
) -> tuple[dict[str, float], list[Judged]]:
    """One completion a problem: the share that is right among those that can be scored, with its 95 % interval."""
    rollout = sampler.sample(problems, 1, key=key)
    completions = completions_of(rollout)
    verdicts = score(verdict, problems, completions)
    judged = [
        Judged(problem.uid, problem.prompt, completion.text, problem.answer, word(value))
        for problem, completion, value in zip(problems, completions, verdicts, strict=True)
    ]
    scored = [row for row in judged if row.verdict != "unscorable"]
    right = sum(row.verdict == "right" for row in scored)
    low, high = wilson(right, len(scored))
    return {
        "eval/accuracy": right / len(scored) if scored else float("nan"),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/problems": float(len(problems)),
        "eval/unscorable": float(len(judged) - len(scored)),
        "eval/length_mean": sum(c.length for c in completions) / len(completions),
        "eval/truncated": sum(c.truncated for c in completions) / len(completions),
    }, judged


def word(value: float | None) -> str:
    """A verdict's name: right means the whole reward, 1."""
    return "unscorable" if value is None else "right" if value >= 1.0 else "wrong"


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a binomial share (Wilson 1927); (0, 1) of no trials."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    p, scale = right / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / scale
    return max(0.0, centre - half), min(1.0, centre + half)
