"""Keys and values of rows that are being decoded, in buffers that stay where they are, and attention over them.

A prompt stands in a slot of its own, however many rows go on from it; what a row has drawn stands in the row's own.
Each begins in the first column, so one number says how much of a slot is filled. Nothing is concatenated or grows.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_fn.core.batch import Spans, visible_positions
from grpo_fn.shell.model.attention import (
    HALVES,
    AttentionSpec,
    PackedAttention,
    Phase,
    Window,
    eager_attention,
    sdpa_attention,
)

GATHERED = 3  # columns read of a row whose keys and values are gathered first: once more each, and written
SPARED = 2048  # columns of single rows, at least, that a second computation has to save


class KVCache:
    """`count` slots of `columns` columns. A layer's buffers `[slots, heads, columns, dim]` are made with its first."""

    def __init__(self, count: int, columns: int) -> None:
        self.count, self.columns = count, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int, key: Float[Tensor, "_ H _ D"], value: Float[Tensor, "_ H _ E"]) -> tuple[Tensor, Tensor]:
        """The layer's buffers, for keys and values like these."""
        if layer not in self.layers:
            # Zeros: what a row does not see counts nothing, but nothing times NaN is NaN.
            self.layers[layer] = tuple(
                x.new_zeros(self.count, x.shape[1], self.columns, x.shape[3]) for x in (key, value)
            )
        return self.layers[layer]

    def move(self, source: Int[Tensor, "m"], target: Int[Tensor, "m"], columns: int) -> None:
        """Rows to other slots; the first `columns` columns of them."""
        for buffers in self.layers.values():
            for x in buffers:
                x[target, :, :columns] = x[source, :, :columns]

    @property
    def bytes(self) -> int:
        """What the buffers hold."""
        return sum(x.nbytes for buffers in self.layers.values() for x in buffers)


class PrefillAttention(PackedAttention):
    """Prompts end to end, each read once; what their tokens' keys and values are is kept, layer by layer."""

    phase: ClassVar[Phase] = "prefill"

    def __init__(self, lengths: Int[Tensor, "P"], *, device: torch.device) -> None:
        number = torch.arange(len(lengths))
        spans = Spans(torch.zeros_like(lengths), lengths, number)
        super().__init__(spans, visible_positions(spans, int(lengths.max())), device=device)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: AttentionSpec) -> Tensor:
        """As rows of training do."""
        self.kept[module.layer_idx] = key, value
        return super().attend(module, query, key, value, how)

    def copy(self, slots: KVCache, slot: Int[Tensor, "P"]) -> None:
        """Every prompt's keys and values into its slot; what stands there behind a shorter one is not seen."""
        at = self.at.to(slot.device)
        for layer, streams in self.kept.items():
            for x, stream in zip(slots.of(layer, *streams), streams, strict=True):
                entries = stream[0].index_select(1, at.flatten())
                x[slot, :, : at.shape[1]] = rearrange(entries, "h (p l) d -> p h l d", p=len(at))


class ChunkAttention:
    """Several new tokens of some rows: each sees its prompt, what is in the row's slot, and the chunk up to itself.

    Chunks are padded on the left, so that the last column holds every row's last token. Of each row: its slot and its
    prompt's, how long its prompt is, how many columns of its slot are filled, and how many tokens are new.
    """

    phase: ClassVar[Phase] = "prefill"

    def __init__(
        self,
        prompts: KVCache,
        drawn: KVCache,
        slot: Int[Tensor, "r"],
        prompt_slot: Int[Tensor, "r"],
        start: Int[Tensor, "r"],
        filled: Int[Tensor, "r"],
        new: Int[Tensor, "r"],
    ) -> None:
        self.prompts, self.drawn, self.slot, self.prompt_slot, self.start = prompts, drawn, slot, prompt_slot, start
        self.prompt_columns, self.columns, width = int(start.max()), int((filled + new).max()), int(new.max())
        self.place = torch.arange(width, device=slot.device) - width + (filled + new)[:, None]  # [r M]
        self.row, self.at = (self.place >= filled[:, None]).nonzero(as_tuple=True)  # of tokens that are no padding

    @property
    def position(self) -> Int[Tensor, "r M"]:
        """Of every token in its row; 0 where that is padding in front of all."""
        return (self.place + self.start[:, None]).clamp(min=0)

    def attend(
        self, module: nn.Module, query: Float[Tensor, "r H M D"], key: Tensor, value: Tensor, how: AttentionSpec
    ) -> Float[Tensor, "r M H E"]:
        """The chunks' entries are put into the rows' slots, and seen with all before them."""
        drawn = self.drawn.of(module.layer_idx, key, value)
        for buffer, new in zip(drawn, (key, value), strict=True):
            buffer[self.slot[self.row], :, self.place[self.row, self.at]] = new[self.row, :, self.at]
        prompts = self.prompts.of(module.layer_idx, key, value)
        groups = query.shape[1] // key.shape[1]
        keys, values = (
            torch.cat(
                [p[self.prompt_slot, :, : self.prompt_columns], d[self.slot, :, : self.columns]], 2
            ).repeat_interleave(groups, 1)
            for p, d in zip(prompts, drawn, strict=True)
        )
        core = eager_attention if how.eager or how.cap is not None else sdpa_attention
        out = core(query, keys, values, self.mask(how.window, query.dtype), how)
        return rearrange(out, "r h m e -> r m h e")

    def mask(self, window: Window, dtype: torch.dtype) -> Float[Tensor, "r 1 M _"]:
        """What is added to the scores: 0 where a token sees the column, the lowest number elsewhere."""
        device, start = self.slot.device, self.start[:, None, None]
        prompt = torch.arange(self.prompt_columns, device=device).expand(len(start), 1, -1)
        drawn = torch.arange(self.columns, device=device).expand(len(start), 1, -1)
        place = self.place[:, :, None]
        unseen = torch.cat([(prompt >= start).expand(-1, place.shape[1], -1), drawn > place], 2)
        if window is not None:
            unseen |= torch.cat([prompt, drawn + start], 2) <= place + start - window
        # Not -inf: padding may see nothing at all.
        mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, torch.finfo(dtype).min)
        return mask[:, None]


class GroupedRows(NamedTuple):
    """Rows by the prompt that they read: `width` places for each of the first prompts, not all of them taken."""

    row: Int[Tensor, "P*width"]  # in each place; any row in one that is free
    place: Int[Tensor, "n"]  # of each row; any place for a slot without a row
    width: int


def group_rows(prompt_slot: Int[Tensor, "n"], there: Bool[Tensor, "n"], prompts: int, width: int) -> GroupedRows:
    """A place for all rows that are `there`, of which no more than `width` read the prompt in the same slot."""
    rows = there.nonzero()[:, 0]
    rows = rows[prompt_slot[rows].argsort(stable=True)]
    count = torch.bincount(prompt_slot[rows], minlength=prompts)
    number = torch.arange(len(rows)) - (count.cumsum(0) - count)[prompt_slot[rows]]  # of a row among its prompt's
    row, place = torch.zeros(prompts * width, dtype=torch.long), torch.zeros_like(prompt_slot)
    place[rows] = prompt_slot[rows] * width + number
    row[place[rows]] = rows
    return GroupedRows(row, place, width)


class LongRows(NamedTuple):
    """The few rows that have drawn far more than the others: their attention is computed apart, over more columns."""

    number: Int[Tensor, "f"]
    grouped: GroupedRows  # of these rows alone
    columns: int


def shorter_columns(drawn: Int[Tensor, "n"]) -> int:
    """Columns for all rows, if attention over them, and over all columns for the rows that have more, costs least."""
    ordered = drawn.sort().values
    longer = torch.arange(len(drawn) - 1, -1, -1)
    cost = len(drawn) * ordered + GATHERED * longer * ordered[-1]
    shorter = int(ordered[cost.argmin()])
    whole = len(drawn) * int(ordered[-1])
    return shorter if whole - int(cost.min()) > max(SPARED, whole // 4) else int(ordered[-1])


class KVView(NamedTuple):
    """What one head of one row sees, for all `n H` of them, and the place of each among the rows of its prompt."""

    prompt_key: Float[Tensor, "P*H L D"]
    prompt_value: Float[Tensor, "P*H L E"]
    key: Float[Tensor, "n*H C D"]  # of what was drawn
    value: Float[Tensor, "n*H C E"]
    in_place: Int[Tensor, "P*H*width"]  # the head of a row in each place
    place: Int[Tensor, "n*H"]  # of each
    mask: Float[Tensor, "n 1 L+C"]


def attend(
    query: Float[Tensor, "rows r D"], seen: KVView, scale: float, cap: float | None
) -> Float[Tensor, "rows r E"]:
    """softmax(cap tanh(q k^T scale / cap) + mask) v, the softmax in float32 or better.

    A prompt's keys and values are read once for all of its rows; `r` query heads that share a head of keys are side by
    side as if they were queries: nothing is repeated.
    """

    def with_prompts(x: Tensor, other: Tensor) -> Tensor:
        """The product of each row's `[r X]` with its prompt's, `[P*H X Y]`."""
        # Rows of a prompt become rows of one matrix, [P*H width*r X], so that the prompt's entries are read once.
        together = x.index_select(0, seen.in_place).view(len(other), -1, x.shape[2])
        return product(together, other).view(len(seen.in_place), x.shape[1], -1).index_select(0, seen.place)

    scores = torch.cat(
        [with_prompts(query, seen.prompt_key.transpose(1, 2)), product(query, seen.key.transpose(1, 2))], -1
    ).mul_(scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.view(len(seen.mask), -1, scores.shape[2]).add_(seen.mask)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(seen.value.dtype)
    parts = [seen.prompt_key.shape[1], seen.key.shape[1]]
    first, second = weights.view(len(query), -1, weights.shape[2]).split(parts, -1)
    return (with_prompts(first, seen.prompt_value) + product(second, seen.value)).to(seen.value.dtype)


# `attend`, as it is written or compiled.
AttendFn = Callable[[Tensor, KVView, float, float | None], Tensor]
# `cuda_steps.split_kv_attention`, called by position.
SplitKV = Callable[..., Float[Tensor, "n H E"]]


class DecodeAttention:
    """The next token of the row in every one of the first slots: it sees its prompt, and what was drawn up to there.

    `start` is how long each row's prompt is, `length` how long the row; `prompt_columns` of prompts are looked at, and
    `columns` of what was drawn; more of them in `long` rows. With `split_kv`, one operator does it; without, matrix
    products, in `attend_fn`.
    """

    phase: ClassVar[Phase] = "decode"

    def __init__(
        self,
        prompts: KVCache,
        drawn: KVCache,
        grouped: GroupedRows,
        start: Int[Tensor, "n"],
        length: Int[Tensor, "n"],
        *,
        prompt_columns: int,
        columns: int,
        attend_fn: AttendFn,
        split_kv: SplitKV | None,
        long: LongRows | None = None,
    ) -> None:
        self.attend_fn, self.split_kv, self.long = attend_fn, split_kv, long
        self.prompts, self.drawn, self.grouped = prompts, drawn, grouped
        self.start, self.length, self.prompt_columns, self.columns = start, length, prompt_columns, columns
        self.masks: dict[tuple[Window, torch.dtype], Tensor] = {}
        self.indices: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, Tensor] = {}
        self.apart: DecodeAttention | None = None
        if long is not None:
            self.apart = DecodeAttention(
                prompts,
                drawn,
                long.grouped,
                start[long.number],
                length[long.number],
                prompt_columns=prompt_columns,
                columns=long.columns,
                attend_fn=attend_fn,
                split_kv=None,
            )

    @torch.compiler.disable
    def attend(
        self, module: nn.Module, query: Float[Tensor, "n H 1 D"], key: Tensor, value: Tensor, how: AttentionSpec
    ) -> Float[Tensor, "n 1 H E"]:
        """The row's new entries are put into its slot, and seen with all before them.

        StepCode that is compiled stops here: which buffers these are differs from layer to layer.
        """
        n, heads = key.shape[:2]
        drawn = self.drawn.of(module.layer_idx, key, value)
        for buffer, new in zip(drawn, (key, value), strict=True):
            put_entries(buffer, self.places(heads), new)
        many = len(self.grouped.row) // self.grouped.width  # prompts
        prompts = [x[:many, :, : self.prompt_columns] for x in self.prompts.of(module.layer_idx, key, value)]
        seen = (*prompts, *(x[:n, :, : self.columns] for x in drawn))
        if self.split_kv is not None:
            rows = (self.grouped.row, self.grouped.place, self.start, self.length, self.grouped.width)
            return self.split_kv(query[:, :, 0], *seen, *rows, how.scale, how.cap, how.window)[:, None]
        out = self.products(query, seen, how)
        if self.long is not None:
            number, columns = self.long.number, self.long.columns
            seen = (*prompts, *(x[:, :, :columns].index_select(0, number) for x in drawn))
            out.index_copy_(0, number, self.apart.products(query[number], seen, how))
        return out

    def products(
        self, query: Float[Tensor, "n H 1 D"], seen: tuple[Tensor, ...], how: AttentionSpec
    ) -> Float[Tensor, "n 1 H E"]:
        """By matrix products over keys and values `[slots, heads, columns, dim]` of prompts and of what was drawn."""
        (n, heads), key = seen[2].shape[:2], seen[2]
        dtype = torch.float32 if products_in_float32(key) else key.dtype
        view = KVView(*(x.flatten(0, 1) for x in seen), *self.index(heads), self.mask(how.window, dtype))
        out = self.attend_fn(query.reshape(n * heads, -1, query.shape[3]), view, how.scale, how.cap)
        return out.view(n, 1, -1, out.shape[2])

    def places(self, heads: int) -> Int[Tensor, "_"]:
        """Where the new entries go, with slots, heads and columns as one dimension."""
        if heads not in self.own:
            own = torch.arange(len(self.start) * heads, device=self.start.device).view(-1, heads)
            self.own[heads] = (own * self.drawn.columns + (self.length - self.start)[:, None]).flatten()
        return self.own[heads]

    def index(self, heads: int) -> tuple[Tensor, Tensor]:
        """`KVView.in_place` and `KVView.place`: as `GroupedRows` has rows, head by head."""
        if heads not in self.indices:
            head = torch.arange(heads, device=self.length.device)
            row, place, width = self.grouped
            in_place = row.view(-1, 1, width) * heads + head[:, None]  # [P H width]
            prompt, number = (place // width)[:, None], (place % width)[:, None]
            self.indices[heads] = in_place.flatten(), ((prompt * heads + head) * width + number).flatten()
        return self.indices[heads]

    def mask(self, window: Window, dtype: torch.dtype) -> Float[Tensor, "n 1 _"]:
        """What is added to the scores: 0 where a row sees the column, -inf elsewhere."""
        if (window, dtype) not in self.masks:
            device, start, length = self.length.device, self.start[:, None], self.length[:, None]
            prompt = torch.arange(self.prompt_columns, device=device).expand(len(start), -1)
            drawn = torch.arange(self.columns, device=device) + start
            unseen = torch.cat([prompt >= start, drawn > length], 1)
            if window is not None:
                unseen |= torch.cat([prompt, drawn], 1) <= length - window
            added = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)
            self.masks[window, dtype] = added[:, None]
        return self.masks[window, dtype]


def put_entries(buffer: Float[Tensor, "S H C D"], places: Int[Tensor, "_"], new: Float[Tensor, "n H 1 D"]) -> None:
    """One new entry for each of the first slots. Those that are parts of a larger product are not copied before."""
    n, heads, _, size = new.shape
    flat = buffer.view(-1, size)
    if 1 in (n, heads) or new.stride(0) == heads * new.stride(1):
        flat.index_copy_(0, places, new.reshape(-1, size))
    else:
        flat.index_put_((places.view(n, heads),), new[:, :, 0])


def product(a: Float[Tensor, "b m k"], b: Float[Tensor, "b k n"]) -> Float[Tensor, "b m n"]:
    """Matrix products, in float32 where the device has that for halves."""
    return torch.bmm(a, b, out_dtype=torch.float32) if products_in_float32(a) else torch.bmm(a, b)


def products_in_float32(x: Tensor) -> bool:
    """Whether products of it come in float32."""
    return x.is_cuda and x.dtype in HALVES
