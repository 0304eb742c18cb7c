"""Whether an engine computes what the policy does: after every push it is asked, on the very path of training.

A few tokens are drawn for a fixed prompt, by each engine, and the policy says what it makes of them. An engine with old
weights in a corner of it (a tied head, a cache of prefixes), another temperature or another model is found out here,
whatever its checksums say. Then single tokens are drawn many times: one that leaves some out, with log-probs that are
right, is found out by what it draws (`p_value`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Policy
from grpo_fn.shell.sampler.interface import DataParallelSampler, EngineRefused, SamplerOptions

TEXT = "The quick brown fox jumps over the lazy dog, and 12 + 30 = 42. "
OPEN = (
    "Say one word at random:",
    "Once upon a time there was a",
    "3, 1, 4, 1, 5, 9, 2, 6,",
    "Ten animals: a",
)  # to go on with
PROMPT_TOKENS = 160  # at least, where the model has as many positions: longer than a block of cached prefixes
NEW_TOKENS = 16  # that each engine draws; `max_new_tokens` where that is less
DRAWS = 128  # of the first token after each of OPEN, by each engine
FLOAT32_GAP = 1e-3  # mean gap in nats that still passes in float32, in which two implementations are closer by far
MIN_P_VALUE = 1e-9  # so rare that no right engine of any run is refused
CUT = 8  # characters that go at a time where the text is too long


class Mismatch(EngineRefused):
    """Sampler and policy do not give the same tokens the same log-probabilities, or the same tokens."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A check of an engine against the policy: its log-probs and what it draws."""

    max_gap: float  # mean |logp of the policy - logp of the sampler| that still passes in 16 bits, in nats

    def __post_init__(self) -> None:
        """Raise ValueError for a limit that nothing passes."""
        if not self.max_gap > 0:
            raise ValueError(f"probe: got max_gap {self.max_gap}, expected more than 0")

    def __call__(
        self,
        spread: DataParallelSampler,
        policy: Policy,
        *,
        key: Tensor,
        max_positions: int | None,
        dtype: torch.dtype,
    ) -> dict[str, float]:
        """The gap's mean and maximum over the tokens of all engines, the test's p-value. Every rank has to take part.

        `max_positions` is the model's, `dtype` what both compute in. Raises Mismatch when the mean is over the limit or
        no number, and when draws are as unlikely as less than MIN_P_VALUE.
        """
        figures = self.compare_log_probs(spread, policy, key=key, max_positions=max_positions, dtype=dtype)
        return {**figures, **compare_draws(spread, policy, key=key)}

    def compare_log_probs(
        self,
        spread: DataParallelSampler,
        policy: Policy,
        *,
        key: Tensor,
        max_positions: int | None,
        dtype: torch.dtype,
    ) -> dict[str, float]:
        """The gap's mean and maximum; raises Mismatch as the call does."""
        limit, name = (FLOAT32_GAP, "FLOAT32_GAP") if dtype == torch.float32 else (self.max_gap, "Probe.max_gap")
        few = min(NEW_TOKENS, spread.sampler.max_new_tokens)
        short = replace(spread.sampler, max_new_tokens=few, max_total_tokens=None, on_completions=None)
        prompt = probe_prompt(short, None if max_positions is None else max_positions - few)
        problems = [Problem(uid, prompt, "", {}) for uid in range(spread.engines)]
        rollout = DataParallelSampler(short, spread.world).sample(problems, 1, key=key)
        gap = (policy.logp(rollout) - rollout.logp_sampled).abs()
        rows = [gap[row][rollout.mask[row]] for row in range(spread.engines)]
        worst, mean = max(enumerate(float(row.mean()) for row in rows), key=lambda x: (x[1] != x[1], x[1]))
        if not mean <= limit:
            raise Mismatch(
                f"engine {worst} of {spread.engines}: got log-probs that are {mean:.3g} nats from the policy's "
                f"in the mean of {len(rows[worst])} tokens, expected at most {limit:g} (probe.{name}): "
                "it samples from other weights, another temperature or in a coarser precision; docs/running/engines.md"
            )
        return {"engine/probe_gap_mean": float(torch.cat(rows).mean()), "engine/probe_gap_max": float(gap.max())}


def probe_prompt(sampler: SamplerOptions, max_positions: int | None) -> str:
    """A text of PROMPT_TOKENS tokens or a few more; of fewer where they do not fit."""
    text, most = TEXT, inf if max_positions is None else max_positions
    while len(sampler.encode(sampler.tokenizer, text)) < min(PROMPT_TOKENS, most):
        text += TEXT
    while len(sampler.encode(sampler.tokenizer, text)) > most and len(text) > CUT:
        text = text[:-CUT]
    return text


def compare_draws(spread: DataParallelSampler, policy: Policy, *, key: Tensor) -> dict[str, float]:
    """The p-value of the least likely engine; raises Mismatch where that is less than MIN_P_VALUE."""
    engines, sampler = spread.engines, spread.sampler
    short = replace(sampler, max_new_tokens=1, max_total_tokens=None, on_completions=None)
    # An engine has neighbouring problems; numbers that the first comparison does not use.
    problems = [Problem(engines + i, OPEN[i % len(OPEN)], "", {}) for i in range(engines * len(OPEN))]
    rollout = DataParallelSampler(short, spread.world).sample(problems, DRAWS, key=key)
    logp = policy.logp(rollout)[rollout.mask].view(engines, len(OPEN), DRAWS)
    tokens = rollout.tokens[rollout.mask].view(logp.shape)
    values = [
        p_value([count_outside(*pair) for pair in zip(*of_one, strict=True)])
        for of_one in zip(tokens, logp, strict=True)
    ]
    worst, lowest = min(enumerate(values), key=lambda x: x[1])
    if lowest < MIN_P_VALUE:
        raise Mismatch(
            f"engine {worst} of {engines}: got draws that the policy's distribution makes with a chance of "
            f"{lowest:.2g}, expected at least {MIN_P_VALUE:g}: it leaves tokens out (top-k, top-p, min-p), or draws at "
            "another temperature; docs/running/engines.md"
        )
    return {"engine/probe_draws_p_value": lowest}


# -- whether tokens were drawn from the policy's distribution: an exact test on their log-probs


class Outside(NamedTuple):
    """Of some draws after one prompt: how many are a token that those before had not shown, and the chance of each."""

    draws: int
    seen: int
    chance: float  # of each draw, by the policy


def count_outside(tokens: Tensor, logp: Tensor) -> Outside:
    """Of the second half of some draws after one prompt, those that are no token of the first half."""
    half = len(tokens) // 2
    shown = dict(zip(tokens[:half].tolist(), logp[:half].double().exp().tolist(), strict=True))
    outside = sum(token not in shown for token in tokens[half:].tolist())
    return Outside(len(tokens) - half, outside, min(max(1 - sum(shown.values()), 0.0), 1.0))


def p_value(counts: Sequence[Outside]) -> float:
    """How likely a total that is at least as far from what is expected is, two-sided; 1 at most.

    The total of independent binomial counts, of which each has its own chance, enumerated.
    """
    mass = [1.0]  # of 0, 1, 2, ... draws outside
    for count in counts:
        for _ in range(count.draws):
            stay, go = (1 - count.chance), count.chance
            mass = [stay * a + go * b for a, b in zip([*mass, 0.0], [0.0, *mass], strict=True)]
    total = sum(count.seen for count in counts)
    return min(1.0, 2 * min(sum(mass[: total + 1]), sum(mass[total:])))
