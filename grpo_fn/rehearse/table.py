"""The figures of a rehearsal as a person would read them."""

from collections.abc import Iterator, Sequence

from grpo_fn.rehearse.cards import Assumptions
from grpo_fn.rehearse.figures import Figures
from grpo_fn.rehearse.rehearsal import Asked, Rehearsal

GB = 1e9
SHOWN = 5  # holders of a phase


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
        "",
        *time_lines(made),
        "",
        *assumption_lines(counted, asked, assumed),
    ]


def verdict(made: Figures) -> list[str]:
    """Whether it fits; where not, in which phase and for what."""
    most = max(made.memory, key=lambda one: one.bytes)
    of_card = f"{most.bytes / GB:.2f} GB in {most.phase!r} of {made.usable / GB:.2f} GB on {made.card}"
    if most.bytes <= made.usable:
        return [f"fits: {of_card}"]
    over = [one for one in made.memory if one.bytes > made.usable]
    return [
        f"does not fit: {of_card}",
        *(
            f"  {one.phase}: {(one.bytes - made.usable) / GB:.2f} GB too many; the largest: "
            + ", ".join(f"{name} {n / GB:.2f} GB" for name, n in list(one.holders.items())[:SHOWN])
            for one in over
        ),
    ]


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
    yield f"memory of one of {made.ranks} ranks, the most at once in each phase"
    for one in made.memory:
        on_host = f", and {one.host / GB:.2f} GB on the host" if one.host else ""
        yield f"  {one.phase:<10}{one.bytes / GB:9.2f} GB{on_host}"
        for name, n in list(one.holders.items())[:SHOWN]:
            yield f"  {'':<10}{n / GB:9.2f} GB  {name}"
    ratio = made.estimate / made.peak - 1
    yield f"  the dry run's estimate: {made.estimate / GB:.2f} GB, {ratio:+.0%} of the largest of these"


def work_lines(made: Figures) -> list[str]:
    """What a step computes, by piece and part."""
    rows = [
        (
            one.piece,
            one.part,
            one.kind,
            f"{one.flops / 1e12:.2f}",
            f"{one.bytes / GB:.1f}",
            f"{one.launches:,}",
            f"{one.seconds * 1e3:.1f}",
        )
        for one in sorted(made.parts, key=lambda one: -one.seconds)
    ]
    head = ("piece", "part", "kind", "TFLOP", "GB", "launches", "ms")
    waits = ", ".join(f"{piece} {n}" for piece, n in made.waits.items()) or "none"
    return [
        "work of a step on one rank",
        *align_columns(head, rows, 3),
        f"  waits for values computed on the card: {waits}",
    ]


def traffic_lines(made: Figures) -> list[str]:
    """Collectives of a step."""
    if not any(one.ranks > 1 for one in made.traffic):
        return ["collectives: none, one rank alone"]
    rows = [
        (one.piece, one.name, one.group, str(one.ranks), f"{one.calls:,}", f"{one.bytes / GB:.3f}")
        for one in made.traffic
        if one.ranks > 1
    ]
    head = ("piece", "collective", "group", "ranks", "calls", "GB")
    return ["collectives of a step, bytes of the whole that is gathered or reduced", *align_columns(head, rows, 3)]


def time_lines(made: Figures) -> list[str]:
    """A time on the card, by piece."""
    rows = [
        (
            one.piece,
            f"{one.times:,}",
            f"{one.kernels * 1e3:.2f}",
            f"{one.host * 1e3:.2f}",
            f"{one.collectives * 1e3:.2f}",
            f"{one.times * one.seconds:.2f}",
        )
        for one in made.pieces
    ]
    head = ("piece", "times", "kernels ms", "launching ms", "collectives ms", "in all s")
    return [
        f"time on {made.card}, by a roofline: not measured",
        *align_columns(head, rows, 1),
        f"  a step {made.seconds:.1f} s, {made.tokens / made.seconds:,.0f} sampled tokens/s on all ranks, "
        f"MFU of training {made.mfu:.0%}",
    ]


def assumption_lines(counted: Rehearsal, asked: Asked, assumed: Assumptions) -> list[str]:
    """What the figures rest on."""
    rows, call = counted.rows, counted.decoding
    found = [
        f"every prompt has {rows.prompt_tokens} tokens (--prompt_tokens), every completion {rows.new_tokens}, the most",
        *assumed.lines(asked.card),
        "a piece takes the longest of its kernels, the host's launches and its collectives, as if they overlapped",
        "multiplied: " + ", ".join(f"{piece} x {n:,}" for piece, n in counted.repeats.items() if n),
        "not in the time: rewards, checkpoints, evaluation, logging, the first steps' captures and compilations",
        "not in the memory: integers (tokens, masks), NCCL's own buffers, a kernel's workspace",
    ]
    if call is not None:
        found.append(
            f"decoding: {call.at_once} rows at once for {rows.new_tokens} tokens, slots half full on average, each "
            "operator as written, not compiled, from captured graphs"
        )
    return ["assumed", *(f"  {line}" for line in (*found, *counted.notes))]
