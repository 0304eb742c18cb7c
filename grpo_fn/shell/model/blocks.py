"""The transformer blocks of a model, and what may be done to one: recompute its activations, compile it.

Each function below changes one block in place, by putting another `forward` before the one it has. So it works inside
the block's hooks (FSDP2 gathers and frees the weights in them), and no parameter changes its name. Where both kinds are
used, execution comes first: recompute(compile(forward)).
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from shutil import which
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from grpo_fn.shell.model.attention import Phase, takes_layout

Forward = Callable[..., Any]
Change = Callable[[nn.Module], None]  # one block, in place


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks, first to last: its modules of the classes it names as not to be split.

    Raises ValueError when it names none, or has none of those it names.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # fully_shard gives a block a class of its own, derived from the one that is named.
    layers = [module for module in model.modules() if named & {base.__name__ for base in type(module).__mro__}]
    if not layers:
        raise ValueError(
            f"got {type(model).__name__} without transformer blocks; expected modules of a class in "
            f"_no_split_modules, which names {sorted(named) or 'none'}"
        )
    return layers


# -- activations


def no_checkpointing(block: nn.Module) -> None:
    """Keep every activation for the backward pass.

    Args:
        block: a transformer block, left as it is.
    """


def full_checkpointing(block: nn.Module) -> None:
    """Keep what enters the block alone; the backward pass runs it once more, dropout's noise included.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.

    Args:
        block: a transformer block, changed in place.
    """
    config = next((module.config for module in block.modules() if hasattr(module, "config")), None)
    block.forward = partial(_recompute, block.forward, config)


def _phase(kwargs: dict[str, Any]) -> Phase | None:
    """What the call is for, by the attention context it carries; None without one."""
    return getattr(kwargs.get("layout"), "phase", None)


CACHES = ("past_key_values", "cache")  # a block's keyword for the KV cache: until transformers 5.23, and from 5.24 on


def _cached(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in CACHES) or _phase(kwargs) in ("prefill", "decode")


def _recompute(forward: Forward, config: PretrainedConfig | None, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or _cached(kwargs):  # a second run would write a second time into a KV cache
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext() if config is None or _phase(kwargs) is None else takes_layout(config)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


# -- execution

COMPILES_FROM = (7, 0)  # compute capability that Triton, and so Inductor, writes code for
# Weights of a block below which nothing is compiled by default. A model of as many in all had been compiling for 200 s
# of a start on an H200, and as written the run took 23 s; from which size on it pays was not measured.
SMALL_BLOCK = 500_000


def eager(block: nn.Module) -> None:
    """Run the block as it is written.

    Args:
        block: a transformer block, left as it is.
    """


def compiled_on_cuda(block: nn.Module) -> None:
    """`torch_compile` in mode "default" on a CUDA device; `eager` elsewhere and for small blocks. The default of a run.

    A run settles which of the two it is before a model is loaded (`mesh.plan_blocks`): on CUDA, too, the blocks
    run as written where compiled ones are refused, or have fewer than SMALL_BLOCK weights.

    Args:
        block: a transformer block with its weights in place, changed in place.

    Raises:
        ValueError: a block on the meta device, of which it is not known where it will run.
    """
    device = next(block.parameters()).device.type
    if device == "meta":
        raise ValueError(
            "blocks.compiled_on_cuda: got a block on the meta device, expected one with its weights in place"
        )
    if device == "cuda" and small_block_reason(count_weights(block)) is None:
        torch_compile(block, mode="default")


def largest_block(model: nn.Module) -> int:
    """Weights of the model's largest transformer block."""
    return max(map(count_weights, blocks(model)))


def count_weights(block: nn.Module) -> int:
    """Weights of a block, of one that is spread over devices all of them."""
    return sum(p.numel() for p in block.parameters())


def small_block_reason(weights: int) -> str | None:
    """Why blocks of so many weights are not compiled by default; None where they are."""
    if weights >= SMALL_BLOCK:
        return None
    return f"a block has {weights:,} weights, fewer than the {SMALL_BLOCK:,} from which blocks are compiled"


def compiles_decoding(model: nn.Module, *, deterministic: bool) -> bool:
    """Whether the local sampler's steps of a model are compiled on CUDA, however its blocks are trained."""
    return not deterministic and small_block_reason(largest_block(model)) is None


def compile_unsupported_reason(device: torch.device) -> str | None:
    """Why blocks on a CUDA device cannot be compiled in this process; None where nothing is known to be in the way."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE is 1"
    if (capability := torch.cuda.get_device_capability(device)) < COMPILES_FROM:
        return "compute capability {}.{} of the card, expected {}.{}".format(*capability, *COMPILES_FROM)
    if find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["clang", "gcc", "cc"]  # as Triton looks for one
    if not any(which(name) for name in compilers):
        return f"no C compiler: got none of {', '.join(compilers)}"
    return None


# Of torch.compile; the first and the last capture no CUDA graphs.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def torch_compile(block: nn.Module, *, mode: str) -> None:
    """Compile the block, sizes left open. A call of the sampler's, with its keys and values, runs as written.

    Args:
        block: a transformer block, changed in place.
        mode: one of COMPILE_MODES. "reduce-overhead" and "max-autotune" capture a CUDA graph for every size that comes.

    Raises:
        ValueError: another mode.
    """
    check_compile_mode(mode)
    block.forward = CompiledForward(block.forward, _uncached, partial(_compile, mode=mode))


def check_compile_mode(mode: str) -> None:
    """Raise ValueError for a mode that torch.compile has not."""
    if mode not in COMPILE_MODES:
        names = ", ".join(map(repr, COMPILE_MODES))
        raise ValueError(f"blocks.torch_compile.mode: got {mode!r}, expected one of {names}")


def compile_for_decoding(block: nn.Module) -> None:
    """Compile what the sampler calls for every token, and nothing else. Once is enough."""
    if not (isinstance(block.forward, CompiledForward) and block.forward.which is _decoding):
        block.forward = CompiledForward(block.forward, _decoding, CompiledPart)


class CompiledForward:
    """A forward, compiled for the calls `which` is about when the first comes. A copy compiles anew, for its block."""

    def __init__(
        self, forward: Forward, which: Callable[[dict[str, Any]], bool], build: Callable[[Forward], Forward]
    ) -> None:
        self.forward, self.which, self.build = forward, which, build
        self.fast = build(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.fast if self.which(kwargs) else self.forward)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        return CompiledForward(deepcopy(self.forward, memo), self.which, self.build)


# Of one function. Past torch's own limit of 8 it runs as written from then on, and nothing says so; a size of 1 and
# each dtype count as one, so that a run may get there (`system/recompilations` shows how often).
RECOMPILE_LIMIT = 64


def _compile(function: Forward, *, mode: str) -> Forward:
    from torch._dynamo import config  # importing these takes seconds, and torch.compile does it anyway
    from torch._inductor import list_mode_options
    from torch._inductor.config import decide_compile_threads
    from torch.fx.experimental import _config as shapes

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    # vLLM in the process sets Inductor's own number to 1, for all that is compiled after its import.
    options = {**list_mode_options(mode, dynamic=True), "compile_threads": decide_compile_threads()}
    compiled = torch.compile(function, dynamic=True, options=options)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Sizes that are equal by chance at one call may differ at the next. What else compiles keeps torch's default.
        with shapes.patch(use_duck_shape=False):
            return compiled(*args, **kwargs)

    return run


class CompiledPart:
    """A part of a decoding step, compiled, sizes left open.

    Where that fails it runs as it is written from then on, and a warning says why: it was not asked for. Such a call
    may have begun before it failed, so the function has to be one that may be called twice.
    """

    def __init__(self, function: Forward) -> None:
        self.function = function
        self.fast: Forward | None = _compile(function, mode="default")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fast is not None:
            from torch._dynamo.exc import TorchDynamoException  # importing torch._dynamo takes seconds

            try:
                return self.fast(*args, **kwargs)
            except TorchDynamoException as error:
                self.fast = None
                reason = next(iter(str(error).splitlines()), "without a word")
                warnings.warn(
                    f"decoding runs as written, not compiled: {type(error).__name__}, {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.function(*args, **kwargs)


def _uncached(kwargs: dict[str, Any]) -> bool:
    return not _cached(kwargs)


def _decoding(kwargs: dict[str, Any]) -> bool:
    return _phase(kwargs) == "decode"


class Graphs(NamedTuple):
    """What torch.compile has built in this process so far."""

    built: int
    again: int  # of code that had been built before: another dtype, another mode, a size that could not be left open


def recompilations() -> Graphs:
    """How many graphs were built, and how often code was compiled again."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER  # importing torch._dynamo takes seconds
    from torch._dynamo.utils import counters

    return Graphs(counters["stats"]["unique_graphs"], sum(n - 1 for n in FRAME_COMPILE_COUNTER.values() if n > 1))
