"""How a step grows with the number of turns of its episodes: `tools/bench turns`.

Every episode calls the calculator at each turn until its last; a turn of the model with random weights ends with one
token in `ENDS_EVERY`, so turns are as long as one another in the mean. Seconds are the processor's, of this process, so
that what else the machine does meets no point more than another. Linear means that time without attention is within
15 % of the straight line through all points; attention is named apart, as in `growth`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from bench_growth import BAR, GROUP, SIZES, attention
from bench_rank import Bench, as_batch, built
from transformers import AutoModelForCausalLM

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.core.problem import Problem
from grpo_fn.environments import tool_use
from grpo_fn.environments.calculator import calculator
from grpo_fn.rewards.episode import used_tool
from grpo_fn.shell.episodes.episode_rows import Environments, as_observation
from grpo_fn.shell.episodes.tape import Tape
from grpo_fn.shell.reward_workers.environment_pool import EnvironmentPool
from grpo_fn.shell.world import join_world

ENDS_EVERY = 8
OPENING, OBSERVED = 16, 8  # tokens
TURN = 96  # tokens of a turn, at most
CALL = ToolCall("calculator", {"expression": "12*(7+5)"})


@dataclass(frozen=True)
class FixedFormat:
    """As many tokens for every message; each turn calls the calculator."""

    end: int = 1

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The opening."""
        return [2 + i for i in range(OPENING)]

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """What is observed."""
        return [2 + i for i in range(OBSERVED)]

    def parse(self, turn: Sequence[int]) -> Message:
        """A call."""
        return Message("assistant", "", "", (CALL,))

    def read(self, turn: Sequence[int]) -> str:
        """No text: the tape keeps what an environment was asked."""
        return ""


class Taken(NamedTuple):
    """A step at some number of turns."""

    turns: float  # of an episode, mean
    tokens: float  # sampled, of an episode, mean
    sample: float  # seconds
    train: float
    attention: tuple[float, float]  # share of each
    waited: float  # seconds in which nothing was decoded

    def rest(self) -> float:
        """Seconds without attention."""
        return sum(t * (1 - a) for t, a in zip((self.sample, self.train), self.attention, strict=True))


def turns(args: argparse.Namespace) -> Iterator[str]:
    """Time per step at growing numbers of turns, and whether it is linear in them."""
    numbers = sorted(map(int, args.turns.split(",")))
    found = measured(numbers, args)
    yield (
        f"{SIZES[args.size]}; {args.episodes} episodes; median of {args.steps} steps, processor seconds; "
        f"{torch.get_num_threads()} threads; openings of {OPENING} tokens, observations of {OBSERVED}"
    )
    yield ""
    slope, base = np.polyfit([one.turns for one in found], [one.rest() for one in found], 1)
    yield "| turns | tokens | sample, s | train, s | attention | waits, s | without attention, s | off the line |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in found:
        off = one.rest() / (base + slope * one.turns) - 1
        share = 1 - one.rest() / (one.sample + one.train)
        seconds = f"{one.sample:.3f} | {one.train:.3f} | {share:.0%} | {one.waited:.3f} | {one.rest():.3f}"
        yield f"| {one.turns:.2f} | {one.tokens:.1f} | {seconds} | {off:+.0%} |"
    yield ""
    worst = max(abs(one.rest() / (base + slope * one.turns) - 1) for one in found)
    yield f"Farthest off the line: {worst:.0%}, bar {BAR:.0%}: {'passed' if worst <= BAR else 'FAILED'}"


def measured(numbers: Sequence[int], args: argparse.Namespace) -> list[Taken]:
    """Every point's median step, the points in turn."""
    world = join_world("auto", deadline=600.0)
    size = SIZES[args.size]._replace(prompts=args.episodes // GROUP)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(size.config())
        model.generation_config.eos_token_id = [*range(0, size.vocabulary, ENDS_EVERY)]
        model.save_pretrained(folder)
        bench = built(world, size, model=Path(folder), scale="scale/no_shard.gin")
    bench.sampler.sampler.model.generation_config.eos_token_id = [*range(0, size.vocabulary, ENDS_EVERY)]
    found: dict[int, list[Taken]] = {n: [] for n in numbers}
    longest = OPENING + (TURN + OBSERVED) * max(numbers)
    with ExitStack() as open_pools:
        points = {n: episodes_of(bench, n, open_pools.enter_context(pool_of(n)), longest) for n in numbers}
        for step in range(args.steps + 2):
            for n in numbers:
                found[n].append(once(points[n], profiled=step > args.steps))
    return [together(found[n][1:]) for n in numbers]  # the first warms up


def pool_of(n: int) -> EnvironmentPool:
    """Episodes of n turns."""
    tools = [partial(calculator, max_length=40)]
    environment = tool_use.environment(tools=tools, grade=used_tool, instructions="", max_turns=n, pure=True)
    return EnvironmentPool(environment, workers=1, deadline=60.0, memory_mb=2048)


def episodes_of(bench: Bench, n: int, pool: EnvironmentPool, longest: int) -> Bench:
    """The bench, sampling episodes of n turns in slots of `longest` tokens; the pool's worker is there."""
    problems = [Problem(uid, str(uid), "", {}) for uid in range(bench.size.prompts)]
    pool.start(problems[0], 0).result()
    of = Environments(
        name="calculator",
        pure=True,
        caller=pool,
        chat=FixedFormat(),
        max_turns=n,
        max_turn_tokens=TURN,
        fails=as_observation,
        answer_steps=4,
        tape=Tape(),
    )
    limits = {"max_new_tokens": TURN * n, "max_total_tokens": longest, "max_rows": len(problems) * GROUP}
    sampler = replace(bench.sampler.sampler, environments=of, **limits)
    return bench._replace(sampler=replace(bench.sampler, sampler=sampler), problems=problems)


def once(bench: Bench, *, profiled: bool) -> Taken:
    """A step. With `profiled` its shares of attention are found, and its seconds are not used."""
    shares, rollouts = [], []
    caller = bench.sampler.sampler.environments.caller
    caller.figures()
    seconds = [spent(lambda: rollouts.append(bench.sample()), shares, profiled)]
    waited, rollout = caller.figures()["time/environment_wait"], rollouts[0]
    batch = as_batch(bench, rollout)
    seconds.append(spent(partial(bench.learn, batch), shares, profiled))
    means = [sum(map(len, rollout.turns)) / len(rollout.turns), int(rollout.mask.sum()) / len(rollout.turns)]
    return Taken(*means, *seconds, tuple(shares) if profiled else (0.0, 0.0), waited)


def spent(work: Callable[[], None], shares: list[float], profiled: bool) -> float:
    """Processor seconds of the work; with `profiled` the share of attention in it is noted."""
    began = time.process_time()
    if profiled:
        shares.append(attention(work))
    else:
        work()
    return time.process_time() - began


def together(steps: list[Taken]) -> Taken:
    """The medians, with the shares of attention of the last one, which was profiled."""
    *timed, profiled = steps
    middle = [statistics.median(one[i] for one in timed) for i in (0, 1, 2, 3, 5)]
    return Taken(*middle[:4], profiled.attention, middle[4])
