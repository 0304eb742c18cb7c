"""One token for every row: keys and values in buffers that stay where they are, attention over them, and the step.

A prompt stands in its own slot, however many rows go on from it; what a row has drawn stands in the row's own.
Each begins in the first column, so one number says how much of a slot is filled. Nothing is concatenated or grows.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.batch import Spans, visible_positions
from grpo_fn.shell.model.attention import (
    HALVES,
    REFUSALS,
    AttentionSpec,
    PackedAttention,
    Phase,
    Window,
    eager_attention,
    packing_unsupported_reason,
    refusal,
    sdpa_attention,
    softmax_with_sinks,
    takes_layout,
    too_far_apart,
    unusable_mask,
    without_dropout,
)
from grpo_fn.shell.model.logprob_model import has_linear_head
from grpo_fn.shell.sampler.interface import TokenSampler
from grpo_fn.shell.sampler.local.joined_projections import relink

GATHER_COST = 3  # memory passes over a column of a row that is gathered first: read, written, read again
MIN_SAVED = 2048  # columns, summed over rows, that a second attention call has to save to be worth it


class KVCache:
    """`count` slots of `columns` columns. A layer's buffers `[slots, heads, columns, dim]` are made with its first."""

    def __init__(self, count: int, columns: int) -> None:
        self.count, self.columns = count, columns
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int, key: Float[Tensor, "_ H _ D"], value: Float[Tensor, "_ H _ E"]) -> tuple[Tensor, Tensor]:
        """The layer's buffers, for keys and values like these."""
        if layer not in self.layers:
            # Zeros, as masked entries have weight 0, but 0 * NaN is NaN.
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
        written_out = how.eager or how.cap is not None or how.sinks is not None
        core = eager_attention if written_out else sdpa_attention
        # Not -inf: padding may see nothing at all.
        seen = self.start, self.place, self.prompt_columns, self.columns
        mask = attention_mask(*seen, how.window, query.dtype, torch.finfo(query.dtype).min)[:, None]
        out = core(query, keys, values, mask, how)
        return rearrange(out, "r h m e -> r m h e")


def attention_mask(
    start: Int[Tensor, "r"],
    place: Int[Tensor, "r M"],
    prompt_columns: int,
    columns: int,
    window: Window,
    dtype: torch.dtype,
    unseen: float,
) -> Float[Tensor, "r M _"]:
    """What is added to the scores of tokens, each at its place in the row's slot, behind a prompt of `start`.

    0 where a token sees the column, of `prompt_columns` of its prompt and `columns` of the slot; elsewhere `unseen`.
    """
    start, place = start[:, None, None], place[:, :, None]
    prompt = torch.arange(prompt_columns, device=start.device).expand(len(start), 1, -1)
    drawn = torch.arange(columns, device=start.device).expand(len(start), 1, -1)
    hidden = torch.cat([(prompt >= start).expand(-1, place.shape[1], -1), drawn > place], 2)
    if window is not None:
        hidden |= torch.cat([prompt, drawn + start], 2) <= place + start - window
    return torch.zeros(hidden.shape, dtype=dtype, device=start.device).masked_fill_(hidden, unseen)


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
    """The number of columns at which attention over all rows, and once more over the longer rows, costs least."""
    ordered = drawn.sort().values
    longer = torch.arange(len(drawn) - 1, -1, -1)
    cost = len(drawn) * ordered + GATHER_COST * longer * ordered[-1]
    shorter = int(ordered[cost.argmin()])
    whole = len(drawn) * int(ordered[-1])
    return shorter if whole - int(cost.min()) > max(MIN_SAVED, whole // 4) else int(ordered[-1])


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
    query: Float[Tensor, "rows r D"], seen: KVView, scale: float, cap: float | None, sinks: Float[Tensor, "H"] | None
) -> Float[Tensor, "rows r E"]:
    """softmax(cap tanh(q k^T scale / cap) + mask) v, the softmax in float32 or better, over sinks, too.

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
    weights = softmax_with_sinks(scores[:, :, None], sinks)[:, :, 0].to(seen.value.dtype)
    parts = [seen.prompt_key.shape[1], seen.key.shape[1]]
    first, second = weights.reshape(len(query), -1, weights.shape[2]).split(parts, -1)
    return (with_prompts(first, seen.prompt_value) + product(second, seen.value)).to(seen.value.dtype)


# `attend`, as it is written or compiled.
AttendFn = Callable[[Tensor, KVView, float, float | None, Tensor | None], Tensor]
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
            if how.sinks is not None:
                raise ValueError("got attention with sinks, which the split-KV kernel does not know")
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
        out = self.attend_fn(query.reshape(n * heads, -1, query.shape[3]), view, how.scale, how.cap, how.sinks)
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
        if (window, dtype) not in self.masks:
            place, columns = (self.length - self.start)[:, None], (self.prompt_columns, self.columns)
            self.masks[window, dtype] = attention_mask(self.start, place, *columns, window, dtype, -torch.inf)
        return self.masks[window, dtype]


def put_entries(buffer: Float[Tensor, "S H C D"], places: Int[Tensor, "_"], new: Float[Tensor, "n H 1 D"]) -> None:
    """Write one new entry for each of the first slots; views into a larger product are written without a copy."""
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


# -- what ends a completion: tokens that do by themselves, and texts that the last token completes


UNSPELT = "\N{REPLACEMENT CHARACTER}"  # what bytes are decoded to that are not a character yet


class Stops:
    """Stop strings, and which of `size` tokens may complete one: text is looked at where one of those was drawn.

    Without stop strings no tokenizer is needed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], size: int) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.suspect = tokens_of_stops(tokenizer, self.stop, size) if stop else torch.zeros(size, dtype=torch.bool)
        # Every token holds at least one byte, so the last len(stop) tokens hold it; one more in front, because decoders
        # of the SentencePiece kind drop a leading space.
        self.tail = max((len(s.encode()) for s in stop), default=0) + 1

    def stop_lengths(self, completions: Sequence[list[int]], unseen: Sequence[int]) -> list[int]:
        """The length of each completion up to its first stop string, 0 without one.

        Only its last `unseen` tokens are searched: the earlier ones are known to complete none.
        """
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
            if not lengths[row] and self.holds_stop(completions[row], end, text):
                lengths[row] = end
        return lengths

    def holds_stop(self, tokens: list[int], end: int, text: str) -> bool:
        """Whether a stop string is in the text of the last tokens before `end`, or of up to three more."""
        # A tail may begin within a character. SentencePiece's decoder then spells no byte of the whole run of byte
        # tokens, but one of four starts in a row is the beginning of a character.
        for start in range(end - self.tail - 1, end - self.tail - 4, -1):
            if any(s in text for s in self.stop):
                return True
            if UNSPELT not in text or start < 0:
                return False
            text = self.tokenizer.decode(tokens[start:end], skip_special_tokens=True)
        return any(s in text for s in self.stop)


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


# -- what a call asks for, and what comes of it


# (rows that have ended, the tokens of each, whether each ended by itself)
OnEnded = Callable[[Sequence[int], Sequence[list[int]], Sequence[bool]], None]


class DecodedRows(NamedTuple):
    """Completions of some rows, `[R, N]` with N = max_new_tokens; columns past `length` are padding."""

    tokens: Tensor
    logp: Tensor
    length: Tensor
    stopped: Tensor


class DecodeOptions(NamedTuple):
    """How the rows of a call are drawn, what ends them besides their length, and what is called meanwhile."""

    token_sampler: TokenSampler
    end_tokens: Sequence[int]
    stops: Stops
    slots: int  # rows decoded at once, at most
    pad: int  # the token behind a completion
    on_ended: OnEnded | None  # called with rows as soon as they have ended
    check: Callable[[], None]  # called every few decode steps; what it raises ends them


def empty_rows(u: Float[Tensor, "R N"], pad: int) -> DecodedRows:
    """No row has a token yet."""
    return DecodedRows(
        torch.full(u.shape, pad, device=u.device),
        torch.zeros(u.shape, device=u.device),
        torch.zeros(len(u), dtype=torch.long, device=u.device),
        torch.zeros(len(u), dtype=torch.bool, device=u.device),
    )


# -- the step


Layout = PrefillAttention | ChunkAttention | DecodeAttention

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
    with takes_layout(model.config.get_text_config()):
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


class StepCode(NamedTuple):
    """What runs in a step besides the model, as it is written or compiled."""

    attend: AttendFn
    wrap_token_sampler: Callable[[TokenSampler], TokenSampler]  # what is run for it
    split_kv: SplitKV | None = None  # in the place of `attend`


EAGER_CODE = StepCode(attend, lambda token_sampler: token_sampler)


class DecodeShape(NamedTuple):
    """What a step looks at: so many slots and columns of what was drawn, of prompts, and of rows of a prompt."""

    rows: int
    columns: int
    prompts: int
    prompt_columns: int
    width: int


# -- the engine


Step = Callable[[], None]


class Sizes(NamedTuple):
    """Which batches and widths there are, and how many steps are made before anybody looks at what was drawn."""

    rows: Callable[[int], int]  # at least as many
    columns: Callable[[int], int]
    capacity: Callable[[int], int]  # of buffers
    steps: int


def exact_size(n: int) -> int:
    """Any size."""
    return n


@runtime_checkable
class StepGraphs(Protocol):
    """Steps that are captured by their shape: `cuda_steps.GraphCache`."""

    def __call__(self, shape: Hashable, step: Step, state: Sequence[Tensor], *, times: int) -> None: ...

    def drop(self) -> None: ...


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the model's weights and buffers lie."""
    return tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))


class DecodeEngine:
    """A model, and the buffers that it decodes with. They are as large as the largest call so far needed, no larger."""

    def __init__(
        self,
        model: nn.Module,
        *,
        sizes: Sizes,
        code: StepCode,
        graphs: StepGraphs | None = None,  # None: every step runs as it is written
        step_model: nn.Module | None = None,
    ) -> None:
        self.model, self.sizes, self.graphs, self.code = model, sizes, graphs, code
        self.step_model = model if step_model is None else step_model  # what is run in a step, of the same weights
        self.drawn: KVCache | None = None
        self.prompts: KVCache | None = None
        self.live: Live | None = None
        self.marks: Marks | None = None
        self.capacity: tuple[int, ...] = ()  # of the buffers: rows, their columns, prompts, theirs, the vocabulary
        self.grouped_rows: dict[DecodeShape, GroupedRows] = {}
        self.addresses: tuple[int, ...] = ()  # of the weights, when steps were last prepared
        self.kept = 0  # bytes of the buffers while something else used the device last
        self.versions: int | None = None  # of the weights then
        self.trained = False  # whether they have changed since: then the peak of memory is that of training, too

    def choices(self) -> dict[str, str]:
        """What was chosen for its steps on this device: how they attend, and whether projections are one product."""
        attends = "matrix products" if self.code.split_kv is None else "split-KV kernel"
        return {"decoding attention": attends, "projections": "apart" if self.step_model is self.model else "joined"}

    def ready(self, marks: Marks, *, rows: int, prompts: int, prompt_tokens: int, new_tokens: int) -> None:
        """Have space for so many rows and prompts, for exactly `new_tokens` a row, and no row in it."""
        self.trained = self.trained or self.versions not in (None, weight_versions(self.model))
        rows, prompts, longest = (self.sizes.capacity(n) for n in (rows, prompts, prompt_tokens))
        if self.drawn is not None:
            # Buffers never shrink: calls of two sizes in turns would make them anew each time.
            rows = max(rows, self.drawn.count)
            prompts, longest = max(prompts, self.prompts.count), max(longest, self.prompts.columns)
        needed = (rows, new_tokens, prompts, longest, len(marks.ends))
        if self.drawn is None or needed != self.capacity:
            self.drop()
            self.capacity = needed
            self.drawn, self.prompts = KVCache(rows, new_tokens), KVCache(prompts, longest)
            self.live = empty_slots(rows, new_tokens, marks.ends.device)
            self.marks = Marks(*(x.clone() for x in marks))
        if addresses(self.model) != self.addresses:  # graphs read weights where they were, and joined ones are copies
            self.drop_graphs()
            relink(self.step_model)
            self.addresses = addresses(self.model)
        self.live.ended.fill_(True)
        for x, mark in zip(self.marks, marks, strict=True):
            x.copy_(mark)

    def set_grouped_rows(self, shape: DecodeShape, grouped: GroupedRows) -> None:
        """Where rows are in steps of that shape from now on: in tensors that stay, as a captured step reads them."""
        if shape not in self.grouped_rows:
            device = self.live.length.device
            row, place = (x.to(device, copy=True) for x in (grouped.row, grouped.place))
            self.grouped_rows[shape] = GroupedRows(row, place, grouped.width)
        self.grouped_rows[shape].row.copy_(grouped.row)
        self.grouped_rows[shape].place.copy_(grouped.place)

    def advance(
        self, shape: DecodeShape, token_sampler: TokenSampler, *, steps: int, long: LongRows | None = None
    ) -> None:
        """So many tokens for every row in the first `shape.rows` slots; `long` ones see more than `shape.columns`."""

        def step() -> None:
            live = Live(*(x[: shape.rows] for x in self.live))
            context = DecodeAttention(
                self.prompts,
                self.drawn,
                self.grouped_rows[shape],
                live.start,
                live.length,
                prompt_columns=shape.prompt_columns,
                columns=shape.columns,
                attend_fn=self.code.attend,
                split_kv=self.code.split_kv,
                long=long,
            )
            logits = forward_step(self.step_model, live.token[:, None], live.length[:, None], context, 1)[:, -1]
            live.length.add_(~live.ended)
            draw(live, logits, self.code.wrap_token_sampler(token_sampler), self.marks)

        if self.graphs is not None:
            self.graphs((shape, token_sampler), step, self.live, times=steps)
            return
        for _ in range(steps):
            step()

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
        """Bytes that idle buffers may keep: the memory budget less the peak allocation and a margin.

        Before the first training step, when that peak is unknown, they are a fixed share of the device.
        """
        if not self.trained:
            return KEEP * memory_budget(device)
        return (1 - MARGIN) * memory_budget(device) - (torch.cuda.max_memory_allocated(device) - self.kept)

    def drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.drop()

    def drop(self) -> None:
        self.drop_graphs()
        self.grouped_rows.clear()
        self.drawn = self.prompts = self.live = self.marks = None


def weight_versions(model: nn.Module) -> int:
    """A number that changes when a weight is written to."""
    return sum(p._version for p in model.parameters())


def memory_budget(device: torch.device) -> float:
    """Bytes of the device that this process may take."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory


# -- is a model fit for it


@torch.no_grad()
def decoding_unsupported_reason(model: nn.Module, device: torch.device) -> str | None:
    """Why the model must not be decoded this way; None when it may. By steps of a short trial."""
    try:
        linear = has_linear_head(model)
        return packing_unsupported_reason(model, device, linear=linear) or decoding_difference(model, device)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        return refusal(error)


def decoding_difference(
    model: nn.Module, device: torch.device, split_kv: SplitKV | None = None, step_model: nn.Module | None = None
) -> str | None:
    """How far logits of two decoding steps are from those of the whole rows; None when that is rounding."""
    size = model.config.get_text_config().vocab_size
    texts = [[(5 * b + t) ** 2 % size for t in range(n)] for b, n in enumerate((7, 3, 7))]
    texts[2][:-2] = texts[0][:-2]  # two rows go on from one prompt
    starts, prompt_slot = [text[:-2] for text in texts[:2]], torch.tensor([0, 1, 0])
    start = torch.tensor([len(text) - 2 for text in texts], device=device)
    prompts, drawn = KVCache(2, len(starts[0])), KVCache(3, 2)
    grouped = group_rows(prompt_slot, prompt_slot >= 0, 2, 2)
    grouped = GroupedRows(grouped.row.to(device), grouped.place.to(device), grouped.width)
    with without_dropout(model):
        whole = [torch.tensor([text], device=device) for text in texts]
        reference = [model(input_ids=ids, use_cache=False).logits[0, -3:] for ids in whole]
        context, logits = prefill_prompts(model, starts, device)
        context.copy(prompts, torch.arange(2, device=device))
        logits_by_step = [logits[prompt_slot.to(device)]]
        for t in (0, 1):
            token = torch.tensor([[text[t - 2]] for text in texts], device=device)
            context = DecodeAttention(
                prompts,
                drawn,
                grouped,
                start,
                start + t,
                prompt_columns=prompts.columns,
                columns=t + 1,
                attend_fn=attend,
                split_kv=split_kv,
            )
            logits_by_step.append(forward_step(step_model or model, token, (start + t)[:, None], context, 1)[:, -1])
    reference = torch.stack(reference).to(model.get_input_embeddings().weight.dtype)  # which says how close is close
    return too_far_apart("logits", torch.stack(logits_by_step, 1) - reference, reference)
