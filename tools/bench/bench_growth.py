"""How a step grows with the number and with the length of its completions: `tools/bench growth`.

Sampling goes through a fixed number of slots, as many as the fewest completions, and training through micro-batches of
a fixed size, so that only their number grows. Every point's steps are taken in turn with the others', so that what else
the machine does meets all of them.

For lengths attention is named apart, since what it does for a token grows with what precedes the token: its share is
the time in attention kernels, batched products and softmax (choosing a token has a little of that, too), as
the profiler counts it in one more step. Linear means that the rest, per sampled token, stays within 15 % of the median
point's.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_rank import Bench, Size, as_batch, built, timed
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch
from grpo_fn.shell.world import World, join_world

BAR = 0.15
ATTENTION = ("attention", "bmm", "softmax")
GROUP = 8
SIZES = {  # a vocabulary, a width, layers, and what a micro-batch holds
    "tiny": Size(512, 64, 1, 1, GROUP, 8, 8, 256),
    "usual": Size(1024, 128, 2, 1, GROUP, 8, 32, 4096),
}


class Point(NamedTuple):
    """So many completions of so many tokens."""

    completions: int
    length: int


class Step(NamedTuple):
    """What is timed at a point."""

    sample: Callable[[], Any]
    train: Callable[[], Any]
    tokens: int


class Taken(NamedTuple):
    """A step's seconds, and the share of attention in them."""

    sample: float
    train: float
    tokens: int
    attention: tuple[float, float]

    def rest(self) -> tuple[float, float, float]:
        """Seconds per sampled token without attention: of sampling, of training, of both."""
        each = [t * (1 - a) / self.tokens for t, a in zip((self.sample, self.train), self.attention, strict=True)]
        return each[0], each[1], sum(each)


def growth(args: argparse.Namespace) -> Iterator[str]:
    """Time per step at growing numbers and lengths of completions, and whether it is linear in both."""
    completions, lengths = (sorted(map(int, flag.split(","))) for flag in (args.completions, args.lengths))
    more = [Point(n, lengths[0]) for n in completions]
    longer = [Point(completions[0], n) for n in lengths]
    found = measured(SIZES[args.size], {*more, *longer}, slots=completions[0], steps=args.steps)
    yield f"{SIZES[args.size]}; {completions[0]} slots; median of {args.steps} steps; {torch.get_num_threads()} threads"
    yield ""
    yield from table("completions", more, found, apart=False)
    yield ""
    yield from table("length", longer, found, apart=True)


def measured(size: Size, points: Iterable[Point], *, slots: int, steps: int) -> dict[Point, Taken]:
    """Every point's median step."""
    world = join_world("auto", deadline=600.0)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(size.config()).save_pretrained(folder)
        bench = built(world, size, model=Path(folder), scale="scale/no_shard.gin")
    todo = {point: step(bench, point, slots) for point in sorted(points)}
    rounds = [{point: once(world, one) for point, one in todo.items()} for _ in range(steps)]
    return {
        point: Taken(
            *(statistics.median(each[point][i] for each in rounds) for i in range(2)),
            tokens=one.tokens,
            attention=(attention(one.sample), attention(one.train)) if point.completions == slots else (0.0, 0.0),
        )
        for point, one in todo.items()
    }


def step(bench: Bench, point: Point, slots: int) -> Step:
    """A step of that point, on the bench's policy; it has been taken once, to warm up."""
    size = bench.size._replace(prompts=point.completions // GROUP, new_tokens=point.length)
    sampler = replace(bench.sampler.sampler, max_new_tokens=point.length, max_rows=slots)
    problems = [Problem(uid, str(uid), "", {}) for uid in range(size.prompts)]
    here = bench._replace(size=size, sampler=replace(bench.sampler, sampler=sampler), problems=problems)
    batch: Batch = as_batch(here, here.sample())
    here.learn(batch)
    return Step(here.sample, partial(here.learn, batch), int(batch.mask.sum()))


def once(world: World, one: Step) -> tuple[float, float]:
    """Seconds of sampling and of training."""
    return timed(world, one.sample), timed(world, one.train)


def attention(work: Callable[[], Any]) -> float:
    """The share of the work's time that is spent in attention."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        work()
    kept = "self_device_time_total" if len(kinds) > 1 else "self_cpu_time_total"
    spent = [(event.key, getattr(event, kept)) for event in seen.key_averages()]
    return sum(t for name, t in spent if any(x in name for x in ATTENTION)) / sum(t for _, t in spent)


def table(name: str, points: Sequence[Point], found: dict[Point, Taken], *, apart: bool) -> Iterator[str]:
    """A row for each point, and the verdict: a token's time beside that at the median point, `apart` from attention."""
    takens = [found[point] if apart else found[point]._replace(attention=(0.0, 0.0)) for point in points]
    rests = [taken.rest() for taken in takens]
    middle = [statistics.median(column) for column in zip(*rests, strict=True)]
    what = "the rest" if apart else "it"
    yield f"| {name} | sampling | training | of them attention | {what} per token: sampling | training | both |"
    yield "|---|---|---|---|---|---|---|"
    for point, taken, rest in zip(points, takens, rests, strict=True):
        ratios = " | ".join(f"{x / m:.2f}x" for x, m in zip(rest, middle, strict=True))
        shares = ", ".join(f"{share:.0%}" for share in taken.attention) if apart else "not apart"
        yield f"| {getattr(point, name)} | {taken.sample:.3f} s | {taken.train:.3f} s | {shares} | {ratios} |"
    yield ""
    yield verdict(name, [rest[2] / middle[2] for rest in rests])


def verdict(name: str, ratios: Sequence[float]) -> str:
    """Whether all ratios are within the bar."""
    said = "passed" if all(abs(x - 1) <= BAR for x in ratios) else "FAILED"
    return (
        f"Linear in {name} within {BAR:.0%}: {said} ({min(ratios):.2f}x to {max(ratios):.2f}x, sampling and training)"
    )
