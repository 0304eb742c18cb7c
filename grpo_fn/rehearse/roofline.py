"""From what a step does to a time on a card: each operator as fast as the card multiplies or moves its bytes.

Roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures"): an operator takes the longer of its floating-point operations and its bytes over what the card reaches.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from grpo_fn.rehearse.cards import Assumptions, Card
from grpo_fn.rehearse.tracing.counting import CountingMode, Sent, Work
from grpo_fn.rehearse.tracing.operators import ATTENTION, ELEMENTWISE, Cost

DECODING = "decode a token"  # the piece that a card replays as a graph
OPTIMIZER = "optimizer"  # the part that an update is


class PartTime(NamedTuple):
    """What one kind of operator in one part of one piece costs, taken as often as a step takes it."""

    piece: str
    part: str
    kind: str
    flops: int
    bytes: int
    launches: int
    seconds: float


class PieceTime(NamedTuple):
    """A piece of the step, in seconds: kernels, the host's launches, collectives and transfers to and from the host's
    memory overlap; waits for values do not.
    """

    piece: str
    times: int
    kernels: float
    host: float
    collectives: float
    transfers: float
    waits: float

    @property
    def seconds(self) -> float:
        """The longest of the four, and the waits."""
        return max(self.kernels, self.host, self.collectives, self.transfers) + self.waits


def operator_seconds(one: Cost, card: Card, assumed: Assumptions) -> float:
    """What the operator takes on the card."""
    share = assumed.attention if one.kind == ATTENTION else assumed.products
    rate = card.rates.get(one.dtype, min(card.rates.values())) * share
    return max(one.flops / rate if one.kind != ELEMENTWISE else 0.0, one.bytes / (card.bandwidth * assumed.bandwidth))


def kernel_seconds(one: Work, card: Card, assumed: Assumptions, *, on_host: bool) -> float:
    """What the operator takes: a kernel of a graph at least so long; an optimizer on the host by the host's memory."""
    if on_host and one.part == OPTIMIZER:
        return one.cost.bytes / assumed.host_memory
    least = assumed.replayed * one.cost.launches if one.piece == DECODING else 0.0
    return max(least, operator_seconds(one.cost, card, assumed))


def part_times(
    work_counts: Mapping[Work, int], repeats: Mapping[str, int], card: Card, assumed: Assumptions, *, on_host: bool
) -> list[PartTime]:
    """All that a step does, by piece, part and kind; `on_host`: weights and moments lie in the host's memory."""
    sums: dict[tuple[str, str, str], Counter[str]] = {}
    seconds: Counter[tuple[str, str, str]] = Counter()
    for work, count in work_counts.items():
        times = count * repeats.get(work.piece, 0)
        key = (work.piece, work.part, work.cost.kind)
        found = sums.setdefault(key, Counter())
        launched = 0 if on_host and work.part == OPTIMIZER else times * work.cost.launches
        found.update(flops=times * work.cost.flops, bytes=times * work.cost.bytes, launches=launched, done=times)
        seconds[key] += times * kernel_seconds(work, card, assumed, on_host=on_host)
    return [
        PartTime(*key, found["flops"], found["bytes"], found["launches"], seconds[key])
        for key, found in sums.items()
        if found["done"]
    ]


def wire_bytes(sent: Sent, size: int, ranks: int) -> float:
    """Bytes that a rank sends in a ring: of all-gather and reduce-scatter the others' parts, of all-reduce twice."""
    return size * (ranks - 1) / ranks * (2 if "all_reduce" in sent.name or "allreduce" in sent.name else 1)


def collective_seconds(
    mode: CountingMode,
    piece: str,
    ranks: Mapping[str, int],
    on_host: Mapping[str, bool],
    card: Card,
    assumed: Assumptions,
) -> float:
    """What the collectives of a piece take, once."""
    found = 0.0
    for sent, size in mode.sent.items():
        if sent.piece == piece:
            rate = (card.link if on_host.get(sent.group, False) else card.network) * assumed.links
            found += wire_bytes(sent, size, ranks.get(sent.group, 1)) / rate
    return found
