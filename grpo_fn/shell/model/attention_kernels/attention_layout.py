"""Who sees whom in a stream of rows that lie end to end, some of which read a prompt that stands in another row."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from grpo_fn.core.packing import Spans

Window = int | None  # keys that a query sees, itself included; None: all there are up to it


class AttentionSpec(NamedTuple):
    """What a layer asks of attention."""

    window: Window
    scale: float
    dropout: float
    cap: float | None  # of the scores
    backend: str  # the name that the model was built with

    @property
    def eager(self) -> bool:
        """Whether the model was built to have it written out."""
        return self.backend == "eager"


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


class Layout:
    """Made for one micro-batch and the same in all layers of the model. What a kernel needs is made when it asks.

    `asked` lists the windows that attention asked for, layer by layer.
    """

    def __init__(self, spans: Spans, at: Int[Tensor, "B T"], *, device: torch.device) -> None:
        self.spans, self.at, self.device = spans, at, device
        self.asked: list[Window] = []
        self._masks: dict[tuple[int, Window, torch.dtype], Tensor | None] = {}

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Rows by length; those that read their own prompt apart from those that begin behind it."""
        made = [bucket(self.spans, self.at, rows) for rows in buckets_by_length(self.spans)]
        self._back = bucket_positions(made).to(self.device)
        return [Bucket(*(x.to(self.device) for x in one)) for one in made]

    def stream_order(self, found: list[Float[Tensor, "_ _ H D"]]) -> Float[Tensor, "N H D"]:
        """What was found for every query of every bucket, back in the stream's order."""
        return torch.cat([x.flatten(0, 1) for x in found]).index_select(0, self._back)

    def mask(self, number: int, window: Window, dtype: torch.dtype) -> Float[Tensor, "b 1 q k"] | None:
        """What is added to the scores of that bucket: 0 where a query sees the key, -inf elsewhere.

        None where that is what causal attention does by itself, because queries and keys are the same.
        """
        asked = (number, window, dtype)
        if asked not in self._masks:
            one = self.buckets[number]
            plain = one.query.shape == one.key.shape and not bool(one.position[:, 0].any())
            short = window is None or window >= one.key.shape[1]
            self._masks[asked] = None if plain and short else additive_mask(one, window, dtype)
        return self._masks[asked]

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


def buckets_by_length(spans: Spans) -> Iterator[Int[Tensor, "b"]]:
    """Rows with something to read, in parts of which the longest is at most twice as long as the shortest."""
    taken = spans.end - spans.start
    for where in (spans.start == 0, spans.start > 0):
        rows = (where & (taken > 0)).nonzero()[:, 0]
        rows = rows[taken[rows].argsort(descending=True, stable=True)]
        while len(rows):
            many = int((2 * taken[rows] >= taken[rows[0]]).sum())
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
