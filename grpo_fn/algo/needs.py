"""A scored step, and what a function declares that it reads of it: `f.NEEDS = frozenset({...})`.

A run provides it before weights are loaded.

    logp_ref        log-probs under a frozen copy of the start model
    logp_teacher    log-probs under a teacher
    energy          |d logp / d logits|^2 of every sampled token, one more forward pass
    logp_sampled    no provision: the function compares the policy with the sampler itself, so samples may be stale
    trainer_logp    logp_old from the trainer's own pass: the function compares it with the sampler's log-probs
    fresh_samples   samples of the current policy: no ratio corrects for those of an older one
    groups          two samples of a prompt or more: the function compares within a group
    demonstrations  given completions beside the sampled ones
    episodes        rows in which an environment answers

A function that reads logp_ref, logp_teacher or energy without declaring it ends with an error that says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from grpo_fn.core.batch import by_group, check_tensor
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.types import Gains, Groups, Reward, Rollout, Undeclared

PASSES = ("logp_ref", "logp_teacher", "energy")  # forward passes that a step makes for those who declare them


def needs(value: Any) -> frozenset[str]:
    """What a function and all functions among its knobs declare; also of a list or a mapping of functions.

    NEEDS may be a function of the knobs, which then speaks for them too: a KL with a coefficient of 0 is not there.
    """
    if isinstance(value, list | tuple):
        return frozenset().union(*map(needs, value))
    if isinstance(value, dict):
        return needs([*value.values()])
    if not callable(value):
        return frozenset()
    function, knobs = function_and_knobs(value)
    declared = getattr(function, "NEEDS", frozenset())
    return declared(knobs) if callable(declared) else declared | needs(dict(knobs))


@dataclass(frozen=True)
class ScoredStep:
    """A sampled and scored step, as credits see it. A forward pass over its rows is made when one first reads it."""

    groups: Groups
    passes: Mapping[str, Callable[[], Tensor]]  # name -> log-probs or energies of the rows, [B, T]
    needs: frozenset[str]  # that the algorithm declares; a credit reads logp_old and these
    gains: Gains
    steps: int  # taken before
    demonstrations: Callable[[int], Rollout] | None = None  # steps taken before -> given rows
    figures: dict[str, float] = field(default_factory=dict)  # metrics that functions of the step add
    results: dict[str, Tensor] = field(default_factory=dict)  # of the passes that were made

    def rows(self, name: str) -> Float[Tensor, "B T"]:
        """logp_old, logp_ref, logp_teacher (nats) or energy of every token."""
        if name in PASSES and name not in self.needs:
            Undeclared(name).read()
        if name not in self.results:
            self.results[name] = self.passes[name]()
        if self.results[name] is None:
            raise ValueError(
                f"got no {name} from the policy or the run, expected it: a function of the step declares it"
            )
        return self.results[name]

    def by_group(self, rows: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "P G T"]:
        """Row b = p * G + g to [p, g]."""
        return by_group(rows, len(self.groups.reward.value))

    @property
    def reward(self) -> Reward:
        """Rewards of the samples, [P, G]."""
        return self.groups.reward

    @property
    def mask(self) -> Tensor:
        """Which tokens were sampled, [P, G, T]."""
        return self.by_group(self.groups.rollout.mask)

    @property
    def drift(self) -> Float[Tensor, "P G T"]:
        """logp_old - logp_ref, times the gain of the KL: summed over a row the estimate k1 of its KL, in nats."""
        return self.gains.kl * self.by_group(self.rows("logp_old") - self.rows("logp_ref"))

    @property
    def teacher_gap(self) -> Float[Tensor, "P G T"]:
        """log pi_teacher - log pi_old, in nats."""
        return self.by_group(self.rows("logp_teacher") - self.rows("logp_old"))


def token_advantages(scored: ScoredStep, credit: Callable[[ScoredStep], Tensor] | None) -> Float[Tensor, "P G T"]:
    """The advantage of every token; zeros where no credit makes any: rewards are measured only."""
    if credit is None:
        return torch.zeros_like(scored.mask, dtype=scored.reward.value.dtype)
    adv = credit(scored)
    check_tensor("step.Algorithm.credit", adv, tuple(scored.mask.shape), torch.float32)
    return adv
