"""Sampling from the policy's own module: every prompt read once, rows decoded in slots that are filled again."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from grpo_fn.core import prng, sampling
from grpo_fn.core.batch import sample_keys
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model.hf import stop_ids
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.sampler.interface import (
    FixedWeights,
    SamplerContext,
    SamplerOptions,
    TokenSampler,
    assemble,
    assemble_episodes,
    completion_limits,
    completion_of_row,
    never_stop,
    positions,
    smallest_limit,
)
from grpo_fn.shell.sampler.local import hf_cache_decode
from grpo_fn.shell.sampler.local.continuous_batching import ContinuousBatching, DecodeOptions, OnEnded
from grpo_fn.shell.sampler.local.cuda_steps import build_engine
from grpo_fn.shell.sampler.local.decode_step import DecodeEngine, Stops, decoding_unsupported_reason
from grpo_fn.shell.sampler.local.turn_batching import TurnBatching


class SharedDecoder:
    """What a sampler, and those that differ from it in how they choose tokens, have together from call to call.

    One of them decodes at a time: an evaluation may ask while the next batch is being sampled in another thread.
    """

    def __init__(self) -> None:
        self.alone = Lock()
        self.engine: DecodeEngine | None = None
        self.model: nn.Module | None = None
        self.stops: Stops | None = None

    def decoder(self, model: nn.Module, device: torch.device) -> DecodeEngine | None:
        """The model's engine; None, and once a warning, where it has to be decoded in another way."""
        if self.model is not model:
            reason = decoding_unsupported_reason(model, device)
            self.model, self.engine = model, build_engine(model) if reason is None else None
            if reason is not None:
                warnings.warn(
                    f"{type(model).__name__} is decoded with a cache that grows, not in slots: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.engine

    def scan_stops(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> Stops:
        """The stop strings, looked up in the tokenizer's vocabulary once."""
        now, stops = (tokenizer, tuple(stop), size), self.stops
        if stops is None or (stops.tokenizer, stops.stop, len(stops.suspect)) != now:
            self.stops = Stops(tokenizer, stop, size)
        return self.stops


def local(context: SamplerContext, options: SamplerOptions) -> "LocalSampler":
    """A sampler from a module in this process: no engine besides torch and transformers.

    Args:
        context: the model that is trained, and its surroundings.
        options: what the run asks of its sampler.

    Returns:
        The sampler.
    """
    return LocalSampler(**vars(options), model=context.full_model())


@dataclass(frozen=True, kw_only=True)
class LocalSampler(SamplerOptions):
    """Samples from `model`: the policy's own module where that is whole and computes in its dtype, else one of ours."""

    model: nn.Module
    check: Callable[[], None] = never_stop  # called every few decode steps; what it raises ends them
    shared: SharedDecoder = field(default_factory=SharedDecoder, repr=False, compare=False)
    ranks: ClassVar[int] = 1  # that have one of it together
    overlaps: ClassVar[bool] = False  # it cannot sample while its device trains
    mixes: ClassVar[bool] = False

    @property
    def repeatable(self) -> bool:
        """Whether the same problems and key bring the same tokens again."""
        return self.environments is None or self.environments.answer_steps is not None

    @property
    def complaints(self) -> list[str]:
        """It has none."""
        return []

    @torch.no_grad()
    def load(self, policy: FSDPPolicy | FixedWeights) -> None:
        """Take the policy's weights, tensor by tensor; nothing to do where the module is shared."""
        if policy.model is self.model:
            return
        own = self.model.state_dict(keep_vars=True)
        for name, weight in policy.weights(trained=True):
            own[name].copy_(weight)

    def prepare(self) -> None:
        """Choose how rows are decoded, by trials on this device, as the first call would; done once."""
        with self.shared.alone:
            self.shared.decoder(self.model, next(self.model.parameters()).device)

    def rest(self) -> None:
        """Nothing is held between two calls but the weights, and on CUDA what captured steps need if it is small."""
        if self.shared.engine is not None:
            self.shared.engine.rest()

    def figures(self) -> dict[str, float]:
        """What environments took and lost since the last call."""
        return {} if self.environments is None else self.environments.caller.figures()

    def close(self) -> None:
        """There is nothing to close."""

    def for_evaluation(self, token_sampler: TokenSampler, check: Callable[[], None] = never_stop) -> "LocalSampler":
        """The same engine, drawing with `token_sampler`; `check` is called every few decode steps."""
        environments = self.environments and self.environments.without_tape()
        return replace(self, token_sampler=token_sampler, on_completions=None, check=check, environments=environments)

    @torch.no_grad()
    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """G completions of every problem. Row p * G + g draws from fold_in(key, uid, g) and from nothing else."""
        if self.environments is not None:
            return self._sample_episodes(problems, group_size, key)
        device = next(self.model.parameters()).device
        prompts = [self.encode(self.tokenizer, problem.prompt) for problem in problems]
        limits = completion_limits(
            problems,
            prompts,
            max_new_tokens=self.max_new_tokens,
            max_total_tokens=self.max_total_tokens,
            positions=positions(self.model.config),
        )
        limit = torch.tensor(limits, dtype=torch.long, device=device).repeat_interleave(group_size)
        u = self._draws(problems, group_size, key.to(device))

        def completion(row: int, tokens: list[int], stopped: bool) -> Completion:
            return completion_of_row(self.tokenizer, tokens, stopped=stopped)

        with self.shared.alone:
            options = self._options(self.stop, [], self._on_ended(problems, group_size, completion))
            engine = self.shared.decoder(self.model, device)
            if engine is None:
                decoded = hf_cache_decode.decode(self.model, prompts, u, limit, options)
            else:
                decoded = ContinuousBatching(engine, prompts, u, limit, options).run()
        completions = [row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.length.tolist(), strict=True)]
        drawn = torch.arange(self.max_new_tokens, device=device) < decoded.length[:, None]
        return assemble(self.tokenizer, prompts, completions, decoded.logp[drawn], decoded.stopped)

    def _draws(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Tensor:
        """The uniform numbers of every row, `[P G, max_new_tokens]`, of the token sampler's dtype held in float64."""
        keys, dtype = sample_keys(key, problems, group_size), sampling.uniform_dtype(self.token_sampler)
        return prng.uniform(keys, self.max_new_tokens, low=0.0, high=1.0, dtype=dtype).double()

    def _sample_episodes(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Rollout:
        """G episodes of every problem, in slots that hold all that stands behind an opening."""
        device = next(self.model.parameters()).device
        context = smallest_limit(self.max_total_tokens, positions(self.model.config))
        if context is None:
            raise ValueError(
                "episodes: got a model without a limit on positions, expected sections.Sampling.max_total_tokens"
            )
        with self.shared.alone:
            engine = self.shared.decoder(self.model, device)
            if engine is None:
                raise ValueError(
                    f"episodes: got {type(self.model).__name__}, which is decoded with a cache that grows, expected a "
                    "model that is decoded in slots (a warning says why this one is not)"
                )
            rows = self.begin_episodes(problems, group_size, key, context)
            u, width = self._draws(problems, group_size, key.to(device)), context - 1
            u = pad(u, (0, max(0, width - u.shape[1])))[:, :width].contiguous()
            limit = torch.tensor([rows.most(b) for b in range(len(u))], device=device)  # of the first turns
            on_ended = self._on_ended(problems, group_size, lambda row, *_: rows.completion(row))
            options = self._options((), [rows.of.chat.end], on_ended)
            batching = TurnBatching(engine, rows.prompts, u, limit, options, rows)
            decoded = batching.run()
        rows.of.caller.count("time/environment_wait", batching.pending.waited)
        tokens = [row[:n] for row, n in zip(decoded.tokens.tolist(), decoded.length.tolist(), strict=True)]
        # All rows at once: on a card a mask of each row's own would be waited for row by row.
        drawn = [b * width + t for b, row in enumerate(rows.rows) for t, sampled in enumerate(row.mask()) if sampled]
        logp = decoded.logp.flatten()[torch.tensor(drawn, device=device)]
        return assemble_episodes(rows, tokens, logp, self.tokenizer)

    def _options(self, stop: Sequence[str], turn_end: list[int], on_ended: OnEnded | None) -> DecodeOptions:
        return DecodeOptions(
            token_sampler=self.token_sampler,
            end_tokens=[*stop_ids(self.tokenizer, self.model), *turn_end],
            stops=self.shared.scan_stops(self.tokenizer, stop, self.model.config.get_text_config().vocab_size),
            slots=self.max_rows,
            pad=self.tokenizer.eos_token_id,
            on_ended=on_ended,
            check=self.check,
        )

    def _on_ended(
        self,
        problems: Sequence[Problem],
        group_size: int,
        completion: Callable[[int, list[int], bool], Completion],
    ) -> OnEnded | None:
        """A function that calls `on_completions` for the rows with these numbers; None without `on_completions`."""
        if self.on_completions is None:
            return None

        def report(rows: Sequence[int], tokens: Sequence[list[int]], stopped: Sequence[bool]) -> None:
            completions = [completion(*row) for row in zip(rows, tokens, stopped, strict=True)]
            self.on_completions([problems[row // group_size] for row in rows], completions)

        return report
