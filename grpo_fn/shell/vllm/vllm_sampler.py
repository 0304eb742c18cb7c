"""Sampling with vLLM: prompts become requests with their own seeds, completions become rows of a rollout.

The engine may be in this process (`colocated_sampler`) or elsewhere. A row is a function of (weights, prompt, key, uid,
g) as far as the engine's arithmetic is one: every row has its own seed, but vLLM decides by itself what it computes
together, and where the rounding of a sum depends on that, a draw may fall the other way. What was drawn is stored.
"""

import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout
from grpo_fn.shell.episodes.episode_rows import EpisodeRows, GoesOn, PendingAnswers
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.policy.fsdp import FSDPPolicy, full_tensor
from grpo_fn.shell.sampler.interface import (
    FixedWeights,
    OnCompletions,
    SamplerContext,
    SamplerOptions,
    TokenSampler,
    assemble,
    assemble_episodes,
    completion_limits,
    completion_of_row,
    never_stop,
    positions,
    rank_share,
    smallest_limit,
)
from grpo_fn.shell.vllm.colocated import ColocatedEngine, EngineOptions
from grpo_fn.shell.vllm.engine import (
    SEEDS,
    EngineCompletion,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
    SteppedEngine,
    row_seeds,
    sampling_params,
)
from grpo_fn.shell.vllm.fingerprint import HEAD
from grpo_fn.shell.world import World

# -- episodes: token ids in and out for each turn, and a seed of (key, uid, sample, turn)


def counts_steps(engine: InferenceEngine | SteppedEngine) -> bool:
    """Whether a row continues after a counted number of steps of the engine, so that its bits are the same again."""
    if engine.ranks > 1:  # they have to send the same requests
        return True
    return not engine.overlaps and engine.repeatable and not engine.batch_invariant


class EngineEpisodes:
    """The episodes of a call. `tokens` are those behind each opening, `logp` that of the sampled ones."""

    def __init__(
        self,
        engine: InferenceEngine | SteppedEngine,
        rows: EpisodeRows,
        keys: Int[Tensor, "B 2"],
        *,
        params: SamplingParams,
        on_end: Callable[[int], None],
    ) -> None:
        self.engine, self.rows, self.params, self.on_end = engine, rows, params, on_end
        self.keys = keys.cpu()
        self.group = len(rows.rows) // len(rows.prompts)
        self.tokens: list[list[int]] = [[] for _ in rows.rows]
        self.logp: list[list[float]] = [[] for _ in rows.rows]
        self.most = [rows.most(b) for b in range(len(rows.rows))]
        self.pending = PendingAnswers(rows, rows.of.answer_steps if counts_steps(engine) else None)
        self._opened = False
        self._seeds: dict[int, list[int]] = {}  # of every row, by turn
        self._lock, self._drawing, self._idle_since = threading.Lock(), 0, None

    def run(self, width: int) -> None:
        """Until all are over; `width` turns at once, if each is drawn by its own thread."""
        if self.engine.overlaps:
            self.run_apart(width)
        else:
            self.engine.generate_turns(self.due, params=self.params, on_turn=self.on_turn)

    def request(self, b: int) -> GenerationRequest:
        """The row so far, as a prompt."""
        n = len(self.rows.rows[b].turns)
        if n not in self._seeds:
            self._seeds[n] = prng.randint(prng.fold_in(self.keys, n), low=0, high=SEEDS).tolist()
        prompt = (*self.rows.prompts[b // self.group], *self.tokens[b])
        return GenerationRequest(prompt, (self._seeds[n][b],), self.most[b], prefix=b // self.group)

    def end_turn(self, b: int, answer: EngineCompletion) -> bool:
        """Take in a turn; whether its environment answers. If not, the episode is over."""
        self.tokens[b] += answer.tokens
        self.logp[b] += answer.logp
        answers = self.rows.end_turn(b, answer.tokens, stopped=answer.stopped)
        if not answers:
            self.on_end(b)
        return answers

    def observe(self, b: int, answer: GoesOn | None) -> bool:
        """Take in what the environment answered; whether the row continues. If not, the episode is over."""
        if answer is None:
            self.on_end(b)
            return False
        self.tokens[b] += answer.observed
        self.most[b] = answer.most
        return True

    # -- an engine in this process

    def due(self, steps: int, running: bool) -> list[tuple[int, GenerationRequest]]:
        """The rows whose next turns begin after so many steps; waits for some if no turn is `running`."""
        if not self._opened:
            self._opened = True
            return [(b, self.request(b)) for b in range(len(self.rows.rows))]
        going: list[int] = []
        while self.pending.due and not going:
            ready = self.pending.ready(steps, idle=not running)
            going = [b for b in ready if self.observe(b, self.pending.take(b))]
            if running:
                break
        return [(b, self.request(b)) for b in going]

    def on_turn(self, b: int, steps: int, answer: EngineCompletion) -> None:
        """The engine has drawn a row's turn, in its step with that number."""
        if self.end_turn(b, answer):
            self.pending.add(b, steps)

    # -- servers

    def run_apart(self, width: int) -> None:
        """Every row by itself. A thread is taken by a turn that is drawn, by none whose environment works."""
        over: SimpleQueue[BaseException | None] = SimpleQueue()
        threads = ThreadPoolExecutor(min(width, len(self.rows.rows)), thread_name_prefix="episode")

        def turn(b: int, first: bool) -> None:
            try:
                if (first or self.observe(b, self.rows.go_on(b))) and self.draw(b):
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
        """Draw a row's next turn; whether its environment answers."""
        with self.drawing():
            ((answer,),) = self.engine.generate([self.request(b)], params=self.params)
        return self.end_turn(b, answer)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A turn is drawn meanwhile: between two such times, of whatever rows, answers were waited for."""
        with self._lock:
            if not self._drawing and self._idle_since is not None:
                self.pending.waited += time.perf_counter() - self._idle_since
            self._drawing += 1
        try:
            yield
        finally:
            with self._lock:
                self._drawing -= 1
                self._idle_since = time.perf_counter()


# -- weights for an engine


class GatheredWeights(UserDict[str, Tensor]):
    """Tensors that may be spread over the ranks, gathered when they are looked up; every rank has to do so alike."""

    def __init__(self, tensors: Mapping[str, Tensor], world: World) -> None:
        super().__init__(tensors)
        self.world = world

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor."""
        with self.world.talking(f"gathering {name}"):
            return full_tensor(self.data[name])


def export_weights(policy: FSDPPolicy | FixedWeights, context: SamplerContext) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the whole model, in the dtype it is computed in; adapters are merged into their layers.

    Never more than one weight (with adapters: one and its A and B) is gathered at a time. A tied embedding comes a
    second time as the head: an engine that has copied it into another layout would go on with the old one. Every rank
    has to go through all of it.
    """
    tensors = GatheredWeights(policy.named_tensors(), policy.world)
    tied = context.config.get_text_config().tie_word_embeddings
    for name, tensor in tensors.items() if context.adapters is None else lora.merge_adapters(tensors, context.adapters):
        weight = tensor.to(context.dtype) if tensor.is_floating_point() else tensor
        yield name, weight
        if tied and name.endswith("embed_tokens.weight"):
            yield HEAD, weight


# -- samplers


def colocated_sampler(
    context: SamplerContext,
    options: SamplerOptions,
    *,
    max_model_len: int | None,
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
    sampling_params(options.token_sampler)  # raises before an engine is started
    engine_options = EngineOptions(
        tensor_parallel=tensor_parallel,
        max_model_len=max_model_len,
        max_rows=options.max_rows,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_bytes=kv_cache_bytes,
        enforce_eager=enforce_eager,
        detokenize=bool(options.stop),
        generate_timeout=generate_timeout,
    )
    ends = end_tokens(context, options.tokenizer)
    engine = ColocatedEngine(context, engine_options)
    return VllmSampler(**vars(options), engine=engine, context=context, ends=ends, max_model_len=max_model_len)


def dedicated_sampler(
    context: SamplerContext,
    options: SamplerOptions,
    *,
    engine: Callable[[World, torch.dtype], InferenceEngine],
) -> "VllmSampler":
    """A sampler whose engine is elsewhere: `engine` makes what talks to it (vllm_servers.DedicatedEngine).

    Args:
        context: the model that is trained, and its surroundings.
        options: what the run asks of its sampler, as for `colocated_sampler`; a server bounds by itself what it
            decodes at once, `max_rows` is what `grpo_fn.eval` asks for at once.
        engine: (world, dtype) -> the client of the engine.

    Returns:
        The sampler.

    Raises:
        ValueError: for what vLLM does not draw, before there is an engine.
    """
    sampling_params(options.token_sampler)
    ends = end_tokens(context, options.tokenizer)
    client = engine(context.world, context.dtype)
    return VllmSampler(**vars(options), engine=client, context=context, ends=ends, max_model_len=None)


def end_tokens(context: SamplerContext, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion, as the local sampler has it."""
    bare = hf.empty_model(context.config)
    bare.generation_config = hf.generation_config(context.folder, context.config)
    return hf.stop_ids(tokenizer, bare)


@dataclass(frozen=True, kw_only=True)
class VllmSampler(SamplerOptions):
    """Samples from an engine; `dataclasses.replace` gives a sampler of the same one with other options."""

    engine: InferenceEngine
    context: SamplerContext
    ends: Sequence[int]  # tokens that end a completion
    max_model_len: int | None  # positions that the engine in this process has memory for
    # Of the weights; other samplers on the same engine count on.
    versions: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for limits below 1, stop strings that stop at once, and what vLLM does not draw."""
        super().__post_init__()
        sampling_params(self.token_sampler)
        if self.environments is not None and not self.environments.pure and self.engine.ranks > 1:
            raise ValueError(
                f"episodes: got {self.environments.name}, which is not pure, with an engine of {self.engine.ranks} "
                "ranks, expected an engine for each rank: those that share one have to observe the same"
            )
        if self.environments is not None and self.environments.answer_steps is None and self.engine.ranks > 1:
            raise ValueError(
                f"sections.Episodes.answer_steps: got None with an engine of {self.engine.ranks} ranks, expected a "
                "number: ranks that share an engine have to go on at the same step"
            )

    ranks = property(attrgetter("engine.ranks"), doc="How many have the engine together; they sample the same.")
    overlaps = property(attrgetter("engine.overlaps"), doc="Whether it can sample while the policy trains.")
    mixes = property(attrgetter("engine.mixes"), doc="Whether a completion may have tokens of two versions of weights.")
    complaints = property(attrgetter("engine.complaints"), doc="Warnings for the log; cleared once logged.")

    @property
    def repeatable(self) -> bool:
        """Whether the same problems and key bring the same tokens again."""
        counted = (
            self.environments is None or self.environments.answer_steps is not None or not counts_steps(self.engine)
        )
        return self.engine.repeatable and counted

    def load(self, policy: FSDPPolicy | FixedWeights) -> None:
        """Give the engine the policy's weights. Raises StaleEngine when it does not take them."""
        self.engine.push_weights(export_weights(policy, self.context), version=next(self.versions))

    def rest(self) -> None:
        """The engine makes way for the training, until the next `load`."""
        self.engine.rest()

    def figures(self) -> dict[str, float]:
        """The engine's messages, and the environment's."""
        return {**self.engine.figures(), **({} if self.environments is None else self.environments.caller.figures())}

    def close(self) -> None:
        """The engine is not needed any more."""
        self.engine.close()

    def for_evaluation(
        self,
        token_sampler: TokenSampler,
        check: Callable[[], None] = never_stop,
        on_completions: OnCompletions | None = None,
    ) -> "VllmSampler":
        """The same engine, drawing with `token_sampler`; `check` is called with every completion that ends."""

        def report(problems: Sequence[Problem], completions: Sequence[Completion]) -> None:
            check()
            if on_completions is not None:
                on_completions(problems, completions)

        reports = None if check is never_stop and on_completions is None else report
        environments = self.environments and self.environments.without_tape()
        return replace(self, token_sampler=token_sampler, on_completions=reports, environments=environments)

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
        requests = [
            GenerationRequest(tuple(ids), group_seeds, limit)
            for ids, group_seeds, limit in zip(prompts, seeds, limits, strict=True)
        ]
        own = self._own(len(problems) * group_size)

        def report(p: int, g: int, answer: EngineCompletion) -> None:
            if p * group_size + g in own:
                completion = completion_of_row(self.tokenizer, answer.tokens, stopped=answer.stopped)
                self.on_completions([problems[p]], [completion])

        on_answer = None if self.on_completions is None else report
        groups = self.engine.generate(requests, params=self._params(), on_answer=on_answer)
        answers = [answer for group in groups for answer in group]
        device = self.context.world.device
        return assemble(
            self.tokenizer,
            prompts,
            [answer.tokens for answer in answers],
            torch.tensor([x for answer in answers for x in answer.logp], dtype=torch.float32, device=device),
            torch.tensor([answer.stopped for answer in answers], device=device),
        )

    def _sample_episodes(self, problems: Sequence[Problem], group_size: int, key: Tensor) -> Rollout:
        """G episodes of every problem; each turn of row p * G + g has its own seed."""
        context = smallest_limit(self.max_total_tokens, positions(self.context.config), self.max_model_len)
        rows = self.begin_episodes(problems, group_size, key, context)

        def ended(b: int) -> None:
            if self.on_completions is not None and b in self._own(len(rows.rows)):
                self.on_completions([problems[b // group_size]], [rows.completion(b)])

        params = {**self._params(), "stop_token_ids": [*self.ends, self.environments.chat.end]}
        keys = sample_keys(key, problems, group_size)
        episodes = EngineEpisodes(self.engine, rows, keys, params=params, on_end=ended)
        episodes.run(self.max_rows)
        self.environments.caller.count("time/environment_wait", episodes.pending.waited)
        logp = torch.tensor([x for row in episodes.logp for x in row], device=self.context.world.device)
        return assemble_episodes(rows, episodes.tokens, logp, self.tokenizer)

    def _own(self, rows: int) -> range:
        """The rows that are reported on this one of the engine's ranks: those that it will score."""
        return range(rows)[rank_share(rows, self.context.world.rank % self.ranks, self.ranks)]

    def _params(self) -> dict[str, Any]:
        """Fields of SamplingParams. The ends are ours alone; a stop string is part of the completion, as any end is."""
        stops = {"stop": [*self.stop], "include_stop_str_in_output": True} if self.stop else {}
        ends = {"ignore_eos": True, "stop_token_ids": [*self.ends]}
        return {**sampling_params(self.token_sampler), **stops, **ends}
