"""Sampling with vLLM: prompts become requests with seeds of their own, completions become rows of a rollout.

The engine may be in this process (`colocated_sampler`) or elsewhere. A row is a function of (weights, prompt, key, uid,
g) as far as the engine's arithmetic is one: every row has its own seed, but vLLM decides by itself what it computes
together, and where the rounding of a sum depends on that, a draw may fall the other way. What was drawn is stored.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.core import prng
from grpo_fn.core.batch import sample_keys
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.episodes.episode_rows import EpisodeRows
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.sampler.interface import (
    EngineCompletion,
    GenerationRequest,
    InferenceEngine,
    SamplerContext,
    SamplerOptions,
    SteppedEngine,
    TokenSampler,
    assemble,
    assemble_episodes,
    completion_limits,
    completion_of_row,
    ignore_completion,
    never_stop,
    positions,
    rank_share,
    smallest_limit,
)
from grpo_fn.shell.sampler.weight_export import FixedWeights, export_weights
from grpo_fn.shell.vllm.colocated import ColocatedEngine
from grpo_fn.shell.vllm.options import SEEDS, arguments, check_extra, merge_options, params, row_seeds
from grpo_fn.shell.world import World

# -- episodes: token ids in and out for each turn, and a seed of (key, uid, sample, turn)


def counts_steps(engine: InferenceEngine | SteppedEngine) -> bool:
    """Whether a row goes on after a counted number of steps of the engine, so that its bits are the same again."""
    if engine.ranks > 1:  # they have to ask for the same
        return True
    return not engine.overlaps and engine.repeatable and not engine.batch_invariant


class EngineEpisodes:
    """The episodes of a call. `tokens` are those behind each opening, `logp` that of the sampled ones.

    `waited` is the seconds in which no turn was drawn, as answers were waited for.
    """

    def __init__(
        self,
        engine: InferenceEngine | SteppedEngine,
        rows: EpisodeRows,
        keys: Int[Tensor, "B 2"],
        *,
        how: Mapping[str, Any],
        ended: Callable[[int], None],
    ) -> None:
        self.engine, self.rows, self.how, self.ended = engine, rows, how, ended
        self.keys = keys.cpu()
        self.group = len(rows.rows) // len(rows.prompts)
        self.tokens: list[list[int]] = [[] for _ in rows.rows]
        self.logp: list[list[float]] = [[] for _ in rows.rows]
        self.most = [rows.most(b) for b in range(len(rows.rows))]
        self.waited = 0.0
        # After so many steps a row's answer is waited for; None: it goes on when it has one.
        self.answer_steps = rows.of.answer_steps if counts_steps(engine) else None
        self._due: dict[int, int] = {}  # rows whose environments work, and the engine's step at which they go on
        self._opened = False
        self._seeds: dict[int, list[int]] = {}  # of every row, by turn
        self._lock, self._drawing, self._idle_since = threading.Lock(), 0, None

    def run(self, width: int) -> None:
        """Until all are over; `width` turns at once, where each is asked for by a thread of its own."""
        if self.engine.overlaps:
            self.run_apart(width)
        else:
            self.engine.generate_turns(self.due, how=self.how, on_turn=self.turn_ended)

    def ask(self, b: int) -> GenerationRequest:
        """The row so far, as a prompt."""
        n = len(self.rows.rows[b].turns)
        if n not in self._seeds:
            self._seeds[n] = prng.randint(prng.fold_in(self.keys, n), low=0, high=SEEDS).tolist()
        prompt = (*self.rows.prompts[b // self.group], *self.tokens[b])
        return GenerationRequest(prompt, (self._seeds[n][b],), self.most[b], near=b // self.group)

    def take(self, b: int, answer: EngineCompletion) -> bool:
        """A turn has ended; whether its environment is asked. If not, the episode is over."""
        self.tokens[b] += answer.tokens
        self.logp[b] += answer.logp
        if self.rows.end_turn(b, answer.tokens, stopped=answer.stopped):
            return True
        self.ended(b)
        return False

    def observe(self, b: int) -> bool:
        """Wait for the environment; whether the row goes on. If not, the episode is over."""
        more = self.rows.go_on(b)
        if more is None:
            self.ended(b)
            return False
        self.tokens[b] += more.observed
        self.most[b] = more.most
        return True

    # -- an engine in this process

    def due(self, steps: int, running: bool) -> list[tuple[int, GenerationRequest]]:
        """The rows whose next turns begin after so many steps; waits for some where no turn is `running`."""
        if not self._opened:
            self._opened = True
            return [(b, self.ask(b)) for b in range(len(self.rows.rows))]
        going: list[tuple[int, GenerationRequest]] = []
        while self._due and not going:
            begun = time.perf_counter()
            for b in self.ready(steps, running):
                del self._due[b]
                if self.observe(b):
                    going.append((b, self.ask(b)))
            self.waited += time.perf_counter() - begun
            if running:
                break
        return going

    def ready(self, steps: int, running: bool) -> list[int]:
        """Rows that go on now: whose answer is due, or there; where nothing is running, any row that waits."""
        if self.answer_steps is not None:
            return [b for b, step in self._due.items() if step <= steps or not running]
        return self.rows.rows_with_answers([*self._due], some=not running)

    def turn_ended(self, b: int, steps: int, answer: EngineCompletion) -> None:
        """The engine has drawn a row's turn, in its step with that number."""
        if self.take(b, answer):
            self._due[b] = steps + (self.answer_steps or 0)

    # -- servers

    def run_apart(self, width: int) -> None:
        """Every row by itself. A thread is taken by a turn that is drawn, by none whose environment works."""
        over: SimpleQueue[BaseException | None] = SimpleQueue()
        threads = ThreadPoolExecutor(min(width, len(self.rows.rows)), thread_name_prefix="episode")

        def turn(b: int, first: bool) -> None:
            try:
                if (first or self.observe(b)) and self.draw(b):
                    self.rows.rows[b].asked.add_done_callback(lambda _: go_on(b))
                    return
                over.put(None)
            except BaseException as error:
                over.put(error)

        def go_on(b: int) -> None:
            with suppress(RuntimeError):  # another row has failed, and the threads take nothing more
                threads.submit(turn, b, False)

        try:
            for b in range(len(self.rows.rows)):
                threads.submit(turn, b, True)
            for _ in self.rows.rows:
                if (error := over.get()) is not None:
                    raise error
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def draw(self, b: int) -> bool:
        """A row's next turn; whether its environment is asked."""
        with self.drawing():
            ((answer,),) = self.engine.generate([self.ask(b)], how=self.how, on_answer=ignore_completion)
        return self.take(b, answer)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A turn is drawn meanwhile: what lies between two such times, of whatever rows, has been waited."""
        with self._lock:
            if not self._drawing and self._idle_since is not None:
                self.waited += time.perf_counter() - self._idle_since
            self._drawing += 1
        try:
            yield
        finally:
            with self._lock:
                self._drawing -= 1
                self._idle_since = time.perf_counter()


def colocated_sampler(
    context: SamplerContext,
    options: SamplerOptions,
    *,
    max_model_len: int | None,
    extra: Mapping[str, Any],
    tensor_parallel: int,
    gpu_memory_utilization: float,
    kv_cache_bytes: int,
    enforce_eager: bool,
    generate_timeout: float,
) -> "VllmSampler":
    """A sampler whose engine shares process and device with the training.

    Args:
        context: the model that is trained, and its surroundings.
        options: what the run asks of its sampler; vLLM draws as sampling.greedy, categorical and nucleus alone.
        max_model_len: positions that the engine has memory for; None: the model's.
        extra: further fields of vLLM's SamplingParams.
        tensor_parallel: neighbouring ranks that are one engine together.
        gpu_memory_utilization: fraction of the GPU's memory that the engine has while it is awake.
        kv_cache_bytes: size of the KV cache on a CPU, beside the weights, bytes.
        enforce_eager: True compiles nothing.
        generate_timeout: longest call of the engine, seconds.

    Returns:
        The sampler, its engine started.

    Raises:
        ValueError: before the engine is started, for what vLLM does not draw; where it does not open the model.
    """
    how = arguments(
        context,
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
        max_rows=options.max_rows,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_bytes=kv_cache_bytes,
        enforce_eager=enforce_eager,
        detokenize=bool(options.stop),
    )
    engine = partial(ColocatedEngine, context, how, deadline=generate_timeout)
    return start_engine(engine, context, options, max_model_len, extra)


def dedicated_sampler(
    context: SamplerContext,
    options: SamplerOptions,
    *,
    max_model_len: int | None,
    extra: Mapping[str, Any],
    engine: Callable[[World, torch.dtype], InferenceEngine],
) -> "VllmSampler":
    """A sampler whose engine is elsewhere: `engine` makes what talks to it (vllm_servers.DedicatedEngine).

    Args:
        context: the model that is trained, and its surroundings.
        options: what the run asks of its sampler, as for `colocated_sampler`; a server bounds by itself what it
            decodes at once, `max_rows` is what `grpo_fn.eval` asks for at once.
        max_model_len: positions that the engine has memory for; None: the model's.
        extra: further fields of vLLM's SamplingParams.
        engine: (world, dtype) -> the client of the engine.

    Returns:
        The sampler.

    Raises:
        ValueError: for what vLLM does not draw, before there is an engine.
    """
    client = partial(engine, context.world, context.dtype)
    return start_engine(client, context, options, max_model_len, extra)


def start_engine(
    engine: Callable[[], InferenceEngine],
    context: SamplerContext,
    options: SamplerOptions,
    max_model_len: int | None,
    extra: Mapping[str, Any],
) -> "VllmSampler":
    """The sampler. Raises ValueError, before there is an engine, for what vLLM does not draw or training should not."""
    check_extra(extra, allow_biased=options.allow_biased)
    merge_options(params(options.token_sampler), extra)
    return VllmSampler(
        **vars(options),
        engine=engine(),
        context=context,
        ends=end_tokens(context, options.tokenizer),
        max_model_len=max_model_len,
        extra=extra,
    )


def end_tokens(context: SamplerContext, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion, as the local sampler has it."""
    bare = hf.empty_model(context.config)
    bare.generation_config = hf.generation_config(context.folder, context.config)
    return hf.stop_ids(tokenizer, bare)


@dataclass(frozen=True, kw_only=True)
class VllmSampler(SamplerOptions):
    """Samples from an engine; `dataclasses.replace` gives another way to ask the same one."""

    engine: InferenceEngine
    context: SamplerContext
    ends: Sequence[int]  # tokens that end a completion
    max_model_len: int | None
    extra: Mapping[str, Any]
    # Of the weights; other samplers on the same engine count on.
    versions: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for limits below 1, stop strings that stop at once, and what vLLM does not draw."""
        super().__post_init__()
        merge_options(params(self.token_sampler), self.extra)
        if self.environments is not None and not self.environments.pure and self.engine.ranks > 1:
            raise ValueError(
                f"episodes: got {self.environments.name}, which is not pure, with an engine of {self.engine.ranks} "
                "ranks, wanted an engine for each rank: those that share one have to observe the same"
            )
        if self.environments is not None and self.environments.answer_steps is None and self.engine.ranks > 1:
            raise ValueError(
                f"sections.Episodes.answer_steps: got None with an engine of {self.engine.ranks} ranks, wanted a "
                "number: ranks that share an engine have to go on at the same step"
            )

    ranks = property(attrgetter("engine.ranks"), doc="How many have the engine together; they sample the same.")
    overlaps = property(attrgetter("engine.overlaps"), doc="Whether it can sample while the policy trains.")
    mixes = property(attrgetter("engine.mixes"), doc="Whether a completion may have tokens of two versions of weights.")
    complaints = property(attrgetter("engine.complaints"), doc="Warnings for the log; cleared once logged.")

    @property
    def repeatable(self) -> bool:
        """Whether asked again it draws the same tokens."""
        counted = (
            self.environments is None or self.environments.answer_steps is not None or not counts_steps(self.engine)
        )
        return self.engine.repeatable and counted

    def load(self, policy: FSDPPolicy | FixedWeights) -> None:
        """Give the engine the policy's weights. Raises StaleEngine when it does not take them."""
        self.engine.push(export_weights(policy, self.context), version=next(self.versions))

    def rest(self) -> None:
        """The engine makes way for the training, until the next `load`."""
        self.engine.rest()

    def figures(self) -> dict[str, float]:
        """The engine's messages, and the environment's."""
        return {**self.engine.figures(), **({} if self.environments is None else self.environments.caller.figures())}

    def close(self) -> None:
        """The engine is not needed any more."""
        self.engine.close()

    def for_evaluation(self, token_sampler: TokenSampler, check: Callable[[], None] = never_stop) -> "VllmSampler":
        """The same engine, drawing with `token_sampler`; `check` is called with every completion that ends."""
        on_completions = None if check is never_stop else lambda *_: check()
        environments = self.environments and self.environments.without_tape()
        return replace(self, token_sampler=token_sampler, on_completions=on_completions, environments=environments)

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        """G completions of every problem. Row p * G + g has the seed that fold_in(key, uid, g) leads to."""
        if self.environments is not None:
            return self._sample_episodes(problems, group_size, key)
        prompts = [self.encode(self.tokenizer, problem.prompt) for problem in problems]
        limits = completion_limits(
            problems,
            prompts,
            max_new_tokens=self.max_new_tokens,
            max_total_tokens=self.max_total_tokens,
            positions=smallest_limit(positions(self.context.config), self.max_model_len),
        )
        seeds = row_seeds(key, [problem.uid for problem in problems], group_size)
        asks = [GenerationRequest(tuple(ids), *of_each) for ids, *of_each in zip(prompts, seeds, limits, strict=True)]
        on_answer = ignore_completion if self.on_completions is None else partial(self._on_answer, problems, group_size)
        answers = [
            answer for group in self.engine.generate(asks, how=self._how(), on_answer=on_answer) for answer in group
        ]
        device = self.context.world.device
        return assemble(
            self.tokenizer,
            prompts,
            [answer.tokens for answer in answers],
            torch.tensor([x for answer in answers for x in answer.logp], dtype=torch.float32, device=device),
            torch.tensor([answer.stopped for answer in answers], device=device),
        )

    def _sample_episodes(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Rollout:
        """G episodes of every problem; each turn of row p * G + g has a seed of its own."""
        context = smallest_limit(self.max_total_tokens, positions(self.context.config), self.max_model_len)
        rows = self.begin_episodes(problems, group_size, key, context)

        def ended(b: int) -> None:
            if self.on_completions is not None and b in self._own(len(rows.rows)):
                self.on_completions([problems[b // group_size]], [rows.completion(b)])

        how = {**self._how(), "stop_token_ids": [*self.ends, self.environments.chat.end]}
        episodes = EngineEpisodes(self.engine, rows, sample_keys(key, problems, group_size), how=how, ended=ended)
        episodes.run(self.max_rows)
        self.environments.caller.count("time/environment_wait", episodes.waited)
        logp = torch.tensor([x for row in episodes.logp for x in row], device=self.context.world.device)
        return assemble_episodes(rows, episodes.tokens, logp, self.tokenizer)

    def _own(self, rows: int) -> range:
        """The rows that are reported on this one of the engine's ranks: those that it will score."""
        return range(rows)[rank_share(rows, self.context.world.rank % self.ranks, self.ranks)]

    def _on_answer(
        self, problems: Sequence[Problem], group_size: int, p: int, g: int, answer: EngineCompletion
    ) -> None:
        """Report a row, on the one of the engine's ranks that has it among the rows that it will score."""
        if p * group_size + g in self._own(len(problems) * group_size):
            completion = completion_of_row(self.tokenizer, answer.tokens, stopped=answer.stopped)
            self.on_completions([problems[p]], [completion])

    def _how(self) -> dict[str, Any]:
        """Fields of SamplingParams. The ends are ours alone; a stop string is part of the completion, as any end is."""
        stops = {"stop": [*self.stop], "include_stop_str_in_output": True} if self.stop else {}
        ends = {"ignore_eos": True, "stop_token_ids": [*self.ends]}
        drawn = merge_options(params(self.token_sampler), self.extra)
        return {**drawn, **stops, **ends, "max_tokens": self.max_new_tokens}
