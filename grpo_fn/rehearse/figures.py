"""The figures of a rehearsal: memory by phase, work, collectives and time, as numbers for a table or a file."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_fn.rehearse.cards import Assumptions, usable_memory
from grpo_fn.rehearse.changes import Change, changes, work_as_compiled
from grpo_fn.rehearse.estimate_parts import MemoryDifference, memory_differences
from grpo_fn.rehearse.rehearsal import Asked, Rehearsal
from grpo_fn.rehearse.roofline import DECODING, PartTime, PieceTime, collective_seconds, part_times
from grpo_fn.rehearse.step_pieces import PHASES
from grpo_fn.rehearse.tracing.counting import Work
from grpo_fn.rehearse.tracing.operators import ELEMENTWISE
from grpo_fn.shell.policy.memory import Memory


@dataclass(frozen=True)
class PhaseMemory:
    """The most that a rank holds in a phase, in bytes, and what holds it, the largest first."""

    phase: str
    bytes: int
    holders: dict[str, int]
    host: int  # of the holders, bytes that lie in the host's memory


@dataclass(frozen=True)
class HostTransfer:
    """What moves between the card's memory and the host's, as often as a step moves it, in bytes."""

    piece: str
    to_card: int
    to_host: int


@dataclass(frozen=True)
class ChangeFigures:
    """The pieces of a step that a change concerns, with it and without, and the step without it alone."""

    name: str
    bytes: int
    bytes_without: int
    launches: int
    launches_without: int
    seconds_without: float  # of a step
    seconds_without_both: float  # of a step in which neither the work with it nor that without it is done


@dataclass(frozen=True)
class GroupTraffic:
    """Collectives of one kind in one group, as often as a step makes them."""

    piece: str
    name: str
    group: str
    ranks: int
    calls: int
    bytes: int


@dataclass(frozen=True)
class Figures:
    """What one rank does in a step of the run."""

    card: str
    ranks: int
    memory: tuple[PhaseMemory, ...]
    peak: int
    usable: float
    estimate: int  # of the dry run
    differences: tuple[MemoryDifference, ...]  # of the estimate and the fullest phase, by what holds it
    parts: tuple[PartTime, ...]
    pieces: tuple[PieceTime, ...]
    changes: tuple[ChangeFigures, ...]
    traffic: tuple[GroupTraffic, ...]
    transfers: tuple[HostTransfer, ...]
    waits: dict[str, int]  # by piece, as often as a step takes it
    seconds: float
    tokens: int  # sampled in a step, on all ranks
    mfu: float  # of the pieces that train: of the card's peak for products of `dtype`
    dtype: str  # that the run computes in

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = ("parts", "pieces")
        return (
            asdict(self)
            | {name: [{**one._asdict(), **({"seconds": one.seconds})} for one in getattr(self, name)] for name in rows}
            | {"differences": [one._asdict() for one in self.differences]}
        )


def figures(counted: Rehearsal, asked: Asked, assumed: Assumptions, estimate: Memory, dtype: torch.dtype) -> Figures:
    """Sum up what was counted.

    Args:
        counted: what one rank does.
        asked: the ranks and the card.
        assumed: what of the card's peaks is counted on.
        estimate: what the dry run says of memory.
        dtype: that the run computes in.

    Returns:
        The figures of one step.
    """
    mode, card, repeats = counted.mode, asked.card, counted.repeats
    memory = tuple(phase_memory(counted, phase) for phase in PHASES if phase in mode.live.peaks)
    fullest = max(memory, key=lambda one: one.bytes)
    work = work_as_compiled(mode, counted.compiled)
    parts = part_times(work, repeats, card, assumed, on_host=counted.on_host)
    times = piece_times(counted, asked, assumed, parts)
    traffic = tuple(
        GroupTraffic(
            sent.piece,
            sent.name,
            sent.group,
            counted.group_ranks.get(sent.group, 1),
            counted.repeats[sent.piece] * mode.calls[sent],
            counted.repeats[sent.piece] * size,
        )
        for sent, size in mode.sent.items()
        if counted.repeats.get(sent.piece)
    )
    rows = counted.rows
    training = [one for one in times if "micro-batch" in one.piece]
    flops = sum(one.flops for one in parts if "micro-batch" in one.piece and one.kind != ELEMENTWISE)
    return Figures(
        card=card.name,
        ranks=asked.ranks,
        memory=memory,
        peak=fullest.bytes,
        usable=usable_memory(card, assumed),
        estimate=estimate.peak(),
        differences=tuple(memory_differences(estimate, fullest.holders, mode.live.on_host)),
        parts=tuple(parts),
        pieces=tuple(times),
        changes=tuple(
            change_figures(counted, asked, assumed, work, one)
            for one in changes(mode, counted.compiled, DECODING, repeats)
        ),
        traffic=traffic,
        transfers=tuple(
            HostTransfer(piece, n * mode.to_card[piece], n * mode.to_host[piece])
            for piece, n in repeats.items()
            if n and (mode.to_card[piece] or mode.to_host[piece])
        ),
        waits=waits(counted),
        seconds=sum(one.times * one.seconds for one in times),
        tokens=rows.prompts * counted.minibatches * rows.group * rows.new_tokens,
        mfu=flops / card.rates[dtype] / sum(one.times * one.seconds for one in training),
        dtype=str(dtype).removeprefix("torch."),
    )


def waits(counted: Rehearsal) -> dict[str, int]:
    """Waits of the host for values, by piece, as often as a step takes it: those in it, and the sampler's looks."""
    found = {piece: n * counted.repeats[piece] for piece, n in counted.mode.waits.items() if counted.repeats.get(piece)}
    if counted.decoding is not None and DECODING in counted.repeats:
        found[DECODING] = found.get(DECODING, 0) + counted.decoding.looks
    return found


def change_figures(
    counted: Rehearsal, asked: Asked, assumed: Assumptions, work: Counter[Work], change: Change
) -> ChangeFigures:
    """What a step does and takes with the change and without."""

    def step_seconds(changed: Counter[Work]) -> float:
        parts = part_times(changed, counted.repeats, asked.card, assumed, on_host=counted.on_host)
        return sum(one.times * one.seconds for one in piece_times(counted, asked, assumed, parts))

    def total(part: Counter[Work], name: str) -> int:
        return sum(n * counted.repeats[one.piece] * getattr(one.cost, name) for one, n in part.items())

    neither = work.copy()
    neither.subtract(change.used)
    without = neither.copy()
    without.update(change.without)
    return ChangeFigures(
        change.name,
        total(change.used, "bytes"),
        total(change.without, "bytes"),
        total(change.used, "launches"),
        total(change.without, "launches"),
        step_seconds(without),
        step_seconds(neither),
    )


def phase_memory(counted: Rehearsal, phase: str) -> PhaseMemory:
    """What is held when a phase is fullest."""
    live = counted.mode.live
    peak = live.peaks[phase]
    holders = dict(sorted(peak.holders.items(), key=lambda item: -item[1]))
    return PhaseMemory(phase, peak.bytes, holders, peak.on_host)


def piece_times(counted: Rehearsal, asked: Asked, assumed: Assumptions, parts: list[PartTime]) -> list[PieceTime]:
    """What each piece of the step takes, once, and how often it is taken."""
    found = []
    for piece, times in counted.repeats.items():
        own = [one for one in parts if one.piece == piece]
        if not times or not own:
            continue
        launches = 1 if piece == DECODING else sum(one.launches for one in own) / times  # of a graph
        mode, rate = counted.mode, asked.card.host_link * assumed.links
        found.append(
            PieceTime(
                piece,
                times,
                sum(one.seconds for one in own) / times,
                launches * assumed.launch,
                collective_seconds(
                    counted.mode, piece, counted.group_ranks, counted.group_in_host, asked.card, assumed
                ),
                max(mode.to_card[piece], mode.to_host[piece]) / rate,  # both ways at once
                assumed.wait * waits(counted).get(piece, 0) / times,
            )
        )
    return found
