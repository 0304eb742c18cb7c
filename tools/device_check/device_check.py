"""Everything that only a GPU can show, in commands of at most nine minutes: three for one card, one for two.

    python tools/device_check --part correctness --out experiments/device/RESULTS-correctness.md
    python tools/device_check --part speed --out experiments/device/RESULTS-speed.md
    python tools/device_check --part steps --out experiments/device/RESULTS-steps.md
    python tools/device_check --part cards --out experiments/device/RESULTS-cards.md      # two cards
    python tools/device_check --only NAME,...          # some checks alone; without either, all of them
    python tools/device_check --device cpu --tiny      # toy shapes: does the command work? Its figures mean nothing

Weights are random, in the shapes of Qwen2.5-0.5B and 1.5B, and are made here; nothing is downloaded and no tokenizer is
needed. It wants a GPU, for the last part two, and torch, transformers, tensorboard, einops, jaxtyping, safetensors and,
for the check of adapters, peft. gin-config and math-verify are not needed. Where a pure package is missing and nothing
can be fetched, carry its wheel:

    pip download --no-deps -d wheels jaxtyping wadler-lindig peft         # where there is a network
    pip install --no-index --no-deps --find-links wheels jaxtyping wadler-lindig peft
    pip install --no-index --no-deps --find-links wheels trl datasets     # for the comparison with TRL, and their needs

Each check has a deadline; one that fails, hangs or runs out of memory is reported and the others go on in a fresh
process; one that had no time to begin is left out. The exit code is 1 when a check failed. A goal that is missed is
marked and is no failure.
"""

import argparse
import datetime
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from device_runner import FAILED, LEFT_OUT, OK, Check, Figure, Outcome, Setting, apart

MACHINE = Check(name="machine", what="the device and the versions", where="device_parts:machine", deadline=60)
CHECKS = [
    Check(
        name="prng",
        part="correctness",
        what="keys and draws are those of the CPU, bit for bit, and of torch's own Philox",
        where="device_prng:randomness",
        deadline=60,
    ),
    Check(
        name="gradients",
        part="correctness",
        what="the objective's gradients against the functional oracle on the CPU, in float32 and bfloat16",
        where="device_exact:gradients",
        deadline=60,
    ),
    Check(
        name="rows",
        part="correctness",
        what="rows end to end, and prompts read once, against padded rows",
        where="device_exact:rows",
        deadline=60,
    ),
    Check(
        name="head",
        part="correctness",
        what="log-probs chunk by chunk against dense ones: values, gradients, memory",
        where="device_exact:head",
        deadline=60,
    ),
    Check(
        name="decode",
        part="correctness",
        what="sampled tokens and log-probs against a forward pass without a cache; the same key again",
        where="device_decode:exact",
        deadline=90,
    ),
    Check(
        name="fp16",
        part="correctness",
        what="float16 with dynamic loss scaling makes a step",
        where="device_exact:float16",
        deadline=60,
    ),
    Check(
        name="offload",
        part="correctness",
        what="weights, gradients and moments on the host: the same step",
        where="device_exact:offload",
        deadline=60,
    ),
    Check(
        name="compiled",
        part="correctness",
        what="compiled blocks against eager ones",
        where="device_exact:compiled",
        deadline=120,
        only_cuda="on a CPU tests/shell/model/test_blocks.py looks at it",
    ),
    Check(
        name="train-0.5b",
        part="speed",
        what="training, 0.5B, rows of 1,152 tokens",
        where="device_speed:train_half",
        deadline=90,
    ),
    Check(
        name="train-1.5b",
        part="speed",
        what="training, 1.5B, rows of 1,152 tokens",
        where="device_speed:train_large",
        deadline=120,
    ),
    Check(
        name="train-1.5b-compiled",
        part="speed",
        what="the same with compiled blocks",
        where="device_speed:train_large_compiled",
        deadline=150,
        only_cuda="compiling for a CPU says nothing about it",
    ),
    Check(
        name="decode-0.5b",
        part="speed",
        what="sampling 256 rows, 0.5B, and transformers' generate on the same prompts",
        where="device_decode:speed_half",
        deadline=120,
    ),
    Check(
        name="decode-1.5b",
        part="speed",
        what="the same, 1.5B",
        where="device_decode:speed_large",
        deadline=120,
    ),
    Check(
        name="step",
        part="steps",
        what="whole GRPO steps, 0.5B, 32 prompts x 16 samples x 512 tokens: phases and their memory",
        where="device_step:grpo",
        deadline=180,  # its first step compiles the blocks: a minute more, as `compiled` has beside `gradients`
    ),
    Check(
        name="memory",
        part="steps",
        what="1.5B with LoRA inside a hard cap of 8 GB, whole GRPO steps",
        where="device_memory:capped",
        deadline=120,
        alone=True,
    ),
    Check(
        name="continuous",
        part="steps",
        what="the same prompts in transformers' continuous batching, 0.5B",
        where="device_decode:continuous",
        deadline=90,
        only_cuda="on a CPU it takes minutes",
        alone=True,
    ),
    Check(
        name="trl",
        part="steps",
        what="TRL's GRPOTrainer with transformers' generation on the work of `step`",
        where="device_trl:steps",
        deadline=240,
        alone=True,
    ),
    Check(
        name="vllm",
        part="steps",
        what="vLLM in the process: pushes verified and probed, sleep frees memory",
        where="device_vllm:colocated",
        deadline=240,
        only_cuda="tests/vllm has what a CPU can show",
        alone=True,
    ),
    Check(
        name="decode-vllm",
        part="steps",
        what="the prompts of `decode-0.5b` in vLLM",
        where="device_vllm:speed",
        deadline=240,
        only_cuda="its kernels for a CPU say nothing about it",
        alone=True,
    ),
    Check(
        name="cards",
        part="cards",
        what="two ranks: gradients against the oracle, the rows of a step against one rank's, rates",
        where="device_cards:together",
        deadline=180,
        alone=True,
    ),
    Check(
        name="cards-stopped",
        part="cards",
        what="a rank that stands still: the other leaves with its step and phase, in groups of a mesh",
        where="device_cards:stopped",
        deadline=120,
    ),
    Check(
        name="cards-gone",
        part="cards",
        what="a rank whose process ends: the other leaves with a documented code",
        where="device_cards:gone",
        deadline=120,
    ),
]

PARTS = ("correctness", "speed", "steps", "cards")

Runner = Callable[[Sequence[Check], Setting, float], Iterator[Outcome]]


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--part", choices=PARTS, help="the checks of one command of nine minutes")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these checks alone")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument(
        "--limit", type=float, default=520.0, metavar="S", help="begin no check after that (default 520)"
    )
    return parser


def main(argv: Sequence[str] | None = None, *, run: Runner = apart) -> int:
    """Do the checks, print a line for each as it ends, then the table. 1 when one failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = flags().parse_args(argv)
    chosen = selected(args.only, args.part)
    if args.list:
        print(*(f"{check.name:<20} {check.what}" for check in chosen), sep="\n")
        return 0
    if args.device == "cpu" and not args.tiny:
        flags().error("got --device cpu, wanted --tiny with it: the real shapes would take hours")
    if find_spec("grpo_fn") is None:  # not installed: the clone itself
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():  # as tools/launch sets it
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with scratch() as folder:
        setting = Setting(device=args.device, tiny=args.tiny, scratch=folder)
        outcomes = list(announced(run([MACHINE, *chosen], setting, args.limit), 1 + len(chosen)))
    command = shlex.join(["python", "tools/device_check", *argv])
    text = "\n".join([*heading(outcomes[0], command, args.tiny), *table(outcomes[1:], args.tiny), *errors(outcomes)])
    print(f"\n{text}")
    if args.out is not None and outcomes[0].state != FAILED:  # without the device there is nothing to keep
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"{text}\n")
    return int(any(outcome.state == FAILED for outcome in outcomes))


def selected(names: str, part: str | None) -> list[Check]:
    """The checks of these names and this part, all without either. Ends the program for a name that there is not."""
    wanted = [name for name in names.split(",") if name]
    if odd := {*wanted} - {check.name for check in CHECKS}:
        flags().error(f"--only: got {', '.join(sorted(odd))}, wanted some of {', '.join(c.name for c in CHECKS)}")
    return [check for check in CHECKS if (not wanted or check.name in wanted) and part in (None, check.part)]


@contextmanager
def scratch() -> Iterator[str]:
    """A folder for models, in the host's memory where there is space; gone afterwards."""
    memory = Path("/dev/shm")
    spacious = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**34
    with tempfile.TemporaryDirectory(prefix="device_check-", dir=memory if spacious else None) as folder:
        yield folder


def announced(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """A line for each as it comes. What follows a machine that is not there is not waited for."""
    for number, outcome in enumerate(outcomes, 1):
        figures = "; ".join(f"{figure.what} {shown(figure)}" for figure in outcome.figures)
        said = outcome.said or figures
        print(f"[{number}/{total}] {outcome.check.name}: {outcome.state}, {outcome.seconds:.1f} s; {said}", flush=True)
        yield outcome
        if outcome.check == MACHINE and outcome.state == FAILED:
            return


# -- the table


def heading(machine: Outcome, command: str, tiny: bool) -> Iterator[str]:
    """What it was measured on, when, and by which command."""
    yield "# One device, measured"
    yield ""
    yield f"    {command}"
    yield ""
    about = ", ".join(f"{figure.what} {figure.value}" for figure in machine.figures) or machine.said
    yield f"{datetime.date.today()}; {about}."
    if tiny:
        yield ""
        yield "**Toy shapes: the figures below mean nothing**, only that the checks pass does; goals are not judged."
    yield ""


def table(outcomes: Sequence[Outcome], tiny: bool) -> Iterator[str]:
    """A row for each figure; a check without any has one row."""
    yield "| check | | figure | measured | goal | |"
    yield "|---|---|---|---|---|---|"
    for outcome in outcomes:
        state = {OK: "ok", FAILED: "**FAILED**", LEFT_OUT: "left out"}[outcome.state]
        rows = [(figure.what, shown(figure), goal(figure), judged(figure, tiny)) for figure in outcome.figures]
        for n, cells in enumerate(rows or [(outcome.said.replace("|", "/"), "", "", "")]):
            first = (f"`{outcome.check.name}`", state) if n == 0 else ("", "")
            yield "| " + " | ".join((*first, *cells)) + " |"


def errors(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How many of each, and the time of all."""
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in (OK, FAILED, LEFT_OUT)}
    yield ""
    yield (
        ", ".join(f"{n} {state}" for state, n in count.items())
        + f"; {sum(outcome.seconds for outcome in outcomes):.0f} s in checks."
    )


def shown(figure: Figure) -> str:
    """The value with its unit."""
    value = figure.value
    if not isinstance(value, str):
        value = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value} {figure.unit}".strip()


def goal(figure: Figure) -> str:
    """What is wished for."""
    parts = ((">=", figure.at_least), ("<=", figure.at_most))
    return ", ".join(f"{sign} {at:,g} {figure.unit}".strip() for sign, at in parts if at is not None)


def judged(figure: Figure, tiny: bool) -> str:
    """Whether the goal is met."""
    return "" if tiny or figure.met is None else "met" if figure.met else "**missed**"
