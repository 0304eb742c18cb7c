"""Work that rows do not share, spread over the ranks: sampling and scoring. Every rank gets all of what was found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_fn.groups import stacked
from grpo_fn.problem import Completion, Problem, RewardFn, Scorer
from grpo_fn.shell.world import World
from grpo_fn.types import Policy, Rollout


def share(items: int, rank: int, size: int) -> slice:
    """The items of a rank: in order, and as evenly as can be."""
    return slice(items * rank // size, items * (rank + 1) // size)


@dataclass(frozen=True)
class Spread:
    """A sampler of which every rank has one: each samples its share of the problems, and all see every row.

    A row depends on (weights, prompt, key, uid, g) alone, so it does not matter which rank samples it.
    """

    sampler: Any
    world: World

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """As the sampler's own."""
        mine = problems[share(len(problems), self.world.rank, self.world.size)]
        found = self.sampler.sample(mine, group_size, key=key) if mine else None
        parts = self.world.exchange(found, what="the others' completions")
        return stacked([part for part in parts if part is not None])

    def load(self, policy: Policy) -> None:
        """As the sampler's own; every rank takes part."""
        self.sampler.load(policy)


def spread_score(score: Scorer, world: World) -> Scorer:
    """The scorer, each rank scoring its share of the rows."""

    def spread(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        mine = share(len(problems), world.rank, world.size)
        scores = score(fn, problems[mine], completions[mine]) if problems[mine] else []
        return [x for part in world.exchange(scores, what="the others' rewards") for x in part]

    return score if world.size == 1 else spread
