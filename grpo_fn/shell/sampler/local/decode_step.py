"""One token for every row: the buffers of a decoding step, its CUDA graphs, and the texts that end a completion."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase

from grpo_fn.shell.model import packed_input
from grpo_fn.shell.model.attention import install, unusable_mask
from grpo_fn.shell.model.blocks import CompiledPart, blocks, compile_for_decoding, compiles_decoding
from grpo_fn.shell.sampler.interface import TokenSampler
from grpo_fn.shell.sampler.local.joined_projections import joined_model, relink
from grpo_fn.shell.sampler.local.kv_cache import (
    Attended,
    ChunkAttention,
    DecodeAttention,
    KVCache,
    LongRows,
    PrefillAttention,
    RowSlots,
    attend,
    products_in_float32,
    row_slots,
)
from grpo_fn.shell.sampler.local.split_kv import (
    SPLIT,
    SplitKV,
    split_kv_attention,
    split_kv_uncovered_reason,
    split_kv_unsupported_reason,
    warn_of_plain_attention,
)

# -- how a step is run: as it is written, or, on CUDA, as a graph that is captured at its shape's second use


SYNC_WARNING = "called a synchronizing CUDA operation"  # torch's own, in its debug mode for synchronization
RECOVERS = Version("2.12")  # before, a capture that failed left the allocator in capture mode (pytorch#180395)

Step = Callable[[], None]
Capture = Callable[[Step], Step]  # a step to its replay; may run the step, does not count as a run


class Sizes(NamedTuple):
    """Which batches and widths there are, and how many steps are made before anybody looks at what was drawn."""

    rows: Callable[[int], int]  # at least as many
    columns: Callable[[int], int]
    capacity: Callable[[int], int]  # of buffers
    steps: int


def exact_size(n: int) -> int:
    """Any size."""
    return n


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


class Eager:
    """Every step as it is written."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None:
        """Run the step so many times."""
        for _ in range(times):
            step()

    def drop(self) -> None:
        """There is nothing to drop."""


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
        """Forget what was captured: what it reads or writes is gone."""
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
                    f"{torch.__version__}, wanted {RECOVERS} or later, which goes on without; or another sampler"
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


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the model's weights and buffers lie."""
    return tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))


def capturable(model: nn.Module) -> bool:
    """Whether all of the model is in plain tensors on one CUDA device: what is gathered for a call lies elsewhere
    each time."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(x.data) is Tensor and x.device.type == "cuda" for x in tensors)
    return bool(tensors) and plain and len({x.device for x in tensors}) == 1


# -- what ends a completion: tokens that do by themselves, and texts that the last token completes


UNSPELT = "\N{REPLACEMENT CHARACTER}"  # what bytes are decoded to that are not a character yet


class Stops:
    """Stop strings, and which of `size` tokens may complete one: text is looked at where one of those was drawn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.suspect = tokens_of_stops(tokenizer, self.stop, size) if stop else torch.zeros(size, dtype=torch.bool)
        # Every token holds at least one byte, so the last len(stop) tokens hold it; one more in front, because decoders
        # of the SentencePiece kind drop a leading space.
        self.tail = max((len(s.encode()) for s in stop), default=0) + 1

    def first(self, completions: Sequence[list[int]], unseen: Sequence[int]) -> list[int]:
        """How long each completion is when a stop string is in it, of which all but the last `unseen` are known not to
        complete one; 0 for those in which none is."""
        lengths = [0] * len(completions)
        ends = [
            (row, t + 1)
            for row, (tokens, new) in enumerate(zip(completions, unseen, strict=True))
            for t in range(len(tokens) - new, len(tokens))
            if self.suspect[tokens[t]]
        ]
        tails = [completions[row][max(0, end - self.tail) : end] for row, end in ends]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True) if tails else []
        for (row, end), text in zip(ends, texts, strict=True):
            if not lengths[row] and any(s in text for s in self.stop):
                lengths[row] = end
        return lengths


def tokens_of_stops(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], size: int) -> Bool[Tensor, "V"]:
    """Tokens whose text holds the last character of a stop string, or bytes that may be part of one.

    Each is decoded behind itself, as decoders drop the space before a first word. Tokens that the tokenizer does not
    know are suspect, and all are where it tidies spaces, because then a token changes the text before it.
    """
    suspect = torch.ones(size, dtype=torch.bool)
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return suspect
    last = {UNSPELT, *(s[-1] for s in stop)}
    ids = range(min(size, len(tokenizer)))
    texts = tokenizer.batch_decode([[i, i] for i in ids], skip_special_tokens=True)
    suspect[: len(ids)] = torch.tensor([not last.isdisjoint(text) for text in texts], dtype=torch.bool)
    return suspect


def token_table(ids: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, "V"]:
    """A table of all tokens in which these are marked; those beyond the vocabulary cannot be drawn."""
    table = torch.zeros(size, dtype=torch.bool)
    table[[i for i in ids if 0 <= i < size]] = True
    return table.to(device)


Layout = PrefillAttention | ChunkAttention | DecodeAttention

FEWEST_ROWS = 8  # of a captured step, and prompts; fewer cost about as much, and torch compiles anew for a size of 1
FEWEST_COLUMNS = 64  # that a captured step looks at where it attends by matrix products
LOOK = 16  # steps between two looks at what has ended, where looking means waiting for the device
KEEP = 1 / 8  # of a device's memory: what captured steps may hold while it is trained on for the first time
MARGIN = 0.1  # of a device's memory that stays free beside captured steps and the training seen so far


class Live(NamedTuple):
    """What is known of the row in each slot. Of one that has ended nothing changes any more."""

    token: Int[Tensor, "S"]  # the last, not yet read by the model
    start: Int[Tensor, "S"]  # tokens of its prompt
    length: Int[Tensor, "S"]  # tokens whose keys and values are known, its prompt's included
    drawn: Int[Tensor, "S"]
    limit: Int[Tensor, "S"]  # most tokens of its completion
    ended: Bool[Tensor, "S"]
    stopped: Bool[Tensor, "S"]  # it ended by itself
    suspect: Bool[Tensor, "S"]  # it may have completed a stop string since that was looked at
    u: Float[Tensor, "S N"]
    tokens: Int[Tensor, "S N+1"]  # those of the completion; the last column is for what counts nowhere
    logp: Float[Tensor, "S N+1"]


def empty_slots(count: int, new: int, device: torch.device) -> Live:
    """Slots without a row."""
    number = partial(torch.zeros, dtype=torch.long, device=device)
    flag = partial(torch.zeros, count, dtype=torch.bool, device=device)
    u = torch.zeros(count, new, dtype=torch.float64, device=device)
    logp = torch.zeros(count, new + 1, device=device)
    return Live(*(number(count) for _ in range(5)), ~flag(), flag(), flag(), u, number(count, new + 1), logp)


class Marks(NamedTuple):
    """Of every token: whether it ends a completion, and whether it may complete a stop string."""

    ends: Bool[Tensor, "V"]
    suspect: Bool[Tensor, "V"]


def draw(live: Live, logits: Float[Tensor, "S V"], token_sampler: TokenSampler, marks: Marks) -> None:
    """The next token of every row, from its own u; in place."""
    width = live.u.shape[1]
    token, logp = token_sampler(logits, live.u.gather(1, live.drawn[:, None].clamp(max=width - 1))[:, 0])
    going = ~live.ended
    at = torch.where(going, live.drawn, width)[:, None]
    live.tokens.scatter_(1, at, token[:, None])
    live.logp.scatter_(1, at, logp[:, None])
    live.token.copy_(token)
    live.drawn.add_(going)
    live.suspect.logical_or_(going & marks.suspect[token])
    live.stopped.logical_or_(going & marks.ends[token])
    live.ended.logical_or_(live.stopped | (live.drawn >= live.limit))


def forward_step(model: nn.Module, ids: Tensor, position: Tensor, layout: Layout, keep: Tensor | int) -> Tensor:
    """Logits of the tokens that `keep` names, `[B K V]`."""
    model_kwargs: dict[str, Any] = {"attention_mask": unusable_mask(ids.device), "layout": layout, "use_cache": False}
    return model(input_ids=ids, position_ids=position, logits_to_keep=keep, **model_kwargs).logits


def prefill_prompts(
    model: nn.Module, prompts: Sequence[list[int]], device: torch.device
) -> tuple[PrefillAttention, Float[Tensor, "P V"]]:
    """Every prompt once, end to end: keys and values, and the logits behind each one's last token."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    context = PrefillAttention(lengths, device=device)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    position = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device)
    last = (lengths.cumsum(0) - 1).to(device)
    return context, forward_step(model, ids[None], position[None], context, last)[0]


class Code(NamedTuple):
    """What runs in a step besides the model, as it is written or compiled."""

    attended: Attended
    wrap_token_sampler: Callable[[TokenSampler], TokenSampler]  # what is run for it
    split_kv: SplitKV | None = None  # in the place of `attended`


WRITTEN = Code(attend, lambda token_sampler: token_sampler)


class DecodeShape(NamedTuple):
    """What a step looks at: so many slots and columns of what was drawn, so many of prompts, and lanes for each."""

    rows: int
    columns: int
    prompts: int
    reach: int
    wide: int


class Need(NamedTuple):
    """Capacity for a call: rows and prompts at once, tokens of the longest completion and the longest prompt."""

    rows: int
    new: int
    prompts: int
    longest: int


class DecodeEngine:
    """A model, and the buffers that it decodes with. They are as large as the largest call so far needed, no larger."""

    def __init__(
        self, model: nn.Module, *, sizes: Sizes, run: Eager | GraphCache, code: Code, stepped: nn.Module | None = None
    ) -> None:
        self.model, self.sizes, self.run, self.code = model, sizes, run, code
        self.stepped = model if stepped is None else stepped  # what is run in a step, of the same weights
        self.drawn: KVCache | None = None
        self.prompts: KVCache | None = None
        self.live: Live | None = None
        self.marks: Marks | None = None
        self.tables: dict[DecodeShape, RowSlots] = {}
        self.at: tuple[int, ...] = ()
        self.kept = 0  # bytes of the buffers while something else used the device last
        self.versions: int | None = None  # of the weights then
        self.trained = False  # whether they have changed since: then the peak of memory is that of training, too

    def choices(self) -> dict[str, str]:
        """What was chosen for its steps on this device: how they attend, and whether projections are one product."""
        attends = "matrix products" if self.code.split_kv is None else "split-KV kernel"
        return {"decoding attention": attends, "projections": "apart" if self.stepped is self.model else "joined"}

    def ready(self, need: Need, marks: Marks) -> None:
        """Have at least that capacity, for `need.new` tokens a row, and no row in it."""
        rows, prompts, longest = (self.sizes.capacity(n) for n in (need.rows, need.prompts, need.longest))
        self.trained = self.trained or self.versions not in (None, weight_versions(self.model))
        if not self.fits(rows, prompts, longest, need.new, len(marks.ends)):
            if self.drawn is not None:
                rows = max(rows, self.drawn.count)
                prompts, longest = max(prompts, self.prompts.count), max(longest, self.prompts.columns)
            self.drop()
            self.drawn, self.prompts = KVCache(rows, need.new), KVCache(prompts, longest)
            self.live = empty_slots(rows, need.new, marks.ends.device)
            self.marks = Marks(*(x.clone() for x in marks))
        if addresses(self.model) != self.at:
            self.run.drop()
            relink(self.stepped)
            self.at = addresses(self.model)
        self.live.ended.fill_(True)
        for x, mark in zip(self.marks, marks, strict=True):
            x.copy_(mark)

    def fits(self, rows: int, prompts: int, longest: int, new: int, vocabulary: int) -> bool:
        """Whether the buffers will do."""
        if self.drawn is None or self.drawn.columns != new or len(self.marks.ends) != vocabulary:
            return False
        return self.drawn.count >= rows and self.prompts.count >= prompts and self.prompts.columns >= longest

    def set_row_slots(self, shape: DecodeShape, slots: RowSlots) -> None:
        """Where rows sit in steps of that shape from now on."""
        if shape not in self.tables:
            self.tables[shape] = RowSlots(*(x.to(self.live.length.device, copy=True) for x in slots[:2]), slots.wide)
        for x, value in zip(self.tables[shape][:2], slots[:2], strict=True):
            x.copy_(value)

    def advance(
        self, shape: DecodeShape, token_sampler: TokenSampler, *, steps: int, long: LongRows | None = None
    ) -> None:
        """So many tokens for every row in the first `shape.rows` slots; `long` ones see more than `shape.columns`."""

        def step() -> None:
            live, (_, columns, _, reach, _) = Live(*(x[: shape.rows] for x in self.live)), shape
            table = self.tables[shape]
            seen = (self.prompts, self.drawn, table, live.start, live.length)
            how = {"attended": self.code.attended, "split_kv": self.code.split_kv, "long": long}
            context = DecodeAttention(*seen, reach=reach, columns=columns, **how)
            logits = forward_step(self.stepped, live.token[:, None], live.length[:, None], context, 1)[:, -1]
            live.length.add_(~live.ended)
            draw(live, logits, self.code.wrap_token_sampler(token_sampler), self.marks)

        self.run((shape, token_sampler), step, self.live, times=steps)

    def rest(self) -> None:
        """Free the buffers, unless steps were captured with them and what else is done there has space beside them."""
        if self.drawn is None:
            return
        device, size = self.marks.ends.device, self.drawn.bytes + self.prompts.bytes
        keeps = device.type == "cuda" and size <= self.free_bytes(device)
        if not keeps:
            self.drop()
        self.kept, self.versions = size * keeps, weight_versions(self.model)

    def free_bytes(self, device: torch.device) -> float:
        """Bytes that the buffers may hold meanwhile: what the most that was ever allocated leaves, a margin apart.

        Before anything was trained, whose peak that would be, a share of the device.
        """
        if not self.trained:
            return KEEP * memory_budget(device)
        return (1 - MARGIN) * memory_budget(device) - (torch.cuda.max_memory_allocated(device) - self.kept)

    def drop(self) -> None:
        """Free the buffers, and forget what was captured with them."""
        self.run.drop()
        self.tables.clear()
        self.drawn = self.prompts = self.live = self.marks = None


def weight_versions(model: nn.Module) -> int:
    """A number that changes when a weight is written to."""
    return sum(p._version for p in model.parameters())


def memory_budget(device: torch.device) -> float:
    """Bytes of the device that this process may take."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory


def captured_sizes(*, split_kv: bool) -> Sizes:
    """Which sizes captured steps have."""
    columns = partial(graph_size, least=SPLIT if split_kv else FEWEST_COLUMNS)
    return Sizes(partial(graph_size, least=FEWEST_ROWS), columns, buffer_size, LOOK)


def build_engine(model: nn.Module) -> DecodeEngine:
    """Steps that are compiled and captured where the model is whole on a CUDA device; as they are written elsewhere.

    Nothing is compiled for small blocks, nor under deterministic kernels: generated code is tuned to the sizes that it
    meets first, and rounds otherwise in a process that meets others.
    """
    if not capturable(model):
        return DecodeEngine(model, sizes=Sizes(exact_size, exact_size, exact_size, 1), run=Eager(), code=WRITTEN)
    keep_logits_in_float32(model)
    split_kv = choose_split_kv(model)
    stepped = choose_joined_model(model, split_kv)
    compiles = compiles_decoding(model, deterministic=torch.are_deterministic_algorithms_enabled())
    code = compile_decode_parts(stepped) if compiles else WRITTEN
    return DecodeEngine(
        model,
        sizes=captured_sizes(split_kv=split_kv is not None),
        run=GraphCache(CudaGraph),
        code=code._replace(split_kv=split_kv),
        stepped=stepped,
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
        warn_of_plain_attention(reason)
        return None
    return split_kv_attention


@torch.no_grad()
def choose_joined_model(model: nn.Module, split_kv: SplitKV | None) -> nn.Module:
    """The model with projections of the same states as one product, once it has been seen to compute the same.

    The model itself where none can be joined, and, with a warning that says why, where a trial fails or is off.
    """
    stepped, device = joined_model(model), model.get_input_embeddings().weight.device
    if stepped is model:
        return model
    try:
        reason = decoding_difference(model, device, split_kv, stepped)
    except torch.OutOfMemoryError:
        raise
    except packed_input.REFUSALS as error:  # a forward that asks for them in another order
        reason = packed_input.refusal(error)
    if reason is not None:
        warnings.warn(f"decoding has a product for each projection: {reason}", RuntimeWarning, stacklevel=2)
        return model
    return stepped


def compile_decode_parts(model: nn.Module) -> Code:
    """Everything in a step that is made of small operations, each part compiled once for all layers."""
    for block in blocks(model):
        compile_for_decoding(block)
    return Code(CompiledPart(attend), cache(CompiledPart))


# -- is a model fit for it


@torch.no_grad()
def decoding_unsupported_reason(model: nn.Module, device: torch.device) -> str | None:
    """Why the model must not be decoded this way; None when it may. By steps of a short trial."""
    try:
        install(model)
        return packed_input.packing_unsupported_reason(model, device) or decoding_difference(model, device)
    except torch.OutOfMemoryError:
        raise
    except packed_input.REFUSALS as error:
        return packed_input.refusal(error)


def decoding_difference(
    model: nn.Module, device: torch.device, split_kv: SplitKV | None = None, stepped: nn.Module | None = None
) -> str | None:
    """How far logits of two decoding steps are from those of the whole rows; None when that is rounding."""
    size = model.config.get_text_config().vocab_size
    texts = [[(5 * b + t) ** 2 % size for t in range(n)] for b, n in enumerate((7, 3, 7))]
    texts[2][:-2] = texts[0][:-2]  # two rows go on from one prompt
    starts, home = [text[:-2] for text in texts[:2]], torch.tensor([0, 1, 0])
    start = torch.tensor([len(text) - 2 for text in texts], device=device)
    prompts, drawn = KVCache(2, len(starts[0])), KVCache(3, 2)
    lanes = row_slots(home, home >= 0, 2, 2)
    lanes = RowSlots(*(x.to(device) for x in lanes[:2]), lanes.wide)
    with packed_input.without_dropout(model):
        whole = [torch.tensor([text], device=device) for text in texts]
        reference = [model(input_ids=ids, use_cache=False).logits[0, -3:] for ids in whole]
        context, logits = prefill_prompts(model, starts, device)
        context.copy(prompts, torch.arange(2, device=device))
        got = [logits[home.to(device)]]
        for t in (0, 1):
            token = torch.tensor([[text[t - 2]] for text in texts], device=device)
            seen = (prompts, drawn, lanes, start, start + t)
            how = {"attended": attend, "split_kv": split_kv}
            context = DecodeAttention(*seen, reach=prompts.columns, columns=t + 1, **how)
            got.append(forward_step(stepped or model, token, (start + t)[:, None], context, 1)[:, -1])
    reference = torch.stack(reference).to(model.get_input_embeddings().weight.dtype)  # which says how close is close
    return packed_input.too_far_apart("logits", torch.stack(got, 1) - reference, reference)


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
