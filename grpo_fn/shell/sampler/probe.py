"""Whether an engine computes what the policy does: after every push it is asked, on the very path of training.

A few tokens are drawn for a fixed prompt, by each engine, and the policy says what it makes of them. An engine with old
weights in a corner of it (a tied head, a cache of prefixes), another temperature or another model is found out here,
whatever its checksums say.
"""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Policy
from grpo_fn.shell.sampler.data_parallel import DataParallelSampler

TEXT = "The quick brown fox jumps over the lazy dog, and 12 + 30 = 42. "
CUT = 8  # characters that go at a time where the text is too long


class Mismatch(RuntimeError):
    """Sampler and policy do not give the same tokens the same log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A check of an engine's log-probs against the policy's: prompt, completion and the largest gap that passes."""

    prompt_tokens: int  # at least so many where the model has as many positions: longer than a block of cached prefixes
    new_tokens: int  # that each engine draws; `max_new_tokens` where that is less
    max_gap: float  # mean |logp of the policy - logp of the sampler| that still passes, in nats

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that make no probe."""
        if self.prompt_tokens < 1 or self.new_tokens < 1 or not self.max_gap > 0:
            raise ValueError(
                f"probe: got prompt_tokens {self.prompt_tokens}, new_tokens {self.new_tokens}, max_gap {self.max_gap}, "
                "wanted at least 1, at least 1, more than 0"
            )

    def __call__(
        self, spread: DataParallelSampler, policy: Policy, *, key: Tensor, max_positions: int | None
    ) -> dict[str, float]:
        """The gap's mean and maximum over the tokens of all engines. Every rank has to take part.

        `max_positions` is the model's. Raises Mismatch when the mean is over `max_gap` or no number.
        """
        few = min(self.new_tokens, spread.sampler.max_new_tokens)
        short = replace(spread.sampler, max_new_tokens=few, max_total_tokens=None, on_completion=None)
        prompt = self.prompt(short, None if max_positions is None else max_positions - few)
        problems = [Problem(uid, prompt, "", {}) for uid in range(spread.engines)]
        rollout = DataParallelSampler(short, spread.world).sample(problems, 1, key=key)
        gap = (policy.logp(rollout) - rollout.logp_sampled).abs()
        rows = [gap[row][rollout.mask[row]] for row in range(spread.engines)]
        worst, mean = max(enumerate(float(row.mean()) for row in rows), key=lambda x: (x[1] != x[1], x[1]))
        if not mean <= self.max_gap:
            raise Mismatch(
                f"engine {worst} of {spread.engines}: got log-probs that are {mean:.3g} nats from the policy's "
                f"in the mean of {len(rows[worst])} tokens, wanted at most {self.max_gap:g} (probe.Probe.max_gap): it "
                "samples from other weights, another temperature or in a coarser precision; docs/engines.md"
            )
        return {"engine/probe_gap_mean": float(torch.cat(rows).mean()), "engine/probe_gap_max": float(gap.max())}

    def prompt(self, sampler: object, max_positions: int | None) -> str:
        """A text of `prompt_tokens` tokens or a few more; of fewer where they do not fit."""
        text, most = TEXT, inf if max_positions is None else max_positions
        while len(sampler.encode(sampler.tokenizer, text)) < min(self.prompt_tokens, most):
            text += TEXT
        while len(sampler.encode(sampler.tokenizer, text)) > most and len(text) > CUT:
            text = text[:-CUT]
        return text
