"""`tools/bench trl`: our program and TRL's GRPOTrainer on the same work, started in turn; and the table of both."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bench_sides
import bench_work
from bench_flags import TRL_PYTHON
from bench_sides import Measured

TOOLS = Path(__file__).resolve().parent
HOME = TOOLS.parents[1] / TRL_PYTHON
REQUIREMENTS = TOOLS / "trl.requirements.txt"


class Bar(NamedTuple):
    """What is to be reached against TRL; None: no bar."""

    speed: float | None  # completions per second, at least so many times as many
    memory: float | None  # peak memory, at most this share


BARS = {
    **dict.fromkeys(("tiny", "calculator_tiny"), Bar(None, None)),
    **dict.fromkeys(("arithmetic", "calculator", "calculator_described", "calculator_card"), Bar(2.5, None)),
    "small": Bar(3.0, 1 / 3),
}


def trl(args: argparse.Namespace) -> Iterable[str]:
    """Completions per second and peak memory against TRL's GRPOTrainer, program against program."""
    unknown = {*args.scale.split(",")} - {*bench_work.SCALES}
    if unknown:
        raise ValueError(f"--scale: got {', '.join(sorted(unknown))}, wanted some of {', '.join(bench_work.SCALES)}")
    python = args.trl_python or environment(HOME)
    versions: dict[str, dict[str, str]] = {}
    for name in args.scale.split(","):
        with tempfile.TemporaryDirectory() as folder:
            shared, ours, theirs = fought(args, bench_work.SCALES[name], python, Path(folder))
        versions = {"ours": ours.versions, "TRL": theirs.versions}
        yield from chapter(name, shared, args, ours, theirs)
    yield from settings(args, versions)


def environment(home: Path) -> Path:
    """The Python of an environment that has TRL, made now when it is not there."""
    python = home / "bin" / "python"
    if not python.exists():
        print(f"making {home}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
    return python


def fought(
    args: argparse.Namespace, work: bench_work.Work, python: Path, folder: Path
) -> tuple[dict[str, Any], Measured, Measured]:
    """The settings that both sides share, and the figures of each, started `rounds` times in turn."""
    steps = args.warm_up + ceil(args.steps / args.rounds)
    shared = bench_work.make(work, steps, folder)
    shared |= {"trl_generation": args.trl_generation, "trl_rows": args.trl_rows}
    same = {"warm_up": args.warm_up, "threads": args.threads, "deadline": args.timeout}
    sides = {
        "ours": partial(bench_sides.ours, shared, **same),
        "trl": partial(bench_sides.trl, shared, python=python, **same),
    }
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side, start in sides.items():
            found[side].append(start(folder / f"{side}{number}"))
            print(
                f"{side}, start {number + 1}: {found[side][-1].rate():.1f} completions/s", file=sys.stderr, flush=True
            )
    return shared, bench_sides.together(found["ours"]), bench_sides.together(found["trl"])


# -- what is printed


def chapter(
    name: str, work: dict[str, Any], args: argparse.Namespace, ours: Measured, theirs: Measured
) -> Iterable[str]:
    """What one scale came to."""
    yield f"## {name}"
    yield ""
    yield (
        f"{work['parameters']:,} parameters, random; {work['prompts']} x {work['group_size']} completions of up to "
        f"{work['new_tokens']} tokens after prompts of {work['prompt_tokens']:.1f}; {len(ours.seconds)} steps of each "
        f"side; starts of each, in turn: {args.rounds}, each with {args.warm_up} to warm up; threads: {args.threads}; "
        f"tokens of a micro-batch of ours: {work['micro_tokens']:,}, logits of a chunk of its head: "
        f"{work['logits_chunk_elements']:,}."
    )
    yield ""
    yield from against(BARS[name], ours, theirs)
    yield ""
    yield from phases(ours)
    yield ""


def against(bar: Bar, ours: Measured, theirs: Measured) -> Iterable[str]:
    """The table of both sides."""
    speed = "" if bar.speed is None else f"at least {bar.speed:.1f}x"
    memory = "" if bar.memory is None else f"at most {bar.memory:.2f}x"
    both = (ours, theirs)
    yield "| | ours | TRL | ratio | bar |"
    yield "|---|---|---|---|---|"
    yield row("completions per second, median step", ours.rate(), theirs.rate(), ".1f", speed)
    yield row("seconds a step, median", *(median(side.seconds) for side in both), ".2f", "")
    yield f"| and from, to | {' | '.join(f'{min(s.seconds):.2f}, {max(s.seconds):.2f}' for s in both)} | | |"
    yield row("processor seconds a step, mean", *(side.processor for side in both), ".2f", "")
    yield row("tokens of a completion, mean", *(sum(s.length) / len(s.length) for s in both), ".2f", "")
    if ours.calls or theirs.calls:
        yield row("calls of the tool in an episode, mean", *(sum(s.calls) / len(s.calls) for s in both), ".2f", "")
    yield row("peak memory, GB", *(side.used.peak / 1e9 for side in both), ".2f", memory)
    above = "of which above what it held before the first step, GB"
    yield row(above, *((side.used.peak - side.used.before) / 1e9 for side in both), ".2f", "")


def row(what: str, ours: float, theirs: float, form: str, bar: str) -> str:
    """One line: both figures, and ours over theirs, where theirs is not zero."""
    ratio = f"{ours / theirs:.2f}x" if theirs else ""
    return f"| {what} | {ours:{form}} | {theirs:{form}} | {ratio} | {bar} |"


def phases(ours: Measured) -> Iterable[str]:
    """Where the time of our median step goes."""
    whole = median(ours.seconds)
    middles = {name.removeprefix("time/"): median(seconds) for name, seconds in ours.phases.items()}
    shown = {name: seconds for name, seconds in middles.items() if seconds >= 0.005 * whole}
    yield f"| ours | {' | '.join(shown)} |"
    yield f"|---|{'---|' * len(shown)}"
    yield f"| seconds, median | {' | '.join(f'{seconds:.3f}' for seconds in shown.values())} |"
    yield f"| share of a step | {' | '.join(f'{seconds / whole:.0%}' for seconds in shown.values())} |"


def settings(args: argparse.Namespace, versions: dict[str, dict[str, str]]) -> Iterable[str]:
    """What was equal, and what was on and off on which side."""
    yield RAN.format(
        rows=f"{args.trl_rows} rows" if args.trl_rows else "all rows",
        generation={"regular": "`generate`", "continuous": "continuous batching"}[args.trl_generation],
        dtypes=" and ".join(dict.fromkeys(bench_work.SCALES[name].dtype for name in args.scale.split(","))),
    )
    if "calculator" in args.scale:
        yield EPISODES
        yield ""
    for side, used in versions.items():
        yield f"- {side}: {', '.join(f'{name} {version}' for name, version in used.items())}"


EPISODES = """Calculator: a completion is an episode of at most three turns. The model has been shown nothing but calls
of the tool for a short while, so it calls it nearly always. Tool, reward and the text around what it gives are the
same on both sides; of the tokens that a row may have behind its prompt, ours counts those that were sampled, TRL's all.
Ours: the tool runs in processes of its own, one for four cores, which are asked for every turn: `environments` is the
seconds of all calls together, and `environment_wait` those of generation in which nothing was decoded. TRL:
`GRPOTrainer(tools=[calculator])`, which calls the function in its own process; its tokenizer is given a chat template
and a response template for the model's format."""

RAN = """## What ran

Both: whole programs, one at a time, on the same model folder and file of prompts; the same reward, a function of the
text; GRPO's clipped ratio, averaged over a row and then over rows, no reference model; AdamW (fused) at the same
constant rate, gradients clipped at 1; one update a step, on all rows; temperature 1, the full support; {dtypes}. No
length is forced: with random weights a completion ends with probability 1/vocabulary at each token, on both sides. A
step lasts from the end of the one before to its own end.

Ours: `python -m grpo_fn.run` on gin/base.gin with gin/algo/grpo.gin. Off: checksums of every step, tables of samples
and pages of signals; TRL has nothing like them. On, as ever: metrics.jsonl, TensorBoard's scalars and histograms, every
rollout stored, rewards in a process of their own. No part of a step: an evaluation of one problem before and after, the
checkpoint at the end.

TRL: `GRPOTrainer` on the same device, transformers' {generation}, {rows} in a micro-batch,
`gradient_checkpointing` off, `loss_type="grpo"`. Off: checkpoints, evaluation, `report_to`, the progress bar. On, as
ever: a line of figures a step.

Processor seconds: of the program from its first step to its end, over all its steps, warm-up and what follows the last
step included; they depend less on what else the machine does. Memory: the most that a program had resident (VmHWM) and
the most that its helper processes held at once, both looked at from outside; before the first step: what it had
resident when training began.
"""
