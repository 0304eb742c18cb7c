"""Two or more configurations from the same start, with the same problems, order and random numbers, step by step.

python -m grpo_fn.lab.pair A.gin B.gin [C.gin ...] --gin_file run/arithmetic.gin --seeds 0 1 2 --out DIR
python -m grpo_fn.lab.pair --report --out DIR

Every arm is the files of --gin_file with one file of its own on top; the first is what the others are compared with.
An arm and a seed are a run folder, DIR/trials/ARM-seed_S, made by `python -m grpo_fn.run`. The same command again keeps
what is done and resumes the rest; more seeds or arms widen it. DIR/paired.jsonl has a line for each arm, metric and
step: the mean difference, its 95 % interval over the seeds, and how many unpaired seeds a paired one is worth;
DIR/table.md shows them.

Exit codes: 0 all done, 1 some run failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, passed to every run.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fn.command_line import exit_code
from grpo_fn.config import Config, load_config, value_fingerprint
from grpo_fn.config.resolve import Node, full_name
from grpo_fn.core.json_lines import metrics_by_step
from grpo_fn.lab.paired import PairedDifference, paired_cells, paired_difference, three_digits
from grpo_fn.lab.trials import (
    STOPPED,
    Trial,
    TrialRunner,
    check_limits,
    is_done,
    open_trials,
    plain_table,
    print_trials,
    run_flags,
    table_markdown,
    trial_parser,
    trial_path,
)
from grpo_fn.shell.atomic_io import to_json, write_bytes, write_json

SPEC = "pair.json"  # where the folder says what it compares
METRICS = ("reward/mean", "eval/accuracy")
# Knobs of train.train, and of its sections, that have to be alike: with another value the arms share no problems, no
# order, no random numbers, or are measured otherwise. The seed is bound to each run.
ALIKE = ("model", "seed", "steps", "data", "episodes", "evaluation")
ALIKE_BELOW = {"algorithm": ("prompts",), "sampling": ("sampler", "token_sampler")}
SHOWN_STEPS = 8  # in a table for people
INTERVALS = (
    "Differences are means over the seeds that both arms have finished, with Student's 95 % interval of the paired "
    "differences. Worth is (Var first + Var arm) / Var difference: how many unpaired seeds of each arm one pair is as "
    "good as, with its 95 % interval for normal values; equal: no seed differs; inf: all seeds differ alike."
)
SAMPLED = (
    "Of the samples of both arms in a step, the share with the same problem, number and tokens; mean over the seeds."
)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = trial_parser("grpo_fn.lab.pair", __doc__)
    parser.add_argument("arms", nargs="*", metavar="ARM.gin", help="two or more; each goes by its file's name")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"], metavar="S", help="default 0 1 2")
    parser.add_argument(
        "--seed_knob",
        default="SEED",
        metavar="NAME",
        help="what a seed binds (default SEED); train.train.seed leaves the seed of a model that is made as it is",
    )
    parser.add_argument("--metric", action="append", default=[], help=f"repeatable (default {' '.join(METRICS)})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, compare; returns the exit code."""
    return exit_code(partial(pair, flags().parse_args(argv)), interrupted="interrupted")


def pair(args: argparse.Namespace) -> int:
    """Run what is missing, compare. Raises ValueError or OSError for bad input."""
    stopped = False
    if args.report:
        pairing = read_pairing(args.out)
    else:
        pairing = pairing_of_flags(args)
        check_alike(pairing)
        if args.dry_run:
            print_trials(args, pairing.trials(), pairing.flags)
            return 0
        pairing = open_pairing(args.out, pairing)
        stopped = TrialRunner(args.out, pairing.trials(), pairing.flags, jobs=args.jobs, timeout=args.timeout).work()
    try:
        results = compare_arms(args.out, pairing, args.metric or METRICS)
    except ValueError as error:
        if args.report:
            raise
        print(f"error: {error}", file=sys.stderr)  # of runs that failed, not of the input
        return 1
    print(write_tables(args.out, pairing, results))
    return STOPPED if stopped else int(bool(results.missing))


# -- which runs are compared: arms and seeds


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Arms and seeds of which every pair is a run."""

    arms: Mapping[str, str]  # name -> gin file; the first is the baseline
    gin_files: Sequence[str]
    gin_params: Sequence[str]
    seed_knob: str
    seeds: Sequence[str]

    @property
    def first(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.arms))

    def config(self, arm: str, seed: str) -> Config:
        """The configuration of a run, checked. Raises ValueError naming the arm."""
        try:
            return load_config([*self.gin_files, self.arms[arm]], self.bindings(seed))
        except ValueError as error:
            raise ValueError(f"arm {arm}, seed {seed}: {error}") from error

    def bindings(self, seed: str) -> list[str]:
        """What is bound for the runs of a seed."""
        return [*self.gin_params, f"{self.seed_knob}={seed}"]

    def flags(self, trial: Trial) -> list[str]:
        """The flags of `python -m grpo_fn.run` for a run."""
        return run_flags([*self.gin_files, self.arms[trial.values["arm"]]], self.bindings(trial.values["seed"]))

    def trials(self) -> list[Trial]:
        """All runs; every arm of a seed before the next seed, so that what is done can be compared."""
        return [arm_trial(arm, seed) for seed in self.seeds for arm in self.arms]


def arm_trial(arm: str, seed: str) -> Trial:
    """The run of an arm and a seed."""
    return Trial(f"{arm}-seed_{seed}", {"arm": arm, "seed": seed})


def pairing_of_flags(args: argparse.Namespace) -> Pairing:
    """What the command line describes. Raises ValueError for what cannot be compared."""
    if len(args.arms) < 2:
        raise ValueError(f"got {len(args.arms)} arms ({' '.join(args.arms)}), expected two gin files or more")
    arms = {Path(file).stem: file for file in args.arms}
    if len(arms) < len(args.arms):
        raise ValueError(f"got the arms {' '.join(args.arms)}, expected files with different names")
    check_limits(args)
    if len({*args.seeds}) < len(args.seeds) or not all(map(str.isdigit, args.seeds)):
        raise ValueError(f"--seeds: got {' '.join(args.seeds)}, expected whole numbers from 0, each once")
    return Pairing(
        arms=arms, gin_files=args.gin_file, gin_params=args.gin_param, seed_knob=args.seed_knob, seeds=args.seeds
    )


def read_pairing(out: Path) -> Pairing:
    """What a folder compares. Raises OSError or ValueError for one that is none."""
    return Pairing(**json.loads((out / SPEC).read_text(encoding="utf-8")))


def open_pairing(out: Path, pairing: Pairing) -> Pairing:
    """Make the folder, or widen one of the same files; all its arms and seeds.

    Raises ValueError when the folder is that of another comparison, or of something else.
    """
    if open_trials(out / SPEC):
        known = read_pairing(out)
        for name in ("gin_files", "gin_params", "seed_knob", "first"):
            if (got := getattr(pairing, name)) != getattr(known, name):
                raise ValueError(f"got {name} {got}, expected {getattr(known, name)}, with which {out} was begun")
        for arm, file in pairing.arms.items():
            if known.arms.get(arm, file) != file:
                raise ValueError(f"arm {arm}: got {file}, expected {known.arms[arm]}, with which {out} was begun")
        seeds = [*dict.fromkeys([*known.seeds, *pairing.seeds])]
        pairing = replace(pairing, arms={**known.arms, **pairing.arms}, seeds=seeds)
    write_json(out / SPEC, asdict(pairing))
    return pairing


# -- what the arms have in common


def check_alike(pairing: Pairing) -> None:
    """Raise ValueError, before anything starts, for an unknown name and for arms that cannot share random numbers."""
    first, *others = pairing.arms
    bases = {seed: pairing.config(first, seed) for seed in pairing.seeds}
    seeds: dict[Any, str] = {}
    for seed, base in bases.items():
        if (value := base.root.knobs["seed"]) in seeds:
            raise ValueError(
                f"--seed_knob: got {pairing.seed_knob}, with which seeds {seeds[value]} and {seed} are both "
                f"train.train.seed = {value}; expected a knob or macro that makes them differ"
            )
        seeds[value] = seed
    for seed in {pairing.seeds[0]: None, pairing.seeds[-1]: None}:  # an arm may bind the seed to one of them
        for arm in others:
            check_pair(first, bases[seed], arm, pairing.config(arm, seed), seed)


def check_pair(first: str, base: Config, arm: str, other: Config, seed: str) -> None:
    """Raise ValueError for an arm that differs from the first in what has to be alike."""
    knobs = {f"train.train.{name}": (base.root.knobs[name], other.root.knobs[name]) for name in ALIKE}
    for section, names in ALIKE_BELOW.items():
        a, b = base.root.knobs[section].knobs, other.root.knobs[section].knobs
        knobs |= {f"{section}.{name}": (a.get(name), b.get(name)) for name in names}
    for knob, (expected, got) in knobs.items():
        if value_fingerprint(got) != value_fingerprint(expected):
            where, a, b = first_unlike(knob, expected, got)
            raise ValueError(
                f"arm {arm}, seed {seed}: got {where} = {b}, expected {a} as in {first}: arms are compared that share "
                "model, problems, order and random numbers"
            )


def first_unlike(where: str, a: Any, b: Any) -> tuple[str, str, str]:
    """The first place at which two values differ, and what each has there."""
    if isinstance(a, Node) and isinstance(b, Node) and a.target is b.target:
        for name in sorted({*a.knobs, *b.knobs}):
            x, y = a.knobs.get(name), b.knobs.get(name)
            if value_fingerprint(x) != value_fingerprint(y):
                module = a.target.__module__.rpartition(".")[2]
                return first_unlike(f"{module}.{a.target.__name__}.{name}", x, y)
    return where, *(f"@{full_name(x.target)}" if isinstance(x, Node) else repr(x) for x in (a, b))


# -- differences to the first arm by step, with intervals over the seeds


class ArmDifference(NamedTuple):
    """An arm against the first one, by one metric at one step."""

    arm: str
    metric: str
    step: int
    paired: PairedDifference


class PairResults(NamedTuple):
    """All that the finished runs say."""

    rows: list[ArmDifference]
    sampled: dict[tuple[str, int], float]  # (arm, step) -> share of samples that are those of the first arm
    missing: list[Trial]  # runs that are not finished


RunMetrics = Mapping[tuple[str, str], Mapping[int, Mapping[str, Any]]]  # (arm, seed) -> step -> metric, of what is done


def compare_arms(out: Path, pairing: Pairing, metrics: Sequence[str]) -> PairResults:
    """Every arm against the first, by step. Raises ValueError where there is nothing to compare."""
    trials = {(trial.values["arm"], trial.values["seed"]): trial for trial in pairing.trials()}
    done = {
        key: metrics_by_step(trial_path(out, trial), torn_end=False)
        for key, trial in trials.items()
        if is_done(out, trial)
    }
    first, *others = pairing.arms
    if not any((first, seed) in done and (arm, seed) in done for arm in others for seed in pairing.seeds):
        raise ValueError(
            f"got {len(done)} finished runs of {len(trials)}, none of which is the partner of one of {first}; "
            f"the others are in {out / 'trials'}, each with what it printed in NAME.out"
        )
    rows = [row for metric in metrics for arm in others for row in arm_differences(pairing, done, arm, metric)]
    if absent := [metric for metric in metrics if metric not in {row.metric for row in rows}]:
        raise ValueError(f"--metric: got {', '.join(absent)}, which no finished pair of runs has, expected a metric")
    sampled = {(arm, step): share for arm in others for step, share in same_samples(out, pairing, done, arm).items()}
    return PairResults(rows, sampled, [trial for key, trial in trials.items() if key not in done])


def arm_differences(pairing: Pairing, done: RunMetrics, arm: str, metric: str) -> list[ArmDifference]:
    """An arm against the first one at every step that some seed has in both."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for seed in pairing.seeds:
        base, other = done.get((pairing.first, seed), {}), done.get((arm, seed), {})
        for step in sorted(base.keys() & other.keys()):
            values = base[step].get(metric), other[step].get(metric)
            if None not in values:  # null is what was not finite
                pairs.setdefault(step, []).append(values)
    return [
        ArmDifference(arm, metric, step, paired_difference(*zip(*pairs[step], strict=True))) for step in sorted(pairs)
    ]


def same_samples(out: Path, pairing: Pairing, done: RunMetrics, arm: str) -> dict[int, float]:
    """By step, the share of samples that are alike in both, of the seeds whose rollouts are kept in both."""
    from grpo_fn.shell.logging import rollout_store

    def samples(path: Path) -> dict[tuple[int, int], list[int]]:
        """(problem, sample) -> the tokens of prompt and completion, of a step's file."""
        return {(row["uid"], row["g"]): row["tokens"] for row in rollout_store.load_rows(path)}

    shares: dict[int, list[float]] = {}
    for seed in pairing.seeds:
        if (pairing.first, seed) not in done or (arm, seed) not in done:
            continue
        roots = [trial_path(out, arm_trial(name, seed)) / "rollouts" for name in (pairing.first, arm)]
        kept = [{*rollout_store.rollout_steps(root)} if root.is_dir() else set() for root in roots]
        for step in sorted(kept[0] & kept[1]):
            base, other = (samples(root / f"step_{step:06d}.jsonl.gz") for root in roots)
            same = sum(other.get(key) == tokens for key, tokens in base.items())
            shares.setdefault(step, []).append(same / max(len(base), len(other)))
    return {step: math.fsum(values) / len(values) for step, values in sorted(shares.items())}


# -- as tables


def write_tables(out: Path, pairing: Pairing, results: PairResults) -> str:
    """Write paired.jsonl and table.md; returns what a terminal shows."""
    lines = [difference_line(pairing, row) for row in results.rows]
    lines += [
        {"arm": arm, "metric": "same_samples", "step": step, "share": share}
        for (arm, step), share in results.sampled.items()
    ]
    write_bytes(out / "paired.jsonl", "".join(to_json(line) + "\n" for line in lines).encode())
    tables = [(heading, cells) for heading, cells in pair_tables(pairing, results) if cells]
    outputs = [trial_path(out, trial, ".out") for trial in results.missing]
    rest = [f"- not finished: {path.stem}" + f", see {path}" * path.exists() for path in outputs]
    ends = ["\n".join(rest)] if rest else []
    title = f"# {', '.join(pairing.arms)}: paired differences to {pairing.first}"
    sections = [f"## {heading}\n\n{table_markdown(cells)}" for heading, cells in tables]
    write_bytes(out / "table.md", ("\n\n".join([title, INTERVALS, *sections, *ends]) + "\n").encode())
    shown = [f"{heading}\n\n{plain_table(cells)}" for heading, cells in tables]
    return "\n\n".join([*shown, *ends, f"written to {out / 'table.md'}"])


def difference_line(pairing: Pairing, row: ArmDifference) -> dict[str, Any]:
    """A row as a line of paired.jsonl; null where a number is not finite."""
    figures = {name: value if math.isfinite(value) else None for name, value in row.paired._asdict().items()}
    return {"arm": row.arm, "to": pairing.first, "metric": row.metric, "step": row.step, **figures}


def pair_tables(pairing: Pairing, results: PairResults) -> list[tuple[str, list[dict[str, str]]]]:
    """Heading and rows of each table: for every metric the last step, and the worth by step; then equal samples."""
    tables = []
    for metric in dict.fromkeys(row.metric for row in results.rows):
        rows = [row for row in results.rows if row.metric == metric]
        last = {row.arm: row for row in rows}
        ends = [{"arm": row.arm, "step": str(row.step), **paired_cells(row.paired)} for row in last.values()]
        tables.append((f"{metric} at the last step", ends))
        if len({row.step for row in rows}) > 1:
            tables.append((f"{metric}: difference by step", cells_by_step(rows, difference_cell)))
            worth = cells_by_step(rows, lambda row: paired_cells(row.paired)["worth"])
            tables.append((f"{metric}: worth by step", worth))
    steps = spread_steps({step for _, step in results.sampled})
    shares = [
        {"arm": arm, **{f"step {step}": three_digits(results.sampled.get((arm, step), math.nan)) for step in steps}}
        for arm in dict.fromkeys(arm for arm, _ in results.sampled)
    ]
    return [*tables, (f"same samples by step. {SAMPLED}", shares)]


def cells_by_step(rows: Sequence[ArmDifference], cell: Callable[[ArmDifference], str]) -> list[dict[str, str]]:
    """A line for each arm, a column for each of some steps."""
    steps = spread_steps({row.step for row in rows})
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(row.arm, {"arm": row.arm, **{f"step {step}": "-" for step in steps}})
        if row.step in steps:
            lines[row.arm][f"step {row.step}"] = cell(row)
    return [*lines.values()]


def spread_steps(steps: set[int]) -> list[int]:
    """At most SHOWN_STEPS of the steps, evenly, the first and the last among them."""
    every = sorted(steps)
    if len(every) <= SHOWN_STEPS:
        return every
    return [every[round(i * (len(every) - 1) / (SHOWN_STEPS - 1))] for i in range(SHOWN_STEPS)]


def difference_cell(row: ArmDifference) -> str:
    """The difference, with half the width of its interval."""
    p = row.paired
    return f"{p.difference:+.3g} ± {p.high - p.difference:.2g}" if p.n > 1 else f"{p.difference:+.3g}"


if __name__ == "__main__":
    sys.exit(main())
