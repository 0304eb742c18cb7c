"""Gradients of TRL's GRPOTrainer against ours, for every configuration of compare_trl.yaml, and the table of it.

python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out experiments/trl_conformance/README.md

TRL runs in an environment of its own (tools/bench/trl.requirements.txt): its own trainer, from data loader to backward,
on given samples, a model of a few thousand parameters in float64. Each of its optimizer steps on one rollout is
compared with what tools/import_config makes of the same configuration, parameter by parameter. A configuration is
`equal`; `refused` by the importer; `named`, where the gradient differs and a note of the importer says what of the loss
is another here; or `silent`. Exit codes: 0 none is silent, 1 one is, 2 bad input.
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
from compare_trl_ours import BASE, CASES, Case, distance, gradients, imported, samples
from import_trl import from_trl
from importer import Draft

BOUND = 1e-5  # |ours - TRL's| / |TRL's| of a gradient: TRL's advantages and the model's norms are float32
DEADLINE = 3600.0  # seconds for TRL's side
OUTCOMES = {
    "equal": "the same gradient, as imported",
    "named": "another gradient, and the importer says what of the loss is another here",
    "refused": "the importer says why it cannot carry it",
    "refused there": "TRL itself refuses it",
    "silent": "another gradient that no note accounts for",
}
NOTES = {  # differences of the loss, and the words of the note that says so
    "own rows": "shuffles completions into its minibatches",
    "split groups": "would split groups",
    "unscored rows": "a row whose reward is None",
    "windows": "divides by the tokens of each optimizer step here",
    "device means": "bnpo is the mean over each device's own tokens",
    "batch std": "the std of each generation batch there",
    "row KL": "a KL is weighed with its row's ratio there",
    "entropy means": "entropy_coef: a mean over the tokens of each micro-batch there",
    "adaptive entropy": "objective.adaptive_entropy holds the entropy at a target",
    "entropy quantile": "there is no mask by entropy",
    "normalised parts": "the reward functions are not in this file",
    "row products": "bounds exp of the sum of a row's log-ratios there",
    "lower bound": "a small weight stays small",
    "vespo weights": "vespo: a row's weight is to the sampler here",
}


class Result(NamedTuple):
    """How a configuration came out."""

    name: str
    outcome: str  # of OUTCOMES
    said: str  # what was refused or named
    apart: float | None = None  # of the gradients


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
        print(f"error: --trl_python: got {args.trl_python}, expected the python of TRL's environment", file=sys.stderr)
        return 2
    if not cases:
        print(f"error: --only: got {args.only!r}, expected text of a configuration's name", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # a model of a few thousand parameters
    drafts = [(case, draft_of(case.config)) for case in cases]
    with tempfile.TemporaryDirectory() as name:
        model, shared = samples(Path(name))
        imports = [case for case, draft in drafts if isinstance(draft, Draft)]
        theirs, versions = trl_gradients(args.trl_python, imports, shared, Path(name))
        results = [judged(c, draft, theirs.get(c.name), shared, model, Path(name)) for c, draft in drafts]
    page = "\n".join(written(results, versions)) + "\n"
    if args.out is None:
        sys.stdout.write(page)
    else:
        args.out.write_text(page, encoding="utf-8")
    silent = [result for result in results if result.outcome == "silent"]
    for result in silent:
        print(f"silent: {result.name}: {result.apart:.1e}", file=sys.stderr)
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
    made, updates = imported(case, draft, shared, model, folder), theirs["updates"]
    if len(updates) == made.updates:
        pairs = zip(gradients(made, updates), updates, strict=True)
        apart = max(distance(grads, update["grads"]) for grads, update in pairs)
    else:
        apart = float("inf")  # another number of optimizer steps: no gradient to compare
    said = named(case, draft)
    if apart <= BOUND:
        return Result(case.name, "equal", "", apart)
    return Result(case.name, "named" if said else "silent", ", ".join(said), apart)


def named(case: Case, draft: Draft) -> list[str]:
    """The differences of the loss that an import's notes name; the one about rewards of None where there are some."""
    text = "\n".join(draft.listed())
    return [name for name, words in NOTES.items() if words in text and (name != "unscored rows" or case.unscored)]


def written(results: Sequence[Result], versions: Mapping[str, str]) -> Iterator[str]:
    """The page's lines."""
    sizes = [result.apart for result in results if result.apart]
    same, other = [size for size in sizes if size <= BOUND], [size for size in sizes if size > BOUND]
    outcomes = [result.outcome for result in results]
    notes = [name for result in results if result.outcome == "named" for name in result.said.split(", ")]
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
    yield "\nWhat was named, and in how many configurations whose gradient differs:\n"
    yield "| named | configurations | words of the importer |\n|---|---|---|"
    yield from (f"| {name} | {notes.count(name)} | {words} |" for name, words in NOTES.items())
    yield f"\nThe base: {', '.join(f'`{key}={value!r}`' for key, value in BASE.items())}.\n"
    yield "| configuration: what differs from the base | outcome | apart | what was named or refused |"
    yield "|---|---|---|---|"
    for name, outcome, said, apart in results:
        yield f"| {name} | {outcome} | {figure(apart)} | {said.replace('|', ' ')} |"


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value < float("inf") else "other updates"


HEAD = """# TRL's own loss against ours, configuration by configuration

**Claim.** What `tools/import_config` makes of a GRPOConfig of TRL 1.16 has the gradient of TRL's
GRPOTrainer, or the importer refuses it, or says what differs. None differs silently.

A rollout's samples, rewards and log-probs are given; TRL's trainer makes all of its optimizer steps on it.
Before each one, its parameters and gradients are taken, and ours is computed at the same parameters. Where the
two differ, a note of the import has to name something of the loss that is another here. At commit 2846b5d each of the
84 named gradients became equal when TRL's form of what is named was put in the place of ours.

**Command.** `python tools/import_config/compare_trl.py --trl_python .venv-trl/bin/python --out \
experiments/trl_conformance/README.md`,
which writes this page; TRL's environment is made from tools/bench/trl.requirements.txt.

"""

if __name__ == "__main__":
    sys.exit(main())
