"""Inference engines: requests and answers, and the weights they hold. There are two: `colocated`, `vllm_servers`.

vLLM draws by itself, so sampling functions are translated to fields of its SamplingParams, not called. The distribution
is the same; the draws are not, for vLLM makes its own random numbers from a seed.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.sampling import categorical, greedy, nucleus
from grpo_fn.shell.sampler.interface import EngineRefused, TokenSampler
from grpo_fn.shell.vllm.fingerprint import Fingerprint

SamplingParams = Mapping[str, Any]  # fields of vLLM's


class GenerationRequest(NamedTuple):
    """A prompt, and a seed below 2^31 for each completion of it."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int  # of each completion
    prefix: int | None = None  # requests with the same number begin alike: one server has read that already


class EngineCompletion(NamedTuple):
    """A completion. The token that ended it is part of it."""

    tokens: list[int]
    logp: list[float]  # nats, under the distribution each token was drawn from
    stopped: bool  # by itself; otherwise it ran into the length limit
    oldest: int  # version of the weights that drew its first token


OnAnswer = Callable[[int, int, EngineCompletion], None]  # number of the request, of the seed in it, the answer to it

# (the engine's steps so far, whether a request is running) -> what begins now: a number of the caller's, and a request
# with one seed. When nothing runs it waits until something begins; () when all is over.
DueRequests = Callable[[int, bool], Sequence[tuple[int, GenerationRequest]]]
OnTurn = Callable[[int, int, EngineCompletion], None]  # that number, the engine's steps so far, the answer


class StaleEngine(EngineRefused):
    """An engine holds other weights than it was sent."""


@runtime_checkable
class InferenceEngine(Protocol):
    """Draws completions with its own weights, which it is given version by version."""

    ranks: int  # that are one engine together: they send the same requests
    overlaps: bool  # whether it can generate while the policy trains
    repeatable: bool  # whether the same requests bring the same tokens again
    mixes: bool  # whether new weights may come in the middle of a completion
    complaints: list[str]  # warnings for the log; cleared once logged

    def generate(
        self, requests: Sequence[GenerationRequest], *, params: SamplingParams, on_answer: OnAnswer | None = None
    ) -> list[list[EngineCompletion]]:
        """For every request an answer to each of its seeds.

        `on_answer` is called with every answer when it comes, in whatever thread that is.
        """

    def push_weights(self, weights: Iterator[tuple[str, Tensor]], *, version: int) -> Fingerprint | None:
        """Take these weights, under the names of the model folder; nothing drawn before is remembered.

        Returns what the engine holds then, which is what was sent; None if its layout hides that. Raises StaleEngine
        if it holds others.
        """

    def rest(self) -> None:
        """The device is needed for training: hold as little of it as possible until the next push."""

    def figures(self) -> dict[str, float]:
        """Figures since the last call, for the metrics."""

    def close(self) -> None:
        """The engine is not needed any more."""


@runtime_checkable
class SteppedEngine(InferenceEngine, Protocol):
    """An engine in this process, which decodes only while it is called."""

    batch_invariant: bool  # whether no bit of a row depends on the rows that are decoded with it

    def generate_turns(self, due: DueRequests, *, params: SamplingParams, on_turn: OnTurn) -> None:
        """Requests that come while others are decoded: between two steps `due` and `on_turn` are called."""


# -- how vLLM draws


SEEDS = 2**31  # vLLM takes them as signed numbers of 32 bits
COOLEST, HOTTEST = 0.01, 2.0  # what vLLM (0.32) takes: it raises a lower temperature to 0.01, and refuses higher ones


def sampling_params(token_sampler: TokenSampler) -> dict[str, Any]:
    """The fields that make vLLM draw as `token_sampler` does, with the knobs that are bound to it.

    Raises ValueError for other functions than greedy, categorical and nucleus, and for temperatures that vLLM changes
    or refuses.
    """
    function, knobs = function_and_knobs(token_sampler)
    if function not in (greedy, categorical, nucleus):
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"token_sampler: got {name}, expected sampling.greedy, sampling.categorical or sampling.nucleus: vLLM "
            "draws itself and calls no function of grpo_fn (with the local sampler any function goes)"
        )
    if function is not greedy and not COOLEST <= knobs["temperature"] <= HOTTEST:
        raise ValueError(
            f"temperature: got {knobs['temperature']}, expected one that vLLM draws at, {COOLEST:g} to {HOTTEST:g} "
            "(sampling.greedy is the limit 0)"
        )
    names = ("temperature", "top_p", "top_k")
    return {"temperature": 0.0} if function is greedy else {name: knobs[name] for name in names if name in knobs}


def row_seeds(key: Int[Tensor, "2"], uids: Sequence[int], group_size: int) -> list[tuple[int, ...]]:
    """For each problem a seed for each of its G completions: a function of fold_in(key, uid, g) and of nothing else.

    0 <= seed < 2^31. Two rows of a step of R rows share one with probability below R^2 / 2^32; equal prompts with equal
    seeds would give equal completions.
    """
    uid, g = torch.tensor([*uids])[:, None], torch.arange(group_size)[None]
    return [tuple(row) for row in prng.randint(prng.fold_in(key.cpu(), uid, g), low=0, high=SEEDS).tolist()]


# -- whether vLLM is installed


COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # the environment variable that `blocks.torch_compile` goes by


def import_vllm(knob: str) -> ModuleType:
    """The vllm module, set to be quiet and to stay in this process. Raises ValueError if it is not installed.

    COMPILE_THREADS is afterwards what it was: vLLM's import makes it 1, for processes that its engine would fork.
    Inductor's own setting stays as vLLM leaves it, so that an engine in this process compiles as it means to.
    """
    check_installed(knob)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    before = os.environ.get(COMPILE_THREADS)
    try:
        import vllm
    except ImportError as error:
        raise missing_vllm_error(knob, str(error)) from error
    finally:
        os.environ.pop(COMPILE_THREADS, None)
        if before is not None:
            os.environ[COMPILE_THREADS] = before
    return vllm


def check_installed(knob: str) -> None:
    """Raise ValueError if there is no vLLM for what this knob names. Nothing is imported."""
    spec = find_spec("vllm")
    if spec is None:
        raise missing_vllm_error(knob, "No module named 'vllm'")
    if spec.origin is None:
        raise missing_vllm_error(knob, "a folder of that name is no package")


def missing_vllm_error(knob: str, reason: str) -> ValueError:
    """The error of a run that needs vLLM, which is not installed."""
    return ValueError(f"{knob}: got no vllm ({reason}), expected it installed: pip install 'grpo-fn[vllm]'")
