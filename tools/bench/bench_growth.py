"""How a step of our program grows with the number and with the length of its completions: `tools/bench growth`.

Sampling goes through a fixed number of slots and training through micro-batches of a fixed size, so that only their
number grows. The program is started once for every point in each round, and its own metrics say what a step took.
What attention does for a token grows with what precedes the token, so that only the number has a bar.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import in_turn, table
from bench_sides import Measured, ours, together
from bench_work import SCALES, make

BAR = 0.15


class Point(NamedTuple):
    """So many completions of so many tokens."""

    completions: int
    length: int


def growth(args: argparse.Namespace) -> Iterator[str]:
    """Time per token of a step at growing numbers and lengths of completions. Raises ValueError for odd numbers."""
    completions, lengths = (sorted(map(int, flag.split(","))) for flag in (args.completions, args.lengths))
    if args.scale not in SCALES:
        raise ValueError(f"--scale: got {args.scale}, wanted one of {', '.join(SCALES)}")
    work = SCALES[args.scale]
    if odd := [n for n in completions if n % work.group_size]:
        raise ValueError(f"--completions: got {odd[0]}, wanted multiples of {work.group_size}")
    more, longer = [Point(n, lengths[0]) for n in completions], [Point(completions[0], n) for n in lengths]
    steps = args.warm_up + -(-args.steps // args.rounds)
    with tempfile.TemporaryDirectory() as home:
        folder, sides = Path(home), {}
        shared = make(work._replace(prompts=completions[-1] // work.group_size), steps, folder)
        for point in dict.fromkeys([*more, *longer]):
            of_point = {"prompts": point.completions // work.group_size, "new_tokens": point.length}
            sides[point] = partial(start, shared | of_point | {"max_rows": completions[0]}, folder, point, args)
        taken = {point: together(starts) for point, starts in in_turn(sides, args.rounds).items()}
    yield f"{work}; {completions[0]} slots; median of {len(taken[more[0]].steps)} steps; {args.threads} threads"
    yield ""
    yield from rows("completions", more, taken)
    yield from verdict([per_token(taken[point]) for point in more])
    yield from rows("length", longer, taken)


def start(shared: dict[str, object], folder: Path, point: Point, args: argparse.Namespace, number: int) -> Measured:
    """A start of our program at that point."""
    place = folder / f"{point.completions}x{point.length}-{number}"
    return ours(shared, place, warm_up=args.warm_up, threads=args.threads, deadline=args.timeout)


def per_token(taken: Measured) -> float:
    """Seconds of sampling and training per sampled token."""
    tokens = taken.mean("length") * taken.mean("rows")
    return sum(median(taken.of(f"time/{phase}")) for phase in ("generate", "train")) / tokens


def rows(name: str, points: Sequence[Point], taken: dict[Point, Measured]) -> Iterator[str]:
    """A row for each point; its time per token beside that at the median point."""
    middle = median(per_token(taken[point]) for point in points)
    cells = [
        (
            str(getattr(point, name)),
            *(f"{median(taken[point].of(f'time/{phase}')):.3f} s" for phase in ("generate", "train")),
            f"{per_token(taken[point]) / middle:.2f}x",
        )
        for point in points
    ]
    yield from table((name, "sampling", "training", "both per token"), cells)


def verdict(each: Sequence[float]) -> Iterator[str]:
    """Whether a token takes as long at every point as at the median one."""
    ratios = [seconds / median(each) for seconds in each]
    said = "passed" if all(abs(ratio - 1) <= BAR for ratio in ratios) else "FAILED"
    yield f"Linear in completions within {BAR:.0%}: {said} ({min(ratios):.2f}x to {max(ratios):.2f}x)"
    yield ""
