"""Rows end to end in one stream: how a model is shown them, and attention over them beside the one it was built with.

The stream holds what predicts a sampled token, or is seen by what does, and nothing else. What looks at one token at a
time never notices; attention gets the rows' layout, which travels with the model's call.

Transformers looks attention up by the name in a model's config. While a call with a `layout` is made, `takes_layout`
puts a name of ours there, under which attention is computed as the layout says (`PackedAttention` in training,
`decode_step.DecodeAttention` while decoding). At all other times the config has the name that the model was built with:
some models branch on it, and mask or export otherwise under a name that they do not know.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from importlib.util import find_spec
from inspect import signature
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest
from torch.nn.functional import dropout, embedding_bag, pad, scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from grpo_fn.core.batch import Spans, read_lengths, share_prompts, visible_positions

# -- layouts: which tokens see which when rows lie end to end and some share the prompt of another row


Phase = Literal["training", "prefill", "decode"]  # the last two write keys and values into a cache
Window = int | None  # keys that a query sees, itself included; None: all there are up to it


class AttentionSpec(NamedTuple):
    """What a layer asks of attention."""

    window: Window
    scale: float
    dropout: float
    cap: float | None  # of the scores
    backend: str  # the name that the model was built with
    sinks: Float[Tensor, "H"] | None = None  # one more score for each head, of a key whose value is 0

    @property
    def eager(self) -> bool:
        """Whether the model was built to have it written out."""
        return self.backend == EAGER


class Bucket(NamedTuple):
    """Rows of similar length, padded to the longest among them.

    A padded query is the row's last once more, a padded key its first: both are the row's own, so nothing odd in
    another row gets here, and every query sees some key.
    """

    query: Int[Tensor, "b q"]  # into the stream
    key: Int[Tensor, "b k"]
    position: Int[Tensor, "b q"]  # of each query in its row: it sees keys 0 to there
    real: Bool[Tensor, "b q"]  # queries that are no padding


class RaggedLayout(NamedTuple):
    """All rows end to end, as kernels for rows of unequal length take them; the queries are the stream as it is."""

    key: Int[Tensor, "K"]  # into the stream
    queries: Int[Tensor, "rows+1"]  # where each row's begin; where the last one's end
    keys: Int[Tensor, "rows+1"]
    longest: tuple[int, int]  # queries and keys


class Readers(NamedTuple):
    """Of every token of the stream, where among all rows' keys it is read: what the pullback of a gather adds up."""

    place: Int[Tensor, "K"]  # into the keys, those that read the same token side by side, in the rows' order
    begin: Int[Tensor, "N+1"]  # where each token's begin; where the last one's end


class PackedAttention:
    """Rows that lie end to end in one stream, the one row `[1 H N D]` of the batch.

    Made for one micro-batch and the same in all layers of the model. What a kernel needs is made when it asks.
    `windows` lists those that attention asked for, layer by layer.
    """

    phase: ClassVar[Phase] = "training"

    def __init__(self, spans: Spans, at: Int[Tensor, "B T"], *, device: torch.device) -> None:
        self.spans, self.at, self.device = spans, at, device
        self.windows: list[Window] = []
        self._masks: dict[tuple[int, Window, torch.dtype], Tensor | None] = {}

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Rows by length; those that read their own prompt apart from those that begin behind it."""
        buckets = [bucket(self.spans, self.at, rows) for rows in buckets_by_length(self.spans)]
        self._back = bucket_positions(buckets).to(self.device)
        return [Bucket(*(x.to(self.device) for x in one)) for one in buckets]

    def stream_order(self, outputs: list[Float[Tensor, "_ _ H D"]]) -> Float[Tensor, "N H D"]:
        """What was found for every query of every bucket, back in the stream's order."""
        return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, self._back)

    def mask(self, number: int, window: Window, dtype: torch.dtype) -> Float[Tensor, "b 1 q k"] | None:
        """What is added to the scores of that bucket: 0 where a query sees the key, -inf elsewhere.

        None where that is what causal attention does by itself, because queries and keys are the same.
        """
        key = (number, window, dtype)
        if key not in self._masks:
            one = self.buckets[number]
            plain = one.query.shape == one.key.shape and not bool(one.position[:, 0].any())
            short = window is None or window >= one.key.shape[1]
            self._masks[key] = None if plain and short else additive_mask(one, window, dtype)
        return self._masks[key]

    @cached_property
    def ragged_rows(self) -> RaggedLayout:
        """The same for kernels that need no padding: every row's keys, its prompt's included, one row after another."""
        rows = (self.spans.end > self.spans.start).nonzero()[:, 0]
        start, end = self.spans.start[rows], self.spans.end[rows]
        key = self.at[rows][torch.arange(self.at.shape[1]) < end[:, None]].to(self.device)
        queries, keys = (pad(n.cumsum(0), (1, 0)).int().to(self.device) for n in (end - start, end))
        return RaggedLayout(key, queries, keys, (int((end - start).max()), int(end.max())))

    @cached_property
    def readers(self) -> Readers:
        """Who reads which token, sorted once on the device for all layers, and without a wait."""
        token, place = self.ragged_rows.key.sort(stable=True)
        stream = int((self.spans.end - self.spans.start).clamp(min=0).sum())
        return Readers(place, torch.searchsorted(token, torch.arange(stream + 1, device=token.device)))

    @torch.compiler.disable
    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec) -> Tensor:
        """Every token of the stream sees what it sees of its row.

        Compiled code stops here: the sizes of the buckets differ from micro-batch to micro-batch, and each would be
        compiled anew.
        """
        self.windows.append(how.window)
        streams = [rearrange(x, "1 h n d -> n h d") for x in (query, key, value)]
        return choose_kernel(query, how)(*streams, self, how)[None]


def buckets_by_length(spans: Spans) -> Iterator[Int[Tensor, "b"]]:
    """Rows with something to read, in parts of which the longest is at most twice as long as the shortest."""
    lengths = spans.end - spans.start
    for where in (spans.start == 0, spans.start > 0):
        rows = (where & (lengths > 0)).nonzero()[:, 0]
        rows = rows[lengths[rows].argsort(descending=True, stable=True)]
        while len(rows):
            many = int((2 * lengths[rows] >= lengths[rows[0]]).sum())
            yield rows[:many]
            rows = rows[many:]


def bucket(spans: Spans, at: Int[Tensor, "B T"], rows: Int[Tensor, "b"]) -> Bucket:
    """These rows, side by side."""
    start, end = spans.start[rows, None], spans.end[rows, None]
    column = start + torch.arange(int((end - start).max()))
    last = torch.minimum(column, end - 1)
    return Bucket(at[rows].gather(1, last), at[rows, : int(end.max())], last, column < end)


def bucket_positions(buckets: list[Bucket]) -> Int[Tensor, "N"]:
    """Where each token of the stream is among all queries of all buckets."""
    query, real = (
        torch.cat([x.flatten() for x in field]) for field in zip(*((b.query, b.real) for b in buckets), strict=True)
    )
    return real.nonzero()[:, 0][query[real].argsort()]


def additive_mask(one: Bucket, window: Window, dtype: torch.dtype) -> Float[Tensor, "b 1 q k"]:
    """Causal attention within a row, to the `window` last keys alone where there is one."""
    key, query = torch.arange(one.key.shape[1], device=one.key.device), one.position[:, None, :, None]
    unseen = (key > query) if window is None else (key > query) | (key <= query - window)
    return torch.zeros(unseen.shape, dtype=dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)


# -- which kernels attend, by name: `sections.Compute.attention`


KNOB = "sections.Compute.attention"
AUTO = "auto"  # "sdpa" of a model that has it, else "eager"
EAGER = "eager"  # written out operator by operator, the same on every device, with the scores in memory
HALVES = (torch.bfloat16, torch.float16)


class FlashPackage(NamedTuple):
    """A package of kernels for bfloat16 and float16, and what it asks for."""

    module: str  # to be imported
    install: str  # how that module is had
    least: tuple[int, int]  # compute capability of the card
    most: tuple[int, int] | None


FLASH = {
    "flash_attention_2": FlashPackage("flash_attn", "pip install --no-build-isolation 'grpo-fn[flash]'", (8, 0), None),
    "flash_attention_3": FlashPackage(
        "flash_attn_interface",
        "pip install --no-build-isolation ./hopper in a checkout of github.com/Dao-AILab/flash-attention",
        (9, 0),
        (9, 9),
    ),
}
NAMES = (AUTO, EAGER, "sdpa", *FLASH)


def check_attention_choice(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for an attention that no machine has, or that does not know the dtype."""
    if name not in NAMES:
        raise ValueError(f"{KNOB}: got {name!r}, expected one of {', '.join(NAMES)}")
    if name in FLASH and dtype not in HALVES:
        raise ValueError(
            f"{KNOB}: got {name!r} in {str(dtype).removeprefix('torch.')}, expected sections.Compute.dtype 'bfloat16' "
            "or 'float16' (scale/bf16.gin, scale/fp16.gin), or attention 'sdpa'"
        )


def model_attention(name: str, config: PretrainedConfig) -> str:
    """The attention that a model of this config is built with: for "auto", what it has.

    Raises ValueError for "sdpa" where the model has "eager" alone.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_sdpa = model is None or model._supports_sdpa
    if name == "sdpa" and not has_sdpa:
        raise ValueError(
            f"{KNOB}: got 'sdpa' for {model.__name__}, which has 'eager' alone, expected 'auto' or 'eager'"
        )
    return ("sdpa" if has_sdpa else EAGER) if name == AUTO else name


def check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for an attention that this machine has not, by its package or the card."""
    check_attention_choice(name, dtype)
    if name not in FLASH:
        return
    package = FLASH[name]
    if find_spec(package.module) is None:
        raise ValueError(
            f"{KNOB}: got {name!r} without the module {package.module}, expected it installed ({package.install}), or "
            "attention 'sdpa'"
        )
    required = f"compute capability {'.'.join(map(str, package.least))}" + (" or later" if package.most is None else "")
    if device.type != "cuda":
        raise ValueError(f"{KNOB}: got {name!r} on {device}, expected a CUDA device of {required}, or attention 'sdpa'")
    capability = torch.cuda.get_device_capability(device)
    if capability < package.least or (package.most is not None and capability > package.most):
        raise ValueError(
            f"{KNOB}: got {name!r} on a card of compute capability {capability[0]}.{capability[1]}, expected "
            f"{required}, or attention 'sdpa'"
        )


def attention_note(name: str, dtype: torch.dtype, device: torch.device | None) -> list[str]:
    """What attends to packed rows on a card: for the plan of a run."""
    if device is not None and device.type != "cuda":
        return []
    if name == EAGER:
        how = "padded buckets, written out"
    elif dtype not in HALVES:
        how = "padded buckets, by scaled_dot_product_attention"
    elif name == "flash_attention_3":
        how = "flash-attn 3's kernel for rows of unequal length"
    else:
        how = "flash-attn's kernel for rows of unequal length where it imports, else torch's"
    return [f"packed rows attend in {how} ({KNOB} = {name!r})"]


# -- attention over rows of unequal length, in kernels that take them as they lie: halves on CUDA only


WARNING = 1  # torch's number for deterministic algorithms with `warn_only`


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedAttention, how: AttentionSpec
) -> Float[Tensor, "N H E"]:
    """The flash-attn package."""
    kernel = partial(flash_varlen_function(), dropout_p=how.dropout)
    return flash_rows(kernel, query, key, value, layout, how)


def flash_attention_3(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedAttention, how: AttentionSpec
) -> Float[Tensor, "N H E"]:
    """FlashAttention-3, of the module flash_attn_interface. Raises ValueError for dropout, which it lacks."""
    from flash_attn_interface import flash_attn_varlen_func

    if how.dropout:
        raise ValueError(
            f"got attention with dropout {how.dropout} in flash_attention_3, expected 0, or another kernel"
        )
    return flash_rows(flash_attn_varlen_func, query.contiguous(), key, value, layout, how)


def flash_rows(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedAttention,
    how: AttentionSpec,
) -> Float[Tensor, "N H E"]:
    """What a kernel of either package gives. A row's queries are the last of its keys: so both align a causal mask."""
    rows = layout.ragged_rows
    return kernel(
        query,
        *gather_keys_and_values(key, value, layout),
        rows.queries,
        rows.keys,
        *rows.longest,
        softmax_scale=how.scale,
        causal=True,
        window_size=(-1 if how.window is None else how.window - 1, 0),
        softcap=how.cap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@cache
def flash_varlen_function() -> Callable[..., Tensor] | None:
    """`flash_attn_varlen_func` of the flash-attn package; None, once with a warning, where it cannot be imported.

    The name may be there without it: flash-attn 4 installs `flash_attn.cute` alone, and a wheel built for another
    torch ends with an OSError.
    """
    if find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        warnings.warn(
            f"attention runs on torch's kernels, without flash-attn: {type(error).__name__}, {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return flash_attn_varlen_func


def varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedAttention, how: AttentionSpec
) -> Float[Tensor, "N H E"]:
    """The same kernels, as torch has them: without a cap. Raises ValueError for dropout, which they lack, too."""
    if how.dropout:
        raise ValueError(
            f"got attention with dropout {how.dropout} on rows of unequal length, expected 0, or flash-attn"
        )
    rows, groups = layout.ragged_rows, query.shape[1] // key.shape[1]
    k, v = gather_keys_and_values(key, value, layout)
    # Before the flag came torch did not compare the heads, and the kernel below it is the same.
    more = {"enable_gqa": True} if groups > 1 and has_gqa_flag() else {}
    window = (-1 if how.window is None else how.window - 1, 0)
    call = RaggedCall((rows.queries, rows.keys, *rows.longest), how.scale, window, more)
    if torch.get_deterministic_debug_mode() == WARNING:
        return RepeatableVarlen.apply(query.contiguous(), k, v, call)
    return call(query.contiguous(), k, v)


class RaggedCall(NamedTuple):
    """What `varlen_attn` is called with besides queries, keys and values."""

    lengths: tuple[Tensor, Tensor, int, int]
    scale: float
    window: tuple[int, int]
    more: dict[str, bool]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **also: AuxRequest) -> Any:
        """The output; with `return_aux`, what was asked for besides."""
        from torch.nn.attention.varlen import varlen_attn

        how = {"scale": self.scale, "window_size": self.window, **self.more, **also}
        return varlen_attn(query, key, value, *self.lengths, **how)


class RepeatableVarlen(torch.autograd.Function):
    """`varlen_attn` whose gradients are the same bits again under `use_deterministic_algorithms(True, warn_only=True)`.

    With `warn_only` torch's kernel warns and adds up in any order all the same, though it has a deterministic way.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: RaggedCall) -> Tensor:
        """As the call says."""
        out, lse = call(query, key, value, return_aux=AuxRequest(lse=True))
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of queries, keys and values, by the kernel's deterministic way."""
        call: RaggedCall = ctx.call
        seed = torch.zeros(2, dtype=torch.uint64, device=slope.device)  # of dropout, which there is none of
        causal = call.window == (-1, 0)
        torch.use_deterministic_algorithms(True)  # `warn_only` torch's kernel takes for leave to use its other way
        try:
            slopes = torch.ops.torch_attn._varlen_attn_backward(
                slope, *ctx.saved_tensors, *call.lengths, causal, seed, call.scale, [*call.window]
            )
        finally:
            torch.use_deterministic_algorithms(True, warn_only=True)
        return *slopes, None


@cache
def has_gqa_flag() -> bool:
    """Whether torch takes fewer heads of keys than of queries only where a flag says so."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters  # from torch 2.12


def gather_keys_and_values(
    key: Float[Tensor, "N K D"], value: Float[Tensor, "N K E"], layout: PackedAttention
) -> tuple[Float[Tensor, "R K D"], Float[Tensor, "R K E"]]:
    """The keys and values that the rows see, row after row, as views of one gather."""
    both = torch.cat([key, value], -1)
    readers = layout.readers if both.requires_grad else ()
    pairs = GatherTokens.apply(both, layout.ragged_rows.key, *readers) if readers else both[layout.ragged_rows.key]
    return pairs.split([key.shape[2], value.shape[2]], -1)


class GatherTokens(torch.autograd.Function):
    """A stream's entries at some places, with a pullback that sorts nothing: who reads each token is known.

    Each token's sum is taken by one thread, in the rows' order and in float32 for halves: the same bits again.
    """

    @staticmethod
    def forward(stream: Tensor, index: Tensor, place: Tensor, begin: Tensor) -> Tensor:
        """The entries; `place` and `begin` are for the way back."""
        return stream[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the way back needs."""
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        """Of every token, the sum over all that read it."""
        place, begin = ctx.saved_tensors
        total = embedding_bag(place, slope.flatten(1), begin, mode="sum", include_last_offset=True)
        return total.unflatten(1, slope.shape[1:]), None, None, None


OURS = "+rows"  # behind the name of what stood there before
# What models pass to attention besides, none of which changes what it computes. A layout says more than positions do.
IDLE = frozenset(
    {
        *("position_ids", "use_cache", "cache_position", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)

Attend = Callable[..., Float[Tensor, "N H D"]]


@runtime_checkable
class AttentionContext(Protocol):
    """What travels with a model's call as its `layout`: it knows which tokens see which."""

    phase: ClassVar[Phase]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec
    ) -> Float[Tensor, "B T H D"]:
        """Attention of one layer, whose `module` this is; of each tensor `[B H T D]`."""


@contextmanager
def takes_layout(config: PretrainedConfig) -> Iterator[None]:
    """Attention of the models with this config takes a `layout` meanwhile; also when a block is computed again."""
    before = config._attn_implementation
    config._attn_implementation = before if before.endswith(OURS) else register_attention(before)
    try:
        yield
    finally:
        config._attn_implementation = before


@cache
def register_attention(before: str) -> str:
    """The name under which transformers has ours for a model that was built with `before`."""
    AttentionInterface.register(before + OURS, partial(attention, before=before))
    AttentionMaskInterface.register(before + OURS, ALL_MASK_ATTENTION_FUNCTIONS[before])
    return before + OURS


def unusable_mask(device: torch.device) -> Tensor:
    """An attention mask that transformers hands on as it is and that fits no scores: what uses it fails."""
    return torch.empty(1, 1, 0, 0, device=device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    before: str,
    layout: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls with `[B H T D]` each. Raises ValueError where the model did not hand on the layout."""
    if layout is None:
        raise ValueError("attention: got a call without the layout, expected a model that hands it on")
    return layout.attend(module, query, key, value, parse_spec(query, before, kwargs)), None


def parse_spec(query: Tensor, backend: str, kwargs: dict[str, Any]) -> AttentionSpec:
    """What the model asks for. Raises ValueError for anything that is not done here."""
    odd = [name for name, x in kwargs.items() if name not in KNOWN and name not in IDLE and x is not None]
    if odd or kwargs.get("is_causal") is False:
        raise ValueError(
            f"got attention with {', '.join(sorted(odd)) or 'is_causal=False'}, expected {', '.join(KNOWN)}"
        )
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    return AttentionSpec(window, scale, kwargs.get("dropout", 0.0), cap, backend, kwargs.get("s_aux"))


KNOWN = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"})


def choose_kernel(query: Tensor, how: AttentionSpec) -> Attend:
    """What the backend's name says, and by default the fastest that computes it.

    Kernels for unequal rows are for halves on CUDA. Torch's know no cap, and none knows sinks: such scores are written
    out.
    """
    backend, plain = how.backend, how.cap is None and how.sinks is None
    if how.sinks is None and query.device.type == "cuda" and query.dtype in HALVES:
        if backend == "flash_attention_3":
            return flash_attention_3
        if backend in ("sdpa", "flash_attention_2") and flash_varlen_function() is not None:
            return flash_attention
        if backend in ("sdpa", "flash_attention_2") and plain:
            return varlen
    written_out = backend == EAGER or not plain
    return partial(bucketed_attention, core=eager_attention if written_out else sdpa_attention)


# -- rows of similar length side by side


def bucketed_attention(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "N K D"],
    value: Float[Tensor, "N K E"],
    layout: PackedAttention,
    how: AttentionSpec,
    *,
    core: Callable[..., Float[Tensor, "b H q E"]],
) -> Float[Tensor, "N H E"]:
    """Rows of similar length are padded to one and computed by `core`; key heads are repeated for their query heads."""
    groups, outputs = query.shape[1] // key.shape[1], []
    for number, bucket in enumerate(layout.buckets):
        q, k, v = gather_tokens(query, bucket.query), gather_tokens(key, bucket.key), gather_tokens(value, bucket.key)
        if groups > 1:  # query head h reads head h // groups of the keys
            k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        q, k, v = (rearrange(x, "b n h d -> b h n d") for x in (q, k, v))
        out = core(q, k, v, layout.mask(number, how.window, query.dtype), how)
        outputs.append(rearrange(out, "b h n d -> b n h d"))
    return layout.stream_order(outputs)


def gather_tokens(stream: Float[Tensor, "N ..."], index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The stream's entries at those places. Its pullback adds up what a prompt gets from all that read it."""
    # On CUDA the pullback of index_select adds in any order, that of indexing in one; on CPU the first is fast.
    flat = index.flatten()
    entries = stream[flat] if stream.is_cuda else stream.index_select(0, flat)
    return entries.unflatten(0, index.shape)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec
) -> Float[Tensor, "b H q E"]:
    """Torch's own kernels, which know no cap, as torch chooses."""
    causal = mask is None and q.shape[2] > 1
    return scaled_dot_product_attention(q, k, v, mask, how.dropout, causal, scale=how.scale)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionSpec
) -> Float[Tensor, "b H q E"]:
    """softmax(cap tanh(q k^T scale / cap) + mask) v, the softmax in float32 or better, over sinks, too."""
    scores = q @ k.transpose(2, 3) * how.scale
    scores = scores if how.cap is None else how.cap * torch.tanh(scores / how.cap)
    if mask is None:
        mask = torch.full(scores.shape[2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    weights = softmax_with_sinks(scores + mask, how.sinks).to(q.dtype)
    return dropout(weights, how.dropout) @ v


def softmax_with_sinks(scores: Float[Tensor, "b H q k"], sinks: Float[Tensor, "H"] | None) -> Float[Tensor, "b H q k"]:
    """The softmax in float32 or better. With sinks the weights of a head add up to less than 1."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=dtype)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1, dtype=dtype)[..., :-1]


# -- what a model is shown: the rows end to end, where it computes then what it computes from padded ones


FULL, SLIDING = "full_attention", "sliding_attention"  # as configurations name the kinds of layers
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-4}  # how far states may be apart, of their largest entry
ROUGH = 0.05  # in half precision
REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class ModelInput(NamedTuple):
    """What the model is shown, and where in it each row's tokens are."""

    tokens: Int[Tensor, "R C"]
    at: Int[Tensor, "B T"]  # into the flattened tokens
    model_kwargs: dict[str, Any]  # further arguments of the model's forward


def padded_rows(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
    """Rows `[prompt | completion | padding]`: causal attention never sees the padding."""
    return ModelInput(tokens, torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape), {})


def end_to_end(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
    """What is read of the rows, row after row; a prompt that several begin with once."""
    device, (tokens, mask) = tokens.device, (tokens.cpu(), mask.cpu())
    spans = share_prompts(tokens, mask)
    at = visible_positions(spans, tokens.shape[1])
    column = torch.arange(tokens.shape[1]).expand(tokens.shape)
    read = (column >= spans.start[:, None]) & (column < spans.end[:, None])
    if not read.any():  # a rank without rows has to take part all the same: one token that is not looked at
        read[0, 0] = True
        spans = Spans(*(x.new_tensor([n]) for x, n in zip(spans, (0, 1, 0), strict=True)))
    model_kwargs = {
        "position_ids": column[read][None].to(device),
        "attention_mask": unusable_mask(device),
        "layout": PackedAttention(spans, at, device=device),
    }
    return ModelInput(tokens[read][None].to(device), at.to(device), model_kwargs)


@torch.no_grad()
def packing_unsupported_reason(model: nn.Module, device: torch.device, *, linear: bool) -> str | None:
    """Why the model must not be shown rows end to end; None when it may. By forward passes of short rows.

    Its layers have to attend to all of a row or to a window of it, to say which, and to pass on their arguments; and
    states have to be those of padded rows.
    """
    config = model.config.get_text_config()
    alike = SLIDING if getattr(config, "sliding_window", None) else FULL
    kinds = getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers
    if odd := {*kinds} - {FULL, SLIDING} or ({"chunked"} if getattr(config, "attention_chunk_size", None) else None):
        return f"it has layers of {', '.join(sorted(odd))}"
    tokens, mask = probe(config.vocab_size, device)
    stream = end_to_end(tokens, mask)
    with without_dropout(model):
        padded = states(model, padded_rows(tokens, mask), linear=linear)
    try:
        with without_dropout(model):
            got = states(model, stream, linear=linear)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        return refusal(error)
    windows = [SLIDING if window else FULL for window in stream.model_kwargs["layout"].windows]
    if windows != [*kinds]:
        return f"its layers are {', '.join(kinds)}, and ask for {', '.join(windows) or 'nothing'}"
    read = torch.arange(tokens.shape[1], device=device) < read_lengths(mask)[:, None]
    return too_far_apart("states", got[stream.at[read]] - padded.view(*read.shape, -1)[read], padded)


def refusal(error: Exception) -> str:
    """The error of a model that does not take such a call, in one line."""
    return f"{type(error).__name__}, {str(error).splitlines()[0] if str(error) else 'without a word'}"


def too_far_apart(what: str, gap: Tensor, reference: Tensor) -> str | None:
    """How large the gap to the `reference` is, relative to its largest entry; None when that is rounding."""
    apart = float(gap.abs().max() / reference.abs().max())
    # Not the other way round: NaN is not close.
    return None if apart <= CLOSE.get(reference.dtype, ROUGH) else f"its {what} are {apart:.1g} apart"


def probe(vocabulary: int, device: torch.device) -> tuple[Int[Tensor, "5 9"], Bool[Tensor, "5 9"]]:
    """Groups of three, of one, and of one that begins as the first does; with a hole, and padding behind most."""
    token = torch.arange(45, device=device).view(5, 9) ** 2 % vocabulary
    prompt, end = (torch.tensor(n, device=device)[:, None] for n in ([3, 3, 3, 1, 2], [6, 9, 4, 8, 7]))
    column = torch.arange(9, device=device)
    token = torch.where((column < prompt) & (prompt > 1), token[0], token)
    return token, (column >= prompt) & (column < end) & (column != 5)


def states(model: nn.Module, stream: ModelInput, *, linear: bool) -> Float[Tensor, "N D"]:
    """What a `linear` head is given for every token of the stream; of another head its logits."""
    model_kwargs = {"input_ids": stream.tokens, "use_cache": False, **stream.model_kwargs}
    with takes_layout(model.config.get_text_config()) if "layout" in model_kwargs else nullcontext():
        if not linear:
            return model(**model_kwargs).logits.flatten(0, 1)
        return model.get_decoder()(**model_kwargs).last_hidden_state.flatten(0, 1)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Without dropout; what was training is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
