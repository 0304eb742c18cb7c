"""vLLM inside the training process, on the device that trains: it sleeps while that trains, and is woken by weights.

vLLM takes a process for its own. What it does to the rest of it is undone: it reseeds and consumes the global random
generators, makes `torch.set_num_threads` do nothing, and calls the default process group into being. That group is
made first, the very one that FSDP2 would make, so it does not matter which of them comes first.
"""

import gc
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from grpo_fn.shell.model import hf
from grpo_fn.shell.sampler.interface import SamplerContext, positions
from grpo_fn.shell.vllm.engine import (
    DueRequests,
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    OnTurn,
    SamplingParams,
    StaleEngine,
    import_vllm,
)
from grpo_fn.shell.vllm.fingerprint import HEAD, NOTHING, Fingerprint, engine_weights, has_head, weight_fingerprint
from grpo_fn.shell.world import LostRank

BATCHED = 4096  # tokens computed at once on a CPU, at least
UNPUSHED = -1  # the version of the weights in the model folder
COUNTED = ("requests", "tokens", "prompt_tokens", "cached_tokens", "generate_seconds", "push_seconds")
TAGS = ("weights", "kv_cache")  # what vLLM puts to sleep, in the order in which it is woken


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of vLLM in this process: the knobs of `vllm_sampler.colocated_sampler`."""

    tensor_parallel: int
    max_model_len: int | None
    max_rows: int
    gpu_memory_utilization: float
    kv_cache_bytes: int
    enforce_eager: bool
    detokenize: bool  # whether requests may have stop strings
    generate_timeout: float

    def check(self, context: SamplerContext) -> None:
        """Raise ValueError for ranks and devices that an engine cannot be spread over, and for a wrong deadline."""
        world = context.world
        if self.tensor_parallel < 1 or world.size % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel: got {self.tensor_parallel} for {world.size} ranks, expected a divisor of them"
            )
        if world.device.type == "cuda" and world.size == 1 and world.device.index not in (None, 0):
            raise ValueError(
                f"device: got {world.device}, expected cuda:0, which is where vLLM goes; choose with "
                "CUDA_VISIBLE_DEVICES"
            )
        if not self.generate_timeout > 0:
            raise ValueError(f"generate_timeout: got {self.generate_timeout} s, expected more than 0")
        if world.size > 1 and self.generate_timeout >= world.deadline:
            raise ValueError(
                f"generate_timeout: got {self.generate_timeout:g} s to generate, expected less than the "
                f"{world.deadline:g} s that ranks wait for one another (mesh.Parallelism.collective_timeout)"
            )

    def arguments(self, context: SamplerContext) -> dict[str, Any]:
        """The arguments of vLLM's LLM."""
        arguments = {
            "model": context.folder,
            "dtype": str(context.dtype).removeprefix("torch."),
            "tensor_parallel_size": self.tensor_parallel,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_rows,
            "enforce_eager": self.enforce_eager,
            "skip_tokenizer_init": not self.detokenize,
            # Log-probs under the distribution that tokens are drawn from, temperature and all.
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # not the folder's: temperature and stop tokens come with every request
            "seed": 0,  # every row brings its own
            "use_tqdm_on_load": False,
        }
        if context.world.size > 1:
            # Every rank has an engine in it, and those of a group work in step; torchrun has started them all.
            arguments["distributed_executor_backend"] = "external_launcher"
        if context.world.device.type == "cuda":
            arguments |= {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": True}
        else:
            # A prompt that is read in two parts takes back a draw of its generator, which those of the CPU cannot
            # (0.32): every prompt is read whole, also the longest that there may be.
            longest = self.max_model_len or positions(context.config) or 0
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(BATCHED, longest)}
            arguments["kv_cache_memory_bytes"] = self.kv_cache_bytes
        return arguments


class ColocatedEngine:
    """An engine in this process. Of n ranks (`options.tensor_parallel`) it is a part: one engine together.

    The ranks of an engine have to send the same requests, and all ranks have to push weights together. Raises
    ValueError if vLLM is not installed, or does not open the model.
    """

    overlaps: ClassVar[bool] = False  # it cannot generate while its device trains
    mixes: ClassVar[bool] = False

    def __init__(self, context: SamplerContext, options: EngineOptions) -> None:
        options.check(context)
        self.world, self.dtype, self.folder, self.options = context.world, context.dtype, context.folder, options
        self.ranks = options.tensor_parallel
        self.shapes = {name: tuple(x.shape) for name, x in hf.empty_model(context.config).state_dict().items()}
        self.tied = bool(context.config.get_text_config().tie_word_embeddings)
        self.version = UNPUSHED
        self.ready = True  # not at rest, and no push has failed half-way
        self.asleep: list[str] = []  # of TAGS
        self.complaints: list[str] = []  # always empty: what goes wrong in this process is raised
        self._verified = False
        self._counts = dict.fromkeys(COUNTED, 0.0)
        with self._apart():
            self.vllm = import_vllm("sampler")
            group_of_one(context.world.device)
            try:
                with self._together("starting vLLM"):
                    self.llm = self.vllm.LLM(**options.arguments(context))
            except LostRank:
                raise
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise ValueError(f"got model {context.folder}, expected one that vLLM opens: {error}") from error
            # It would take down the default process group, the trainer's, when it is collected, or at the end.
            self.llm.llm_engine.engine_core._finalizer.detach()
            self._check_heads()
            # A tied model may compute its logits with the embedding itself, and knows no other head then.
            self.headless = self.tied and not self.llm.apply_model(has_head)[0]
            self._opened = self._held()

    @property
    def repeatable(self) -> bool:
        """Whether the same requests bring the same tokens again, whatever other requests there are at the time."""
        return self.world.device.type == "cpu" or self.batch_invariant

    @property
    def batch_invariant(self) -> bool:
        """Whether vLLM was started with kernels with which no bit of a row depends on the rows beside it."""
        return self.world.device.type == "cuda" and bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))

    # -- generating

    def generate(
        self, requests: Sequence[GenerationRequest], *, params: SamplingParams, on_answer: OnAnswer | None = None
    ) -> list[list[EngineCompletion]]:
        """For every request an answer to each of its seeds; `on_answer` is called between two of vLLM's steps.

        Raises TimeoutError after `generate_timeout` seconds, saying how much is unfinished; nothing of it continues.
        """
        places = [(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))]
        single = [(n, requests[i]._replace(seeds=requests[i].seeds[j : j + 1])) for n, (i, j) in enumerate(places)]
        answers: dict[tuple[int, int], EngineCompletion] = {}

        def on_turn(n: int, _: int, answer: EngineCompletion) -> None:
            answers[places[n]] = answer
            if on_answer is not None:
                on_answer(*places[n], answer)

        self.generate_turns(lambda steps, running: [] if running or answers else single, params=params, on_turn=on_turn)
        return [[answers[i, j] for j in range(len(request.seeds))] for i, request in enumerate(requests)]

    def generate_turns(self, due: DueRequests, *, params: SamplingParams, on_turn: OnTurn) -> None:
        """Requests that come while others are decoded, until `due` has none and all are finished.

        Between two of vLLM's steps `due` says what begins now, and `on_turn` is called with what has ended.

        Raises TimeoutError for a request that takes longer than `generate_timeout` seconds, those that `due` takes
        aside, with how much is unfinished; nothing of it continues.
        """
        if not self.ready:
            raise RuntimeError("generate: got an engine at rest, or one whose last push failed; expected a push first")
        if params.get("stop") and not self.options.detokenize:
            raise ValueError(
                f"stop: got {params['stop']!r} for an engine without tokenizer, expected it made with them"
            )
        with self._apart(), self._together("generating"):
            self._step_until_done(due, params, on_turn)

    def _step_until_done(self, due: DueRequests, params: SamplingParams, on_turn: OnTurn) -> None:
        """vLLM's own loop, with a deadline."""
        engine, deadline = self.llm.llm_engine, self.options.generate_timeout
        running: dict[str, float] = {}  # requests by name, and the seconds at which each began
        count, steps, seconds = 0, 0, 0.0
        try:
            while (requests := due(steps, bool(running))) or running:
                began = time.monotonic()
                for number, request in requests:
                    name = f"{count} {number}"  # a row has several turns, each under another name
                    running[name], count = seconds, count + 1
                    own = self._params({**params, "max_tokens": request.max_tokens}, *request.seeds)
                    engine.add_request(name, {"prompt_token_ids": [*request.prompt]}, own)
                if (waited := seconds - next(iter(running.values()))) > deadline:
                    raise TimeoutError(
                        f"generate: got {len(running)} of {count} requests unfinished after {waited:.0f} "
                        f"s, expected all within {deadline:g} (vllm_sampler.colocated_sampler.generate_timeout)"
                    )
                finished = [output for output in engine.step() if output.finished]
                steps += 1
                seconds += time.monotonic() - began
                for output in finished:
                    del running[output.request_id]
                    on_turn(int(output.request_id.split()[1]), steps, self._counted(output))
        finally:
            self._counts["generate_seconds"] += seconds
            if running:
                engine.abort_request([*running])

    def _counted(self, output: Any) -> EngineCompletion:
        """The completion of a finished request (vLLM's RequestOutput), which the figures have counted."""
        (completion,) = output.outputs
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"generate: got a completion that ended by {completion.finish_reason!r}, expected stop or length"
            )
        tokens, logp = [*completion.token_ids], [*completion.logprobs.logprobs]
        assert completion.logprobs.token_ids == tokens, "log-probs of other tokens than those drawn"
        self._counts["requests"] += 1
        self._counts["tokens"] += len(tokens)
        self._counts["prompt_tokens"] += len(output.prompt_token_ids)
        self._counts["cached_tokens"] += output.num_cached_tokens or 0
        return EngineCompletion(tokens, logp, completion.finish_reason == "stop", self.version)

    def _params(self, params: SamplingParams, seed: int) -> Any:
        """vLLM's SamplingParams of one row: the answer comes whole, with the log-probs of its own tokens alone."""
        final = self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        output = {"logprobs": 0, "flat_logprobs": True, "detokenize": self.options.detokenize, "output_kind": final}
        try:
            return self.vllm.SamplingParams(**params, **output, seed=seed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"got {dict(params)}, expected fields that vLLM's SamplingParams take: {error}") from error

    # -- weights

    def push_weights(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> Fingerprint | None:
        """Take these weights, one at a time, and forget cached prefixes; they have to be all that the model has.

        Returns what the engine holds then; None if its layout hides that.

        Raises ValueError for other names or shapes, StaleEngine when afterwards the engine holds something else than
        was sent; it does not generate then, until a push succeeds.
        """
        started = time.monotonic()
        self.ready = False
        incoming = IncomingWeights(weights, self.shapes, self.dtype, left_out={HEAD} if self.headless else set())
        with self._apart():
            self._wake("weights")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(incoming)})
            incoming.check()
            self._wake("kv_cache")
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("push: got an engine that keeps cached prefixes of the old weights")
            held = self.verify_weights(incoming.sent, version)
        self.version, self.ready, self._verified = version, True, held is not None
        self._counts["push_seconds"] += time.monotonic() - started
        return held

    def verify_weights(self, sent: Fingerprint, version: int) -> Fingerprint | None:
        """Fingerprint of the engine's weights; None if its layout hides them. Raises StaleEngine for other weights."""
        if (held := self._held()) == sent:
            return held
        # A layout may hide weights: then those that it was opened with are not recognised either.
        if self._opened != self._in_folder():
            return None
        raise StaleEngine(
            f"weights of version {version}: got {held} in the engine after {sent} was sent, expected the same: it "
            "would sample from other weights than those that are trained"
        )

    def rest(self) -> None:
        """Let go of weights and cache until the next push; on CPU there is nothing to be had from that."""
        self.ready = False
        if self.world.device.type == "cuda" and not self.asleep:
            with self._apart():
                self.llm.sleep(level=2)
            self.asleep = [*TAGS]

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            torch.cuda.empty_cache()  # what the trainer's allocator keeps for later, the engine needs now
            self.llm.wake_up(tags=[tag])
            self.asleep.remove(tag)

    def _in_folder(self) -> Fingerprint | None:
        """Of what the engine was opened with, read again."""
        return folder_weights(
            self.folder, self.shapes.keys(), tied=self.tied, dtype=self.dtype, device=self.world.device
        )

    def _held(self) -> Fingerprint:
        """Of all ranks of this engine together."""
        rank = self.world.rank % self.ranks
        part = partial(engine_weights, dtype=self.dtype, tied=self.tied, rank=rank, ranks=self.ranks)
        share_sum = self.llm.apply_model(part)[0]
        if self.ranks == 1:
            return share_sum
        first = self.world.rank - rank
        everyone = self.world.exchange(share_sum, what="what the engines hold")
        return sum(everyone[first : first + self.ranks], NOTHING)

    # -- living together

    def figures(self) -> dict[str, float]:
        """Requests, tokens and seconds since the last call, and whether what it holds was compared."""
        figures = {f"engine/{name}": value for name, value in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0.0)
        return {**figures, "engine/verified": float(self._verified)}

    def close(self) -> None:
        """Give back what the engine holds; the process group stays, it may be the trainer's."""
        if self.llm is None:
            return
        core = self.llm.llm_engine.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        self.llm, self.ready = None, False
        gc.unfreeze()  # vLLM has put all that there was beyond the collector's reach
        gc.collect()

    def _together(self, what: str) -> AbstractContextManager[None]:
        """A barrier of an engine's ranks; an engine of one rank does not wait."""
        return self.world.talking(what) if self.ranks > 1 else nullcontext()

    def _check_heads(self) -> None:
        """Raise ValueError for attention heads that the CPU build computes nothing right with."""
        if self.world.device.type != "cpu":
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = self.llm.llm_engine.model_config.get_head_size()
        supported = CPUAttentionBackend.get_supported_head_sizes()
        if size not in supported:
            self.close()
            raise ValueError(
                f"got model {self.folder} with attention heads {size} wide, expected one that vLLM opens on CPU: "
                f"{', '.join(map(str, supported))}"
            )

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Random generators, threads and compilation are afterwards as they were."""
        compilation = torch.compiler.set_stance("force_eager") if self.options.enforce_eager else nullcontext()
        with restore_generators(self.world.device), restore_thread_count(), compilation:
            yield


# -- weights on their way into the engine, and those in the folder that it was opened with


class IncomingWeights:
    """Weights on their way into an engine: each is checked and counted as it passes."""

    def __init__(
        self,
        weights: Iterator[tuple[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        left_out: Set[str],  # names that the engine does not know
    ) -> None:
        self.weights, self.dtype, self.left_out = weights, dtype, left_out
        self.missing = dict(shapes)
        self.wrong: str | None = None
        self.sent = NOTHING

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All up to the first wrong one: vLLM is in the middle of loading, and must come to an end of it."""
        for name, tensor in self.weights:
            shape = self.missing.pop(name, None)
            if shape != tuple(tensor.shape):
                self.wrong = f"got {name} of shape {tuple(tensor.shape)}, expected {shape or 'no more of that name'}"
                return
            weight = tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor
            self.sent += weight_fingerprint(weight)
            if name not in self.left_out:
                yield name, weight

    def check(self) -> None:
        """Raise ValueError unless all came, and nothing else."""
        if self.wrong is not None:
            raise ValueError(f"push: {self.wrong}")
        if self.missing:
            few = ", ".join([*self.missing][: hf.SHOWN])
            raise ValueError(f"push: got no {few} ({len(self.missing)} missing), expected every weight of the model")


def folder_weights(
    folder: str, names: Set[str], *, tied: bool, dtype: torch.dtype, device: torch.device
) -> Fingerprint | None:
    """Of the weights of these names in a model folder, as an engine opens them; None where they cannot be read."""
    try:
        stored = hf.entries(hf.folder_of(folder))
    except ValueError:
        return None
    total = NOTHING
    for name in names:
        if tied and name == HEAD and HEAD not in stored:
            name = next((other for other in stored if other.endswith("embed_tokens.weight")), HEAD)
        if name not in stored:
            return None
        with safe_open(stored[name].file, framework="pt", device="cpu") as opened:
            total += weight_fingerprint(opened.get_tensor(name).to(device, dtype))
    return total


# -- what vLLM does to the rest of the process, undone


def group_of_one(device: torch.device) -> None:
    """The default process group, if there is none yet: what `Parallelism.mesh` would make, and finds."""
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def restore_generators(device: torch.device) -> Iterator[None]:
    """The global generators of torch, NumPy and Python are afterwards where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def restore_thread_count() -> Iterator[None]:
    """`torch.set_num_threads` does afterwards what it did, and the number of threads is what it was."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        setter(threads)
