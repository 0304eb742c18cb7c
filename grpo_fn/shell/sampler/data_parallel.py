"""Work that rows do not share, spread over the ranks: sampling and scoring. Every rank gets all of what was found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from grpo_fn.core.groups import concat_rollouts
from grpo_fn.core.problem import Completion, Problem, RewardFn, Scorer
from grpo_fn.core.types import Policy, Rollout
from grpo_fn.shell.world import World

T = TypeVar("T")


def rank_share(items: int, rank: int, size: int) -> slice:
    """The items of a rank: in order, and as evenly as can be."""
    return slice(items * rank // size, items * (rank + 1) // size)


def engine_share(items: Sequence[T], sampler: Any, world: World) -> Sequence[T]:
    """The items that this rank's engine works on; `sampler.ranks` neighbours have one engine together."""
    return items[rank_share(len(items), world.rank // sampler.ranks, world.size // sampler.ranks)]


def gather_rollouts(found: Rollout | None, sampler: Any, world: World) -> Rollout:
    """The rollouts of all engines, one after another; every rank brings that of its own."""
    speaks = world.rank % sampler.ranks == 0
    parts = world.exchange(found if speaks else None, what="the others' completions")
    return concat_rollouts([part for part in parts if part is not None])


@dataclass(frozen=True)
class DataParallelSampler:
    """A sampler of which every rank has one: each samples its share of the problems, and all see every row.

    A row depends on (weights, prompt, key, uid, g) alone, so it does not matter which rank samples it. `probe` is asked
    after every `load` whether sampler and policy agree; what it finds is among the figures.
    """

    sampler: Any
    world: World
    probe: Callable[["DataParallelSampler", Policy], dict[str, float]] | None = None
    _probe_figures: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def engines(self) -> int:
        """How many there are."""
        return self.world.size // self.sampler.ranks

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """As the sampler's own."""
        asked = engine_share(problems, self.sampler, self.world)
        found = self.sampler.sample(asked, group_size, key=key) if asked else None
        return gather_rollouts(found, self.sampler, self.world)

    def load(self, policy: Policy) -> None:
        """As the sampler's own; every rank takes part."""
        self.world.together(partial(self.sampler.load, policy), what="new weights for the sampler")
        if self.probe is not None:
            self._probe_figures.update(self.probe(self, policy))

    def rest(self) -> None:
        """As the sampler's own."""
        self.sampler.rest()

    def figures(self) -> dict[str, float]:
        """Messages since the last call."""
        figures = {**self._probe_figures, **self.sampler.figures()}
        self._probe_figures.clear()
        return figures

    def close(self) -> None:
        """As the sampler's own."""
        self.sampler.close()


def spread_score(score: Scorer, world: World) -> Scorer:
    """The scorer, each rank scoring its share of the rows."""

    def spread(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        own = rank_share(len(problems), world.rank, world.size)
        scores = score(fn, problems[own], completions[own]) if problems[own] else []
        return [x for part in world.exchange(scores, what="the others' rewards") for x in part]

    return score if world.size == 1 else spread
