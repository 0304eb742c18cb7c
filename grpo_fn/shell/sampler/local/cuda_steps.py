"""How decode steps are made fast on CUDA: captured graphs, the split-KV kernel, joined projections, compiled parts.

Each is tried on the model and on the card before it is used (`decode_step.decoding_difference`); one that fails or is
off is left out, with a warning that says why. On other devices steps run as they are written.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_fn.shell.model import attention
from grpo_fn.shell.model.blocks import CompiledPart, blocks, compile_for_decoding, compiles_decoding
from grpo_fn.shell.sampler.local.decode_step import (
    EAGER_CODE,
    DecodeEngine,
    Sizes,
    SplitKV,
    Step,
    StepCode,
    attend,
    decoding_difference,
    exact_size,
    products_in_float32,
)
from grpo_fn.shell.sampler.local.joined_projections import joined_model

FEWEST_ROWS = 8  # of a captured step, and prompts; fewer cost about as much, and torch compiles anew for a size of 1
FEWEST_COLUMNS = 64  # that a captured step looks at where it attends by matrix products
LOOK = 16  # steps between two looks at what has ended, where looking means waiting for the device


def build_engine(model: nn.Module) -> DecodeEngine:
    """Steps that are compiled and captured where the model is whole on a CUDA device; as they are written elsewhere.

    Nothing is compiled for small blocks, nor under deterministic kernels: generated code is tuned to the sizes that it
    meets first, and rounds otherwise in a process that meets others.
    """
    if not capturable(model):
        return DecodeEngine(model, sizes=Sizes(exact_size, exact_size, exact_size, 1), code=EAGER_CODE)
    keep_logits_in_float32(model)
    split_kv = choose_split_kv(model)
    step_model = choose_joined_model(model, split_kv)
    compiles = compiles_decoding(model, deterministic=torch.are_deterministic_algorithms_enabled())
    code = compile_decode_parts(step_model) if compiles else EAGER_CODE
    columns = partial(graph_size, least=FEWEST_COLUMNS if split_kv is None else SPLIT)
    return DecodeEngine(
        model,
        sizes=Sizes(partial(graph_size, least=FEWEST_ROWS), columns, buffer_size, LOOK),
        code=code._replace(split_kv=split_kv),
        graphs=GraphCache(CudaGraph),
        step_model=step_model,
    )


@torch.no_grad()
def choose_split_kv(model: nn.Module) -> SplitKV | None:
    """The kernel for the model's steps, once it has been seen to do them rightly on this card.

    None, with a warning that says why, where it cannot be had, does not cover the model, or fails.
    """
    device = model.get_input_embeddings().weight.device
    reason = split_kv_unsupported_reason(device) or split_kv_uncovered_reason(model)
    try:
        reason = reason or decoding_difference(model, device, split_kv_attention)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton's: code that this card or this version does not take
        reason = f"{type(error).__name__}, {next(iter(str(error).splitlines()), 'without a word')}"
    if reason is not None:
        said = f"decoding attends in plain products, not in the split-KV kernel: {reason}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None
    return split_kv_attention


@torch.no_grad()
def choose_joined_model(model: nn.Module, split_kv: SplitKV | None) -> nn.Module:
    """The model with projections of the same states as one product, once it has been seen to compute the same.

    The model itself where none can be joined, and, with a warning that says why, where a trial fails or is off.
    """
    step_model, device = joined_model(model), model.get_input_embeddings().weight.device
    if step_model is model:
        return model
    try:
        reason = decoding_difference(model, device, split_kv, step_model)
    except torch.OutOfMemoryError:
        raise
    except attention.REFUSALS as error:  # a forward that asks for them in another order
        reason = attention.refusal(error)
    if reason is not None:
        warnings.warn(f"decoding has a product for each projection: {reason}", RuntimeWarning, stacklevel=2)
        return model
    return step_model


def compile_decode_parts(model: nn.Module) -> StepCode:
    """Everything in a step that is made of small operations, each part compiled once for all layers."""
    for block in blocks(model):
        compile_for_decoding(block)
    return StepCode(CompiledPart(attend), cache(CompiledPart))


# -- steps as CUDA graphs, each captured at its shape's second use


SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's own, in its debug mode for synchronization
RECOVERS = Version("2.12")  # before, a capture that failed left the allocator in capture mode (pytorch#180395)

Capture = Callable[[Step], Step]  # a step to its replay; may run the step, does not count as a run


def graph_size(n: int, *, least: int) -> int:
    """The next of least, 2 least, 4 least, ...: few shapes, for what is not seen costs little in a captured step."""
    size = least
    while size < n:
        size *= 2
    return size


def buffer_size(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ...: no buffer is larger than one and a half times what was asked for."""
    size = graph_size(n, least=1)
    return size // 4 * 3 if n <= size // 4 * 3 else size


class UncapturableStep(RuntimeError):
    """A step that waits for the device: found in its warm-up, before any capture begins."""


class BrokenCapture(Exception):
    """A capture that failed on a torch that cannot go on afterwards. Not a RuntimeError: nothing may run on."""


class GraphCache:
    """Steps by their shape, each captured when it is used for the second time: some shapes come once, in passing.

    `captures` makes what captures those that are kept together. After the first step that cannot be captured no other
    is tried: what one shape does, all do.
    """

    def __init__(self, captures: Callable[[], Capture]) -> None:
        self.captures, self.capture = captures, captures()
        self.replays: dict[Hashable, Step] = {}
        self.used: set[Hashable] = set()
        self.refused = False

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times, which is one use; its inputs are in `state` at a capture and at every replay."""
        if shape in self.used and shape not in self.replays:
            before = [x.clone() for x in state]  # warm-ups and capture draw tokens: that is taken back
            self.replays[shape] = step if self.refused else self.capture_graph(step)
            for x, was in zip(state, before, strict=True):
                x.copy_(was)
        self.used.add(shape)
        run = self.replays.get(shape, step)
        for _ in range(times):
            run()

    def capture_graph(self, step: Step) -> Step:
        """Its replay; the step itself where the model does what cannot be captured."""
        try:
            return self.capture(step)
        except RuntimeError as error:
            self.refused = True
            warnings.warn(
                f"decoding runs as written, not as a CUDA graph: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return step

    def drop(self) -> None:
        self.used.clear()
        if self.replays:
            self.replays.clear()
            self.capture = self.captures()


class CudaGraph:
    """Captures steps on the current CUDA device.

    One memory pool serves all: they never run at once, and pass nothing on. One side stream, too: cuBLAS keeps a
    workspace for every stream that it was ever used on, 32 MiB on Hopper.
    """

    def __init__(self) -> None:
        self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Capture the step, after two warm-ups on the side stream: kernels are chosen and libraries set up in them."""
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        try:
            with torch.cuda.stream(self.side):
                step()
                with synchronizations() as waits:
                    step()
        finally:
            current.wait_stream(self.side)
        if waits:
            raise UncapturableStep(f"a step of this model waits for the device {len(waits)} times")
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (those that write checkpoints) may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
                step()
        except Exception as error:
            torch.cuda.set_stream(current)  # an invalidated capture leaves the side stream current
            if Version(torch.__version__).release < RECOVERS.release:
                raise BrokenCapture(
                    f"got a CUDA graph that could not be captured ({str(error).splitlines()[0]}) on torch "
                    f"{torch.__version__}, expected {RECOVERS} or later, which continues without; or another sampler"
                ) from error
            raise
        return graph.replay


@contextmanager
def synchronizations() -> Iterator[list[str]]:
    """The waits of this thread for the device, one message each, by torch's debug mode for synchronization.

    The mode holds for the whole process and would end other threads' work as an error; so it warns, and warnings of
    other threads (the training's, beside a sampler) are left out.
    """
    waits: list[str] = []
    here, mode = get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if SYNC_WARNING not in str(message):
                shown(message, *args, **kwargs)
            elif get_ident() == here:
                waits.append(str(message))

        warnings.showwarning = note
        warnings.filterwarnings("always", message=f".*{SYNC_WARNING}")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def capturable(model: nn.Module) -> bool:
    """Whether all of the model is in plain tensors on one CUDA device: what is gathered for a call lies elsewhere
    each time."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(x.data) is Tensor and x.device.type == "cuda" for x in tensors)
    return bool(tensors) and plain and len({x.device for x in tensors}) == 1


# -- attention of a step as one operator: the kernel is in `split_kv_triton`; `decode_step.attend` computes the same


OPERATOR = "grpo_fn::split_kv_attention"
SPLIT = 512  # columns that one program reads, at most
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 256  # size of a head
MOST_GROUPED = 64  # query heads that share a head of keys
ARCHITECTURE = (8, 0)  # of a card, at least: the first with products of bfloat16

# query [n H D], prompt_key [P K L D], prompt_value [P K L E], key [n K C D], value [n K C E], row [P wide], lane [n],
# start [n], length [n] -> [n H E], in the dtype of the values. `row`, `lane` and `wide` are row, place and width of
# `decode_step.GroupedRows`; a row sees the first `start` columns of its prompt and its own up to `length - start`, the
# last `window` of all these.
torch.library.define(
    OPERATOR,
    "(Tensor query, Tensor prompt_key, Tensor prompt_value, Tensor key, Tensor value, Tensor row, Tensor lane, "
    "Tensor start, Tensor length, int wide, float scale, float? cap, int? window) -> Tensor",
)


def split_kv_attention(*args: Tensor | float | int | None) -> Float[Tensor, "n H E"]:
    """Attention of a step's rows: scores in float32, softmax(cap tanh(q k^T scale / cap)) v."""
    return torch.ops.grpo_fn.split_kv_attention(*args)


def split_kv_unsupported_reason(device: torch.device) -> str | None:
    """Why decoding steps on the device cannot have the kernel; None where they can."""
    if device.type != "cuda":
        return f"the split-KV kernel is for CUDA, and the device is {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < ARCHITECTURE:
        return "compute capability {}.{} of the card, expected {}.{}".format(*capability, *ARCHITECTURE)
    return kernel_import_problem()


@cache
def kernel_import_problem() -> str | None:
    """Why the kernel cannot be imported; None where it has been."""
    try:
        import_module("grpo_fn.shell.sampler.local.split_kv_triton")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # no Triton, or one of another time
        return f"{type(error).__name__}, {next(iter(str(error).splitlines()), 'without a word')}"
    return None


def split_kv_uncovered_reason(model: nn.Module) -> str | None:
    """Why the kernel does not cover what the model asks of it; None where it does."""
    config, weight = model.config.get_text_config(), model.get_input_embeddings().weight
    heads = config.num_attention_heads
    grouped = heads // (getattr(config, "num_key_value_heads", None) or heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if weight.dtype not in DTYPES:
        return f"got {weight.dtype}, expected one of {', '.join(map(str, DTYPES))}"
    if size > LARGEST:
        return f"got heads of {size}, expected at most {LARGEST}"
    if grouped > MOST_GROUPED:
        return f"got {grouped} query heads to a head of keys, expected at most {MOST_GROUPED}"
    return None


# -- a head of halves whose logits come in float32


def keep_logits_in_float32(model: nn.Module) -> None:
    """Make a head of halves give its product in float32, as the trainer's: rounded, a logit of 20 is off by 0.04."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and products_in_float32(head.weight):
        head.forward = partial(linear_in_float32, head.weight)


def linear_in_float32(weight: Float[Tensor, "V D"], hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
    """hidden weight^T with a result in float32; in the dtype of both where a gradient may be asked for."""
    if torch.is_grad_enabled():
        return linear(hidden, weight)
    return torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, hidden.shape[:-1])
