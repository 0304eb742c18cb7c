"""Gradients of TRL's GRPOTrainer against ours, for every configuration of compare_trl_cases.py, and the table of it.

python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out experiments/trl_conformance/README.md

TRL runs in an environment of its own (tools/bench/trl.requirements.txt): its own trainer, from data loader to backward,
on given samples, a model of a few thousand parameters in float64. Each of its optimizer steps on one rollout is
compared with what tools/import_config makes of the same configuration, parameter by parameter. A configuration is
`equal`; `refused` by the importer; `named`, where the gradient differs, a note of the importer says so, and TRL's form
of what the note names makes it equal; or `silent`. Exit codes: 0 none is silent, 1 one is, 2 bad input.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compare_trl_cases import BASE, CASES, Case
from compare_trl_ours import REPAIRS, called_for, distance, gradients, imported, samples
from import_draft import Draft
from import_trl import from_trl

BOUND = 1e-5  # |ours - TRL's| / |TRL's| of a gradient: TRL's advantages and the model's norms are float32
DEADLINE = 3600.0  # seconds for TRL's side
OUTCOMES = {
    "equal": "the same gradient, as imported",
    "named": "another gradient; the importer says so, and TRL's form of what it names makes it equal",
    "refused": "the importer says why it cannot carry it",
    "refused there": "TRL itself refuses it",
    "silent": "another gradient that no note accounts for",
}


class Result(NamedTuple):
    """How a configuration came out."""

    name: str
    outcome: str  # of OUTCOMES
    said: str  # what was refused or named
    apart: float | None = None  # of the gradients, as imported
    left: float | None = None  # with the named differences undone


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl_python", type=Path, required=True, metavar="FILE", help="python of TRL's environment")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name has this text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes (default: standard output)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the page; returns the exit code."""
    args = flags().parse_args(argv)
    cases = [case for case in CASES if args.only in case.name]
    if not args.trl_python.exists():
        print(f"error: --trl_python: got {args.trl_python}, wanted the python of TRL's environment", file=sys.stderr)
        return 2
    if not cases:
        print(f"error: --only: got {args.only!r}, wanted text of a configuration's name", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # a model of a few thousand parameters
    drafts = [draft_of(case.config) for case in cases]
    with tempfile.TemporaryDirectory() as name:
        model, shared = samples(Path(name))
        imports = [case for case, draft in zip(cases, drafts, strict=True) if isinstance(draft, Draft)]
        theirs, versions = trl_gradients(args.trl_python, imports, shared, Path(name))
        results = [
            judged(case, draft, theirs.get(case.name), shared, model, Path(name))
            for case, draft in zip(cases, drafts, strict=True)
        ]
    page = "\n".join(written(results, versions))
    if args.out is None:
        print(page)
    else:
        args.out.write_text(page + "\n", encoding="utf-8")
    silent = [result for result in results if result.outcome == "silent"]
    for result in silent:
        print(f"silent: {result.name}: {result.apart:.1e}, {result.left:.1e}; {result.said}", file=sys.stderr)
    return 1 if silent else 0


def steps_of(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration, ending when one rollout has been learned from."""
    device, accumulate = config["per_device_train_batch_size"], config["gradient_accumulation_steps"]
    rows = config.get("generation_batch_size", device * config.get("steps_per_generation", accumulate))
    return config | {"max_steps": max(1, rows // (device * accumulate)) * config.get("num_iterations", 1)}


def draft_of(config: dict[str, Any]) -> Draft | str:
    """What the importer makes of it, or why it refuses."""
    try:
        return from_trl(steps_of(config), 1, None)
    except ValueError as error:
        return str(error)


def trl_gradients(
    trl_python: Path, cases: Sequence[Case], shared: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """What TRL's side has of each configuration, by its name, and the versions there."""
    work = [{"config": steps_of(case.config), "unscored": case.unscored} for case in cases]
    torch.save(shared | {"cases": work}, folder / "work.pt")
    side = Path(__file__).with_name("compare_trl_side.py")
    command = [str(part) for part in (trl_python, side, folder / "work.pt", folder / "out.pt")]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE, check=False
    )
    if done.returncode:
        raise SystemExit(f"TRL's side ended with {done.returncode}: {done.stdout[-2000:]}")
    made = torch.load(folder / "out.pt", weights_only=False)
    return dict(zip((case.name for case in cases), made["cases"], strict=True)), made["versions"]


def judged(case: Case, draft: Draft | str, theirs: Any, shared: dict[str, Any], model: Any, folder: Path) -> Result:
    """How a configuration comes out."""
    if isinstance(draft, str):
        return Result(case.name, "refused", draft)
    if "error" in theirs:
        return Result(case.name, "refused there", theirs["error"])
    made, repairs, updates = imported(case, draft, shared, model, folder), called_for(draft), theirs["updates"]

    def furthest(chosen: set[str]) -> float:
        pairs = zip(gradients(made, updates, chosen), updates, strict=True)
        return max(distance(grads, update["grads"]) for grads, update in pairs)

    split = len(updates) != made.updates  # another number of optimizer steps: no gradient to compare as imported
    apart = float("inf") if split else furthest(set())
    if apart <= BOUND:
        return Result(case.name, "equal", "", apart)
    left = furthest(repairs)
    named = left <= BOUND and (not split or "split groups" in repairs)
    acting = {name for name in repairs if not named or furthest(repairs - {name}) > BOUND}
    acting |= {"split groups"} & repairs
    return Result(case.name, "named" if named else "silent", ", ".join(sorted(acting)), apart, left)


def written(results: Sequence[Result], versions: Mapping[str, str]) -> Iterator[str]:
    """The page's lines."""
    sizes = [size for result in results for size in (result.apart, result.left) if size]
    same, other = [size for size in sizes if size <= BOUND], [size for size in sizes if size > BOUND]
    outcomes = [result.outcome for result in results]
    acting = [name for result in results if result.outcome in ("named", "silent") for name in result.said.split(", ")]
    yield HEAD + (
        f"**Result.** {datetime.now(UTC):%Y-%m-%d}; TRL's side: "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}; ours: torch {version('torch')}, "
        f"transformers {version('transformers')}; CPU, float64. "
        f"{len(results)} configurations. A gradient counts as equal within {BOUND:g} of its norm, since TRL's "
        "advantages and the model's norms are float32: those that are equal are at most "
        f"{max(same, default=0.0):.1e} apart, those that are not at least {min(other, default=float('inf')):.1e}.\n"
    )
    yield "| outcome | configurations | what it is |\n|---|---|---|"
    yield from (f"| {kind} | {outcomes.count(kind)} | {what} |" for kind, what in OUTCOMES.items())
    yield "\nWhat was named, and in how many configurations TRL's form of it was needed for an equal gradient:\n"
    yield "| named | configurations | words of the importer |\n|---|---|---|"
    yield from (f"| {name} | {acting.count(name)} | {words} |" for name, words in REPAIRS.items())
    yield f"\nThe base: {', '.join(f'`{key}={value!r}`' for key, value in BASE.items())}.\n"
    yield "| configuration: what differs from the base | outcome | apart | named undone | what was named or refused |"
    yield "|---|---|---|---|---|"
    for name, outcome, said, apart, left in results:
        yield f"| {name} | {outcome} | {figure(apart)} | {figure(left)} | {said.replace('|', ' ')} |"


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value < float("inf") else "other updates"


HEAD = """# TRL's own loss against ours, configuration by configuration

**Claim.** What `tools/import_config` makes of a GRPOConfig of TRL 1.16 has the gradient of TRL's
GRPOTrainer, or the importer refuses it, or says what differs. None differs silently.

A rollout's samples, rewards and log-probs are given; TRL's trainer makes all of its optimizer steps on it.
Before each one, its parameters and gradients are taken, and ours is computed at the same parameters. Where the
two differ, TRL's form of each part that a note of the import names is put in the place of ours: only if that
makes them equal is the difference a named one.

**Command.** `python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out \
experiments/trl_conformance/README.md`,
which writes this page; TRL's environment is made from tools/bench/trl.requirements.txt.

"""

if __name__ == "__main__":
    sys.exit(main())
