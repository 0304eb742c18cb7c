"""What only a GPU can show, in three commands of at most nine minutes for one card.

    python tools/device_check --part correctness --out experiments/device/RESULTS-correctness.md
    python tools/device_check --part speed --out experiments/device/RESULTS-speed.md
    python tools/device_check --part steps --out experiments/device/RESULTS-steps.md
    python tools/device_check --only NAME,...          # some checks alone; without either, all of them
    python tools/device_check --device cpu --tiny      # toy shapes: does the command work? Its figures mean nothing

Weights are random, in the shapes of Qwen2.5-0.5B and 1.5B, and are made here; nothing is downloaded and no tokenizer is
needed. It wants a GPU, and torch, transformers, tensorboard, einops, jaxtyping, safetensors and, for the check of
adapters, peft. gin-config and math-verify are not needed. Where a pure package is missing and nothing can be fetched,
carry its wheel:

    pip download --no-deps -d wheels jaxtyping wadler-lindig peft         # where there is a network
    pip install --no-index --no-deps --find-links wheels jaxtyping wadler-lindig peft

Each check has a process and a deadline of its own; one that fails, hangs or runs out of memory is reported and the
others go on; one that had no time, or not all of it, is left out. The table is written after each. The exit code is 1
when a check failed. A goal that is missed is marked and is no failure.
"""

import argparse
import datetime
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from device_runner import FAILED, LEFT_OUT, OK, Check, Figure, Outcome, Setting, outcomes_apart

MACHINE = Check("machine", "", "device_parts:machine", 60)
PARTS = ("correctness", "speed", "steps")
HALF, LARGE = {"size": "0.5b"}, {"size": "1.5b"}
CHECKS = [
    Check("prng", "correctness", "device_exact:randomness", 60),
    Check("gradients", "correctness", "device_exact:gradients", 60),
    Check("rows", "correctness", "device_exact:rows", 60),
    Check("head", "correctness", "device_exact:head", 60),
    Check("decode", "correctness", "device_decode:exact", 90),
    Check("fp16", "correctness", "device_exact:float16", 60),
    Check("offload", "correctness", "device_exact:offload", 60),
    Check("compiled", "correctness", "device_exact:compiled", 120, only_cuda=True),
    Check("train-0.5b", "speed", "device_speed:train", 90, HALF),
    Check("train-1.5b", "speed", "device_speed:train", 120, LARGE),
    Check("train-1.5b-compiled", "speed", "device_speed:train", 150, {**LARGE, "compiled": True}, only_cuda=True),
    Check("decode-0.5b", "speed", "device_decode:speed", 120, HALF),
    Check("decode-1.5b", "speed", "device_decode:speed", 120, LARGE),
    Check("step", "steps", "device_speed:grpo", 180),  # its first step compiles the blocks: a minute more
    Check("memory", "steps", "device_speed:capped", 120),
    Check("vllm", "steps", "device_vllm:colocated", 240, only_cuda=True),
]

Runner = Callable[[Sequence[Check], Setting, float], Iterator[Outcome]]


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--part", choices=PARTS, help="the checks of one command of nine minutes")
    names = ", ".join(check.name for check in CHECKS)
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"these checks alone, of {names}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--limit", type=float, default=520.0, metavar="S", help="end after that (default 520)")
    return parser


def main(argv: Sequence[str] | None = None, *, run: Runner = outcomes_apart) -> int:
    """Do the checks, print a line for each as it ends, then the table. 1 when one failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = flags().parse_args(argv)
    chosen = selected(args.only, args.part)
    if args.device == "cpu" and not args.tiny:
        flags().error("got --device cpu, expected --tiny with it: the real shapes would take hours")
    if find_spec("grpo_fn") is None:  # not installed: the clone itself
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
        )
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():  # as tools/launch sets it
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    command, outcomes, page = shlex.join(["python", "tools/device_check", *argv]), [], ""
    with tempfile.TemporaryDirectory(prefix="device_check-") as folder:
        setting = Setting(device=args.device, tiny=args.tiny, scratch=folder)
        for number, outcome in enumerate(run([MACHINE, *chosen], setting, args.limit), 1):
            message = outcome.message or "; ".join(f"{figure.name} {text_of(figure)}" for figure in outcome.figures)
            head = f"[{number}/{1 + len(chosen)}] {outcome.check.name}: {outcome.state}, {outcome.seconds:.1f} s"
            print(f"{head}; {message}", flush=True)
            outcomes.append(outcome)
            page = "\n".join(lines(outcomes, command, args.tiny)) + "\n"
            if outcomes[0].state == FAILED:  # without the device there is nothing to do or to keep
                break
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(page)
    print(f"\n{page}", end="")
    return int(any(outcome.state == FAILED for outcome in outcomes))


def selected(names: str, part: str | None) -> list[Check]:
    """The checks of these names and this part, all without either. Ends the program for a name that there is not."""
    expected = [name for name in names.split(",") if name]
    if odd := {*expected} - {check.name for check in CHECKS}:
        flags().error(f"--only: got {', '.join(sorted(odd))}, expected some of {', '.join(c.name for c in CHECKS)}")
    return [check for check in CHECKS if (not expected or check.name in expected) and part in (None, check.part)]


# -- the page


def lines(outcomes: Sequence[Outcome], command: str, tiny: bool) -> Iterator[str]:
    """Device, date and command; a row for each figure; how many checks of each state."""
    machine, *checks = outcomes
    about = ", ".join(f"{figure.name} {figure.value}" for figure in machine.figures) or machine.message
    yield from ("# One device, measured", "", f"    {command}", "", f"{datetime.date.today()}; {about}.", "")
    if tiny:
        yield "**Toy shapes: the figures below mean nothing**, only that the checks pass does; goals are not judged."
        yield ""
    yield "| check | | figure | measured | goal | |"
    yield "|---|---|---|---|---|---|"
    for outcome in checks:
        first = (f"`{outcome.check.name}`", "**FAILED**" if outcome.state == FAILED else outcome.state)
        for cells in [row(figure, tiny) for figure in outcome.figures] or [
            (outcome.message.replace("|", "/"), "", "", "")
        ]:
            yield "| " + " | ".join((*first, *cells)) + " |"
            first = ("", "")
    yield ""
    count = [f"{sum(outcome.state == state for outcome in outcomes)} {state}" for state in (OK, FAILED, LEFT_OUT)]
    yield f"{', '.join(count)}; {sum(outcome.seconds for outcome in outcomes):.0f} s in checks."


def row(figure: Figure, tiny: bool) -> tuple[str, str, str, str]:
    """What it is, the value, the goal, and whether that is met."""
    goals = ((">=", figure.at_least), ("<=", figure.at_most))
    goal = ", ".join(f"{sign} {at:,g} {figure.unit}".strip() for sign, at in goals if at is not None)
    judgement = "" if tiny or figure.met is None else "met" if figure.met else "**missed**"
    return figure.name, text_of(figure), goal, judgement


def text_of(figure: Figure) -> str:
    """The value with its unit."""
    value = figure.value
    if not isinstance(value, str):
        value = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value} {figure.unit}".strip()
