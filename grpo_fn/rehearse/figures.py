"""The figures of a rehearsal: memory by phase, work, collectives and time, as numbers for a table or a file."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_fn.rehearse.cards import Assumptions, usable_memory
from grpo_fn.rehearse.operators import ELEMENTWISE
from grpo_fn.rehearse.rehearsal import Asked, Rehearsal
from grpo_fn.rehearse.roofline import DECODING, PartTime, PieceTime, collective_seconds, part_times
from grpo_fn.rehearse.step_pieces import PHASES


@dataclass(frozen=True)
class PhaseMemory:
    """The most that a rank holds in a phase, in bytes, and what holds it, the largest first."""

    phase: str
    bytes: int
    holders: dict[str, int]
    host: int  # of the holders, bytes that lie in the host's memory


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
    parts: tuple[PartTime, ...]
    pieces: tuple[PieceTime, ...]
    traffic: tuple[GroupTraffic, ...]
    waits: dict[str, int]  # by piece, as often as a step takes it
    seconds: float
    tokens: int  # sampled in a step, on all ranks
    mfu: float  # of the pieces that train: of the card's peak for products of `dtype`
    dtype: str  # that the run computes in

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = ("parts", "pieces")
        return asdict(self) | {
            name: [{**one._asdict(), **({"seconds": one.seconds})} for one in getattr(self, name)] for name in rows
        }


def figures(counted: Rehearsal, asked: Asked, assumed: Assumptions, estimate: int, dtype: torch.dtype) -> Figures:
    """Sum up what was counted.

    Args:
        counted: what one rank does.
        asked: the ranks and the card.
        assumed: what of the card's peaks is counted on.
        estimate: bytes that the dry run says.
        dtype: that the run computes in.

    Returns:
        The figures of one step.
    """
    mode, card = counted.mode, asked.card
    memory = tuple(phase_memory(counted, phase) for phase in PHASES if phase in mode.live.peaks)
    parts = part_times(mode, counted.repeats, card, assumed)
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
        peak=max(one.bytes for one in memory),
        usable=usable_memory(card, assumed),
        estimate=estimate,
        parts=tuple(parts),
        pieces=tuple(times),
        traffic=traffic,
        waits={piece: n * counted.repeats[piece] for piece, n in mode.waits.items() if counted.repeats.get(piece)},
        seconds=sum(one.times * one.seconds for one in times),
        tokens=rows.prompts * counted.minibatches * rows.group * rows.new_tokens,
        mfu=flops / card.rates[dtype] / sum(one.times * one.seconds for one in training),
        dtype=str(dtype).removeprefix("torch."),
    )


def phase_memory(counted: Rehearsal, phase: str) -> PhaseMemory:
    """What is held when a phase is fullest."""
    live = counted.mode.live
    peak = live.peaks[phase]
    holders = dict(sorted(peak.holders.items(), key=lambda item: -item[1]))
    return PhaseMemory(phase, peak.bytes, holders, sum(n for name, n in holders.items() if name in live.on_host))


def piece_times(counted: Rehearsal, asked: Asked, assumed: Assumptions, parts: list[PartTime]) -> list[PieceTime]:
    """What each piece of the step takes, once, and how often it is taken."""
    found = []
    for piece, times in counted.repeats.items():
        own = [one for one in parts if one.piece == piece]
        if not times or not own:
            continue
        launches = sum(one.launches for one in own) / times
        found.append(
            PieceTime(
                piece,
                times,
                sum(one.seconds for one in own) / times,
                0.0 if piece == DECODING else launches * assumed.launch,
                collective_seconds(
                    counted.mode, piece, counted.group_ranks, counted.group_in_host, asked.card, assumed
                ),
            )
        )
    return found
