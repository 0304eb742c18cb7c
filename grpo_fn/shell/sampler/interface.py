"""The inputs and outputs of samplers, and `DataParallelSampler`, which shares sampling among ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.batch import concat_rollouts
from grpo_fn.core.problem import Completion, Problem, RewardFn, Scorer
from grpo_fn.core.types import Policy, Rollout, Sampler
from grpo_fn.shell.episodes.episode_rows import Environments, EpisodeRows
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.hf import Encode
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.world import World

OnCompletions = Callable[[Sequence[Problem], Sequence[Completion]], None]
# (logits [B V], u [B]) -> (token [B], logp [B]): sampling.categorical, sampling.greedy, ...
TokenSampler = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class SamplerContext:
    """What there is to make a sampler from: the model that is trained, and where."""

    folder: str  # a Hugging Face model folder, with the weights the run began with
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    world: World
    adapters: LoRA | None
    full_model: Callable[[], nn.Module]  # a whole module to sample from: the trained one itself where it is whole


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """What a run asks of its sampler, whichever engine that has."""

    tokenizer: PreTrainedTokenizerBase
    token_sampler: TokenSampler
    encode: Encode
    max_new_tokens: int  # of a completion
    stop: Sequence[str]  # texts that end a completion
    max_rows: int  # decoded at once
    max_total_tokens: int | None = None  # of a prompt and its completion together; None: no such limit
    # Called with completions, those that their rollout will have, as soon as they have ended, in whatever thread: rows
    # that the sampler learns of together come in one call, as one message to the workers is cheaper than many.
    on_completions: OnCompletions | None = None
    environments: Environments | None = None  # of rows that are episodes

    def __post_init__(self) -> None:
        """Raise ValueError for limits below 1 and for stop strings that would stop at once or letter by letter."""
        for name, limit in (("max_new_tokens", self.max_new_tokens), ("max_rows", self.max_rows)):
            if limit < 1:
                raise ValueError(f"{name}: got {limit}, expected at least 1")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop: got {self.stop!r}, expected a tuple of strings that are not empty")

    def begin_episodes(
        self, problems: Sequence[Problem], group_size: int, key: Tensor, context: int | None
    ) -> EpisodeRows:
        """G episodes of every problem. Raises ValueError for an opening that leaves no token of the `context`."""
        limit = self.max_new_tokens
        rows = self.environments.begin(problems, group_size, key=key, max_tokens=limit, context=context)
        one_token = {"max_new_tokens": 1, "max_total_tokens": self.max_total_tokens, "positions": context}
        completion_limits(problems, rows.prompts, **one_token)
        return rows


def never_stop() -> None:
    """Sampling always continues."""


class EngineRefused(RuntimeError):
    """An engine must not be sampled from: it ends a run with one line, which says all there is to know."""


class FixedWeights(NamedTuple):
    """A model that does not train, for a sampler to take its weights from."""

    model: nn.Module
    world: World

    def named_tensors(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer once, under the model's own names."""
        return hf.named_tensors(self.model)


@runtime_checkable
class EngineSampler(Sampler, Protocol):
    """A sampler of one rank: what factories named by `sections.Sampling.sampler` return.

    Implementations: LocalSampler, VllmSampler.
    """

    max_rows: int  # sequences decoded at once
    complaints: list[str]  # texts for people, to be cleared once they are logged
    ranks: int  # that have one engine together
    overlaps: bool  # whether it can sample while the policy trains
    repeatable: bool  # whether the same request brings the same tokens
    mixes: bool  # whether a completion may have tokens of several versions of the weights

    def figures(self) -> dict[str, float]:
        """Metrics since the last call."""

    def for_evaluation(
        self,
        token_sampler: TokenSampler,
        check: Callable[[], None] = never_stop,
        on_completions: OnCompletions | None = None,
    ) -> "EngineSampler":
        """The same engine, drawing with `token_sampler`; `check` is called often, and may raise to end `sample`.

        `on_completions` is that of `SamplerOptions`.
        """

    def close(self) -> None: ...


# What `sections.Sampling.sampler` names.
SamplerFactory = Callable[[SamplerContext, SamplerOptions], EngineSampler]


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens a row may have at most; None where the model sets no limit."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return short_positions(config) or most


def short_positions(config: PretrainedConfig) -> int | None:
    """How many tokens a row has at most under the short factors of "longrope"; None for other models.

    One longer row changes the frequencies of all rows in a call: a row's log-probs would depend on its neighbours.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    original = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(original, default=None)


def completion_limits(
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_total_tokens: int | None,
    positions: int | None,
) -> list[int]:
    """Most tokens of each prompt's completion: `max_new_tokens`, or what its prompt leaves of `max_total_tokens`.

    Raises ValueError, naming the problem, for an empty prompt and one that leaves no tokens for its completion.
    """
    limits = []
    for problem, ids in zip(problems, prompts, strict=True):
        if not ids:
            raise ValueError(f"got problem {problem.uid} whose prompt has no tokens; expected at least one")
        if max_total_tokens is not None and len(ids) >= max_total_tokens:
            raise ValueError(
                f"got problem {problem.uid} with {len(ids)} prompt tokens, expected fewer than max_total_tokens "
                f"{max_total_tokens}, which is for prompt and completion together"
            )
        limit = max_new_tokens if max_total_tokens is None else min(max_new_tokens, max_total_tokens - len(ids))
        if positions is not None and len(ids) + limit > positions:
            raise ValueError(
                f"got problem {problem.uid} with {len(ids)} prompt tokens and max_new_tokens "
                f"{limit}, expected at most {positions} positions together"
            )
        limits.append(limit)
    return limits


def completion_of_row(tokenizer: PreTrainedTokenizerBase, completion: list[int], *, stopped: bool) -> Completion:
    """A row as a reward sees it, before there is a rollout: what `assemble` makes of it says the same."""
    (text,) = tokenizer.batch_decode([completion], skip_special_tokens=True)
    return Completion(text, len(completion), not stopped)


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[list[int]],
    logp: Tensor,
    stopped: Tensor,
) -> Rollout:
    """Rows `[prompt | completion | padding]`, as wide as the longest, on the device of `logp`.

    The completions of a prompt follow one another, as many for each. `logp` is that of all their tokens, one
    completion's after the other's; `stopped [B]` says which ended by themselves.
    """
    rows, device = len(completions), logp.device
    of_each = [prompt for prompt in prompts for _ in range(rows // len(prompts))]
    start = torch.tensor([len(prompt) for prompt in of_each], device=device)
    end = start + torch.tensor([len(completion) for completion in completions], device=device)
    column = torch.arange(int(end.max()), device=device)
    mask = (column >= start[:, None]) & (column < end[:, None])
    ids = [token for row in zip(of_each, completions, strict=True) for part in row for token in part]
    tokens = torch.full(mask.shape, tokenizer.eos_token_id, device=device)
    tokens[column < end[:, None]] = torch.tensor(ids, device=device)
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp_sampled=torch.zeros(mask.shape, device=device).masked_scatter(mask, logp),
        truncated=~stopped,
        text=tuple(tokenizer.batch_decode(list(completions), skip_special_tokens=True)),
    )


def assemble_episodes(
    rows: EpisodeRows, tokens: Sequence[list[int]], logp: Tensor, tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    """Rows `[opening | turn | observation | turn | ... | padding]`; `tokens` are those behind each opening.

    `logp` is that of all sampled tokens, one row's after the other's. Texts are those of the last turns.
    """
    whole = assemble(
        tokenizer, rows.prompts, tokens, logp.new_zeros(sum(map(len, tokens))), logp.new_ones(len(tokens)) > 0
    )
    sampled = torch.tensor([drawn for row in rows.rows for drawn in row.mask()], device=logp.device)
    mask = torch.zeros_like(whole.mask).masked_scatter(whole.mask, sampled)
    completions = rows.completions()
    return whole._replace(
        mask=mask,
        logp_sampled=torch.zeros(mask.shape, device=logp.device).masked_scatter(mask, logp),
        truncated=torch.tensor([completion.truncated for completion in completions], device=logp.device),
        text=tuple(completion.text for completion in completions),
        turns=tuple(completion.turns for completion in completions),
    )


def smallest_limit(*limits: int | None) -> int | None:
    """The smallest; None without any."""
    return min((n for n in limits if n is not None), default=None)


# -- sampling and scoring spread over the ranks: each rank does its share of the rows and gets all results


T = TypeVar("T")

COMPLAINTS = 8  # kept until they are logged


def rank_share(items: int, rank: int, size: int) -> slice:
    """The items of a rank: in order, and as evenly as can be."""
    return slice(items * rank // size, items * (rank + 1) // size)


def engine_share(items: Sequence[T], sampler: EngineSampler, world: World) -> Sequence[T]:
    """The items that this rank's engine works on; `sampler.ranks` neighbours have one engine together."""
    return items[rank_share(len(items), world.rank // sampler.ranks, world.size // sampler.ranks)]


def gather_rollouts(rollout: Rollout | None, sampler: EngineSampler, world: World) -> Rollout:
    """The rollouts of all engines, one after another; every rank brings that of its own."""
    speaks = world.rank % sampler.ranks == 0
    parts = world.exchange(rollout if speaks else None, what="the others' completions")
    return concat_rollouts([part for part in parts if part is not None])


class DataParallelSampler:
    """A sampler of which every rank has one: each samples its share of the problems, and all see every row.

    A row depends on (weights, prompt, key, uid, g) alone, so it does not matter which rank samples it. `probe` is
    called after every `load` with this sampler and the policy; what it finds is among the figures.
    """

    max_staleness = 0  # batches sampled ahead: `AsyncSampler`

    def __init__(
        self,
        sampler: EngineSampler,
        world: World,
        probe: Callable[["DataParallelSampler", Policy], dict[str, float]] | None = None,
    ) -> None:
        self.sampler, self.world, self.probe = sampler, world, probe
        self.complaints: list[str] = []
        self._probe_figures: dict[str, float] = {}
        self._ages: list[int] = []  # in versions of the weights, of the batches since the last figures
        self._waited = 0.0  # seconds that steps waited for them

    @property
    def engines(self) -> int:
        return self.world.size // self.sampler.ranks

    @property
    def repeatable(self) -> bool:
        return self.sampler.repeatable

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        start = time.monotonic()
        share = engine_share(problems, self.sampler, self.world)
        rollout = self.sampler.sample(share, group_size, key=key) if share else None
        whole = gather_rollouts(rollout, self.sampler, self.world)
        self._ages.append(0)
        self._waited += time.monotonic() - start
        return whole

    def load(self, policy: Policy) -> None:
        """As the sampler's own; every rank takes part."""
        self.world.together(partial(self.sampler.load, policy), what="new weights for the sampler")
        if self.probe is not None:
            self._probe_figures.update(self.probe(self, policy))

    def rest(self) -> None:
        self.sampler.rest()

    def drain(self) -> list[dict[str, Any]]:
        """Batches sampled ahead: none."""
        return []

    def refill(self, drained: Sequence[Mapping[str, Any]]) -> None:
        """Take back what a run with staleness drained: it is dropped, and complained of."""
        self.drop_drained(drained)

    def drop_drained(self, drained: Sequence[Mapping[str, Any]]) -> bool:
        """Whether drained batches get too stale before they are used, and are dropped; then it is complained of."""
        ages = [batch["age"] for batch in drained]
        too_stale = any(
            age + place > self.max_staleness for place, age in enumerate(ages)
        )  # a batch a version, at least
        if too_stale:
            self.complain(
                f"dropped {len(ages)} batches sampled ahead: got some of {ages} versions ago, the first to be used "
                f"first, expected none that gets over max_staleness {self.max_staleness}"
            )
        return too_stale

    def figures(self) -> dict[str, float]:
        """Metrics since the last call, the sampler's own included.

        `generation/staleness` and `generation/staleness_max` of the batches that were used, in versions, and
        `generation/wait_seconds`, for which the steps waited for them.
        """
        ages = self._ages
        stale = {"generation/staleness": fmean(ages), "generation/staleness_max": float(max(ages))} if ages else {}
        own = {**self._probe_figures, **self.sampler.figures()}
        figures = {**own, **stale, "generation/wait_seconds": self._waited}
        self._probe_figures, self._ages, self._waited = {}, [], 0.0
        return figures

    def messages(self) -> list[str]:
        """Lines for the log since the last call, the sampler's own included."""
        messages = [*self.complaints, *self.sampler.complaints]
        self.complaints.clear()
        self.sampler.complaints.clear()
        return messages

    def complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS:
            self.complaints.append(text)

    def close(self) -> None:
        self.sampler.close()


def spread_score(score: Scorer, world: World) -> Scorer:
    """The scorer, each rank scoring its share of the rows."""

    def spread(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
        own = rank_share(len(problems), world.rank, world.size)
        scores = score(fn, problems[own], completions[own]) if problems[own] else []
        return [x for part in world.exchange(scores, what="the others' rewards") for x in part]

    return score if world.size == 1 else spread
