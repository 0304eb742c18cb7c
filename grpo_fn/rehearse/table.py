"""The figures of a rehearsal as a person would read them."""

from collections.abc import Iterator, Sequence

from grpo_fn.rehearse.cards import Assumptions
from grpo_fn.rehearse.changes import BLOCKS_COMPILED, STEPS_COMPILED
from grpo_fn.rehearse.figures import Figures
from grpo_fn.rehearse.rehearsal import Asked, Rehearsal

GB = 1e9
COMPILED = (BLOCKS_COMPILED, STEPS_COMPILED)
SHOWN = 5  # holders of a phase
SMALLEST = 0.01  # of a phase's memory, or of a step's time: what is less is not shown by itself


def table(counted: Rehearsal, asked: Asked, assumed: Assumptions, made: Figures) -> list[str]:
    """All lines, the verdict first.

    Args:
        counted: what one rank does.
        asked: ranks, card and lengths.
        assumed: what a time is made of.
        made: the figures.

    Returns:
        Lines for the terminal.
    """
    return [
        *verdict(made),
        "",
        *memory_lines(made),
        "",
        *work_lines(made),
        "",
        *traffic_lines(made),
        *transfer_lines(made),
        "",
        *time_lines(made),
        "",
        *change_lines(made),
        "",
        *assumption_lines(counted, asked, assumed, made),
    ]


def verdict(made: Figures) -> list[str]:
    """Whether it fits; where not, in which phase and for what."""
    most = max(made.memory, key=lambda one: one.bytes)
    of_card = f"{size(most.bytes)} in {most.phase!r} of {size(made.usable)} on {made.card}"
    if most.bytes <= made.usable:
        return [f"fits: {of_card}"]
    over = [one for one in made.memory if one.bytes > made.usable]
    return [
        f"does not fit: {of_card}",
        *(
            f"  {one.phase}: {(one.bytes - made.usable) / GB:.2f} GB too many; the largest: "
            + ", ".join(f"{name} {size(n)}" for name, n in list(one.holders.items())[:SHOWN])
            for one in over
        ),
    ]


def size(n: float | int) -> str:
    """Bytes in GB, those below 10 MB in MB."""
    return f"{n / GB:.2f} GB" if n >= GB / 100 else f"{n / 1e6:.2f} MB"


def piece_name(piece: str, made: Figures) -> str:
    """The piece as it is shown: the last micro-batch is just one where an update has no other."""
    alone = all(one.piece != "micro-batch" for one in made.pieces)
    return "micro-batch" if alone and piece == "last micro-batch" else piece


def align_columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns side by side; the first `left` ones flush left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  "
        + "  ".join(x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in (head, *rows)
    ]


def memory_lines(made: Figures) -> Iterator[str]:
    """The peak of each phase and what holds it."""
    whose = "the only rank" if made.ranks == 1 else f"one of {made.ranks:,} ranks"
    yield f"memory of {whose}, the most at once in each phase"
    for one in made.memory:
        on_host = f", of which {size(one.host)} on the host" if one.host else ""
        yield f"  {one.phase:<10}{size(one.bytes):>12}{on_host}"
        for name, n in list(one.holders.items())[:SHOWN]:
            if n >= SMALLEST * one.bytes:
                yield f"  {'':<10}{size(n):>12}  {name}"
    percent = round(100 * (made.estimate / made.peak - 1))
    said = f"  the dry run's estimate: {size(made.estimate)}, {percent:+d}% of the largest of these"
    most = made.differences[0]
    if most.estimate == most.rehearsed:
        yield f"{said}: every part is the same"
        return
    yield f"{said}; most of the difference is {most.name}: {size(most.estimate)} there, {size(most.rehearsed)} here"


def work_lines(made: Figures) -> list[str]:
    """What a step computes, by piece and part, the longest first."""
    ordered = sorted(made.parts, key=lambda one: -one.seconds)
    least = SMALLEST * sum(one.seconds for one in ordered)
    rows = [
        (
            piece_name(one.piece, made),
            one.part,
            one.kind,
            f"{one.flops / 1e12:.2f}",
            f"{one.bytes / GB:.1f}",
            f"{one.launches:,}",
            f"{one.seconds * 1e3:.1f}",
        )
        for one in ordered
        if one.seconds >= least
    ]
    rest = [one.seconds for one in ordered if one.seconds < least]
    head = ("piece", "part", "kind", "TFLOP", "GB", "launches", "ms")
    waits = ", ".join(f"{piece_name(piece, made)} {n}" for piece, n in made.waits.items()) or "none"
    return [
        "work of a step on one rank",
        *align_columns(head, rows, 3),
        *([f"  and {len(rest)} rows of less than {SMALLEST:.0%} each: {sum(rest) * 1e3:.1f} ms"] if rest else []),
        f"  waits for values computed on the card: {waits}",
    ]


def traffic_lines(made: Figures) -> list[str]:
    """Collectives of a step."""
    if not any(one.ranks > 1 for one in made.traffic):
        return ["collectives: none, one rank alone"]
    rows = [
        (piece_name(one.piece, made), one.name, one.group, str(one.ranks), f"{one.calls:,}", size(one.bytes))
        for one in made.traffic
        if one.ranks > 1
    ]
    head = ("piece", "collective", "group", "ranks", "calls", "bytes")
    return ["collectives of a step, bytes of the whole that is gathered or reduced", *align_columns(head, rows, 3)]


def transfer_lines(made: Figures) -> list[str]:
    """What an offloaded model moves; nothing where none is."""
    if not made.transfers:
        return []
    rows = [(piece_name(one.piece, made), size(one.to_card), size(one.to_host)) for one in made.transfers]
    head = ("piece", "to the card", "to the host")
    return ["", "between the host's memory and the card, in a step", *align_columns(head, rows, 1)]


def change_lines(made: Figures) -> Iterator[str]:
    """What each change is expected to give."""
    yield f"what is expected of each change, by the same roofline: a step with all of them {made.seconds:.3g} s"
    if not made.changes:
        yield "  none of them is in this run"
        return
    rows = [
        (
            one.name,
            size(one.bytes_without),
            size(one.bytes),
            f"{one.launches_without:,}",
            f"{one.launches:,}",
            f"{one.seconds_without:.3g} s",
            f"{one.seconds_without / made.seconds:.2f}",
        )
        for one in made.changes
    ]
    head = ("change", "moved without", "with", "launches without", "with", "step without", "times as long")
    yield from align_columns(head, rows, 1)
    for one in made.changes:
        if one.name in COMPILED:
            yield (
                f"  {one.name}: from {size(one.bytes_without)}, each operator as written, to 0, if none of it went "
                f"through memory: a step of {one.seconds_without:.3g} to {one.seconds_without_both:.3g} s"
            )


def time_lines(made: Figures) -> list[str]:
    """A time on the card, by piece."""
    rows = [
        (
            piece_name(one.piece, made),
            f"{one.times:,}",
            f"{one.kernels * 1e3:.2f}",
            f"{one.host * 1e3:.2f}",
            f"{one.collectives * 1e3:.2f}",
            f"{one.transfers * 1e3:.2f}",
            f"{one.waits * 1e3:.2f}",
            f"{one.times * one.seconds * 1e3:,.1f}",
        )
        for one in made.pieces
    ]
    head = ("piece", "times", "kernels ms", "launching ms", "collectives ms", "host link ms", "waits ms", "in all ms")
    return [
        f"time on {made.card}, by a roofline: not measured",
        *align_columns(head, rows, 1),
        f"  a step {made.seconds:.3g} s, {made.tokens / made.seconds:,.0f} sampled tokens/s on all ranks, "
        f"MFU of training {made.mfu:.0%} of the {made.dtype} peak",
    ]


def assumption_lines(counted: Rehearsal, asked: Asked, assumed: Assumptions, made: Figures) -> list[str]:
    """What the figures rest on."""
    rows, call = counted.rows, counted.decoding
    found = [
        f"every prompt has {rows.prompt_tokens} tokens (--prompt_tokens), every completion {rows.new_tokens}, the most",
        *assumed.lines(asked.card),
        "a piece takes the longest of its kernels, the host's launches, its collectives and its transfers, as if they "
        "overlapped, and its waits besides",
        "multiplied: " + ", ".join(f"{piece_name(piece, made)} x {n:,}" for piece, n in counted.repeats.items() if n),
        "not in the time: rewards, checkpoints, evaluation, logging, the first steps' captures and compilations",
        "not in the memory: integers (tokens, masks), NCCL's own buffers, a kernel's workspace",
    ]
    if call is not None:
        found.append(
            f"decoding: {call.at_once} rows at once for {rows.new_tokens} tokens, slots half full on average, from "
            "captured graphs; what draws a token is counted as written"
        )
    return ["assumed", *(f"  {line}" for line in (*found, *counted.notes))]
