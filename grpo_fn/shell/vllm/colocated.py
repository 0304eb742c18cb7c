"""vLLM inside the training process, on the device that trains: it sleeps while that trains, and is woken by weights."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_fn.shell.model import hf, load_weights
from grpo_fn.shell.sampler.fingerprint import (
    NOTHING,
    Fingerprint,
    WeightShare,
    engine_weights,
    has_head,
    weight_fingerprint,
)
from grpo_fn.shell.sampler.interface import (
    DueRequests,
    EngineCompletion,
    GenerationRequest,
    OnAnswer,
    OnTurn,
    SamplerContext,
    WeightReceipt,
    ignore_completion,
    verify_receipt,
)
from grpo_fn.shell.sampler.weight_export import HEAD
from grpo_fn.shell.vllm.options import check_deadline
from grpo_fn.shell.vllm.process_guards import group_of_one, import_vllm, restore_generators, restore_thread_count
from grpo_fn.shell.world import LostRank

# -- weights on their way into the engine, and those in the folder that it was opened with


class IncomingWeights:
    """Weights on their way into an engine: each is looked at as it passes."""

    def __init__(
        self,
        weights: Iterator[tuple[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        unwanted: Set[str],
    ) -> None:
        self.weights, self.dtype, self.unwanted = weights, dtype, unwanted
        self.missing = dict(shapes)
        self.wrong: str | None = None
        self.sent = NOTHING

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All up to the first wrong one: vLLM is in the middle of loading, and must come to an end of it."""
        for name, tensor in self.weights:
            shape = self.missing.pop(name, None)
            if shape != tuple(tensor.shape):
                self.wrong = f"got {name} of shape {tuple(tensor.shape)}, wanted {shape or 'no more of that name'}"
                return
            weight = tensor.detach().to(self.dtype) if tensor.is_floating_point() else tensor
            self.sent += weight_fingerprint(weight)
            if name not in self.unwanted:
                yield name, weight

    def check(self) -> None:
        """Raise ValueError unless all came, and nothing else."""
        if self.wrong is not None:
            raise ValueError(f"push: {self.wrong}")
        if self.missing:
            few = ", ".join([*self.missing][: load_weights.SHOWN])
            raise ValueError(f"push: got no {few} ({len(self.missing)} missing), wanted every weight of the model")


def folder_weights(
    folder: str, names: Set[str], *, tied: bool, dtype: torch.dtype, device: torch.device
) -> Fingerprint | None:
    """Of the weights of these names in a model folder, as an engine opens them; None where they cannot be read."""
    try:
        stored = load_weights.entries(load_weights.folder_of(folder))
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


UNPUSHED = -1  # the version of the weights in the model folder
COUNTED = ("requests", "tokens", "prompt_tokens", "cached_tokens", "generate_seconds", "push_seconds")
TAGS = ("weights", "kv_cache")  # what vLLM puts to sleep, in the order in which it is woken


class ColocatedEngine:
    """An engine in this process, made with `how` (options.arguments). Of n `ranks` it is a part: one engine together.

    The ranks of an engine have to be asked for the same, and all ranks have to `push` together. `deadline` is how many
    seconds one call of `generate` may take. Raises ValueError where vLLM is not installed, or does not open the model.
    """

    overlaps: ClassVar[bool] = False  # it cannot generate while its device trains
    mixes: ClassVar[bool] = False

    def __init__(self, context: SamplerContext, how: Mapping[str, Any], *, deadline: float) -> None:
        check_deadline(deadline, context)
        self.world, self.dtype, self.folder, self.deadline = context.world, context.dtype, context.folder, deadline
        self.ranks, self.eager = how["tensor_parallel_size"], how["enforce_eager"]
        self.detokenize = not how["skip_tokenizer_init"]
        self.shapes = {name: tuple(x.shape) for name, x in hf.empty_model(context.config).state_dict().items()}
        self.tied = bool(context.config.get_text_config().tie_word_embeddings)
        self.version = UNPUSHED
        self.ready = True  # not at rest, and no push has failed half-way
        self.asleep: list[str] = []  # of TAGS
        self.complaints: list[str] = []  # what goes wrong here is raised
        self._verified = False
        self._counts = dict.fromkeys(COUNTED, 0.0)
        with self._apart():
            self.vllm = import_vllm()
            group_of_one(context.world.device)
            try:
                with self._together("starting vLLM"):
                    self.llm = self.vllm.LLM(**how)
            except LostRank:
                raise
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise ValueError(f"got model {context.folder}, wanted one that vLLM opens: {error}") from error
            # It would take down the default process group, the trainer's, when it is collected, or at the end.
            self.llm.llm_engine.engine_core._finalizer.detach()
            self._check_heads()
            # A tied model may compute its logits with the embedding itself, and knows no other head then.
            self.headless = self.tied and not self.llm.apply_model(has_head)[0]
            self._opened = self._held()

    @property
    def repeatable(self) -> bool:
        """Whether the same requests bring the same tokens again, whatever else is asked for at the time."""
        return self.world.device.type == "cpu" or self.batch_invariant

    @property
    def batch_invariant(self) -> bool:
        """Whether vLLM was asked for kernels with which no bit of a row depends on the rows beside it."""
        return self.world.device.type == "cuda" and bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))

    # -- generating

    def generate(
        self, asks: Sequence[GenerationRequest], *, how: Mapping[str, Any], on_answer: OnAnswer = ignore_completion
    ) -> list[list[EngineCompletion]]:
        """For every ask an answer to each of its seeds; `how` are fields of vLLM's SamplingParams.

        `on_answer` is called with every answer between two of vLLM's steps.

        Raises TimeoutError after `deadline` seconds, saying how much is unfinished; nothing of it goes on.
        """
        places = [(i, j) for i, ask in enumerate(asks) for j in range(len(ask.seeds))]
        due = [(n, asks[i]._replace(seeds=asks[i].seeds[j : j + 1])) for n, (i, j) in enumerate(places)]
        done: dict[tuple[int, int], EngineCompletion] = {}

        def ended(n: int, _: int, answer: EngineCompletion) -> None:
            done[places[n]] = answer
            on_answer(*places[n], answer)

        self.generate_turns(lambda steps, running: [] if running or done else due, how=how, on_turn=ended)
        return [[done[i, j] for j in range(len(ask.seeds))] for i, ask in enumerate(asks)]

    def generate_turns(self, due: DueRequests, *, how: Mapping[str, Any], on_turn: OnTurn) -> None:
        """Requests that come while others are decoded, until `due` has none and all are finished.

        Between two of vLLM's steps `due` says what begins now, and `on_turn` is called with what has ended.

        Raises TimeoutError for a request that takes longer than `deadline` seconds, those that `due` takes aside, with
        how much is unfinished; nothing of it goes on.
        """
        if not self.ready:
            raise RuntimeError("generate: got an engine at rest, or one whose last push failed; wanted a push first")
        if how.get("stop") and not self.detokenize:
            raise ValueError(f"stop: got {how['stop']!r} for an engine without tokenizer, wanted it made with them")
        with self._apart(), self._together("generating"):
            self._step_until_done(due, how, on_turn)

    def _step_until_done(self, due: DueRequests, how: Mapping[str, Any], on_turn: OnTurn) -> None:
        """vLLM's own loop, with a deadline."""
        engine, running, requests, steps, seconds = self.llm.llm_engine, {}, 0, 0, 0.0
        try:
            while (asks := due(steps, bool(running))) or running:
                began = time.monotonic()
                for number, ask in asks:
                    name = f"{requests} {number}"  # a row asks for several turns, each by another name
                    running[name], requests, fields = seconds, requests + 1, ask.fields(how)
                    engine.add_request(name, {"prompt_token_ids": [*ask.prompt]}, self._params(fields, *ask.seeds))
                if (waited := seconds - next(iter(running.values()))) > self.deadline:
                    raise TimeoutError(
                        f"generate: got {len(running)} of {requests} requests unfinished after {waited:.0f} "
                        f"s, wanted all within {self.deadline:g} (vllm_sampler.colocated_sampler.generate_timeout)"
                    )
                ended = [out for out in engine.step() if out.finished]
                steps += 1
                seconds += time.monotonic() - began
                for out in ended:
                    del running[out.request_id]
                    on_turn(int(out.request_id.split()[1]), steps, self._counted(out))
        finally:
            self._counts["generate_seconds"] += seconds
            if running:
                engine.abort_request([*running])

    def _counted(self, out: Any) -> EngineCompletion:
        """A finished request's completion, which the figures have counted."""
        answer = self._answer(out.outputs[0])
        added = {"requests": 1, "tokens": len(answer.tokens), "prompt_tokens": len(out.prompt_token_ids)}
        for name, more in {**added, "cached_tokens": out.num_cached_tokens or 0}.items():
            self._counts[name] += more
        return answer

    def _params(self, how: Mapping[str, Any], seed: int) -> Any:
        """SamplingParams of one row: the answer comes whole, with the log-probs of its own tokens alone."""
        final = self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        ours = {"logprobs": 0, "flat_logprobs": True, "detokenize": self.detokenize, "output_kind": final}
        try:
            return self.vllm.SamplingParams(**how, **ours, seed=seed)
        except (TypeError, ValueError) as error:
            raise ValueError(f"got {dict(how)}, wanted fields that vLLM's SamplingParams take: {error}") from error

    def _answer(self, out: Any) -> EngineCompletion:
        """One completion as vLLM gives it."""
        if out.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"generate: got a completion that ended by {out.finish_reason!r}, wanted stop or length")
        tokens, logp = [*out.token_ids], [*out.logprobs.logprobs]
        assert out.logprobs.token_ids == tokens, "log-probs of other tokens than those drawn"
        return EngineCompletion(tokens, logp, out.finish_reason == "stop", self.version)

    # -- weights

    def push(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> WeightReceipt:
        """Take these weights, one at a time, and forget cached prefixes; they have to be all that the model has.

        Raises ValueError for other names or shapes, StaleEngine when afterwards the engine holds something else than
        was sent; it does not generate then, until a push succeeds.
        """
        started = time.monotonic()
        self.ready = False
        coming = IncomingWeights(weights, self.shapes, self.dtype, unwanted={HEAD} if self.headless else set())
        with self._apart():
            self._wake("weights")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(coming)})
            coming.check()
            self._wake("kv_cache")
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("push: got an engine that keeps cached prefixes of the old weights")
            stored = self._held()
            # If that differs, was it ever to be recognised? The model folder shows it.
            comparable = stored == coming.sent or self._opened == self._in_folder()
        receipt = WeightReceipt(version, coming.sent, stored if comparable else None)
        verify_receipt(receipt)
        self.version, self.ready, self._verified = version, True, receipt.held is not None
        self._counts["push_seconds"] += time.monotonic() - started
        return receipt

    def rest(self) -> None:
        """Let go of weights and cache until the next push; on CPU there is nothing to be had from that."""
        self.ready = False
        if self.world.device.type == "cuda" and not self.asleep:
            with self._apart():
                self.llm.sleep(level=2)
            self.asleep = [*TAGS]

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            torch.cuda.empty_cache()  # what the trainer's allocator keeps for later is wanted here
            self.llm.wake_up(tags=[tag])
            self.asleep.remove(tag)

    def _in_folder(self) -> Fingerprint | None:
        """Of what the engine was opened with, read again."""
        return folder_weights(
            self.folder, self.shapes.keys(), tied=self.tied, dtype=self.dtype, device=self.world.device
        )

    def _held(self) -> Fingerprint:
        """Of all ranks of this engine together."""
        share = WeightShare(self.world.rank % self.ranks, self.ranks)
        share_sum = self.llm.apply_model(partial(engine_weights, dtype=self.dtype, tied=self.tied, share=share))[0]
        if self.ranks == 1:
            return share_sum
        first = self.world.rank - share.rank
        everyone = self.world.exchange(share_sum, what="what the engines hold")
        return sum(everyone[first : first + self.ranks], NOTHING)

    # -- living together

    def figures(self) -> dict[str, float]:
        """Requests, tokens and seconds since it was last asked, and whether what it holds was compared."""
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
        """Where the ranks of an engine wait for one another; an engine of one rank waits for no other."""
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
                f"got model {self.folder} with attention heads {size} wide, wanted one that vLLM opens on CPU: "
                f"{', '.join(map(str, supported))}"
            )

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Random generators, threads and compilation are afterwards as they were."""
        compilation = torch.compiler.set_stance("force_eager") if self.eager else nullcontext()
        with restore_generators(self.world.device), restore_thread_count(), compilation:
            yield
