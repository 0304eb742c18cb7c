"""Two or more configurations from the same start, with the same problems, order and random numbers, step by step.

grpo_fn pair A.gin B.gin [C.gin ...] --gin_file run/arithmetic.gin --seeds 0 1 2 --out DIR
grpo_fn pair --report --out DIR

Every arm is the files of --gin_file with one file of its own on top; the first is what the others are compared with.
An arm and a seed are a run folder, DIR/trials/ARM-seed_S, made by `python -m grpo_fn.run`. The same command again keeps
what is done and resumes the rest; more seeds or arms widen it. DIR/paired.jsonl has a line for each arm, metric and
step: the mean difference, its 95 % interval over the seeds, and how many unpaired seeds a paired one is worth;
DIR/table.md shows them.

Exit codes: 0 all done, 1 some run failed, 2 bad input, 75 stopped by SIGTERM or SIGINT, passed to every run.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from grpo_fn.command_line import CommandParser, exit_code, run_words
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
    read_spec,
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


def flags() -> CommandParser:
    """The command line."""
    parser = trial_parser("grpo_fn.lab.pair", __doc__, positional=False)
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
    args = flags().parse_args(argv)
    return exit_code(partial(pair, args), interrupted="interrupted", quiet=args.quiet)


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
        stopped = TrialRunner(args, pairing.trials(), pairing.flags).work()
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
        """The bindings for the runs of a seed."""
        return [*self.gin_params, f"{self.seed_knob}={seed}"]

    def flags(self, trial: Trial) -> list[str]:
        """The flags of `python -m grpo_fn.run` for a run."""
        return run_words([*self.gin_files, self.arms[trial.values["arm"]]], self.bindings(trial.values["seed"]))

    def trials(self) -> list[Trial]:
        """All runs; every arm of a seed before the next seed, so that what is done can be compared."""
        return [Trial(f"{arm}-seed_{seed}", {"arm": arm, "seed": seed}) for seed in self.seeds for arm in self.arms]


def pairing_of_flags(args: argparse.Namespace) -> Pairing:
    """The comparison of the command line. Raises ValueError for arms that cannot be compared."""
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
    """The comparison of a folder. Raises OSError or ValueError for another folder."""
    return read_spec(out / SPEC, lambda spec: Pairing(**spec))


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


RunMetrics = Mapping[int, Mapping[str, Any]]  # step -> metric


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


def compare_arms(out: Path, pairing: Pairing, metrics: Sequence[str]) -> PairResults:
    """Every arm against the first, by step. Raises ValueError where there is nothing to compare."""
    trials = pairing.trials()
    paths = {
        (trial.values["arm"], trial.values["seed"]): trial_path(out, trial) for trial in trials if is_done(out, trial)
    }
    first, *others = pairing.arms
    pairs = {
        arm: [
            (paths[first, seed], paths[arm, seed])
            for seed in pairing.seeds
            if (first, seed) in paths and (arm, seed) in paths
        ]
        for arm in others
    }
    if not any(pairs.values()):
        raise ValueError(
            f"got {len(paths)} finished runs of {len(trials)}, none of which is the partner of one of {first}; "
            f"the others are in {out / 'trials'}, each with what it printed in NAME.out"
        )
    done = {path: metrics_by_step(path, torn_end=False) for path in paths.values()}
    rows = [
        row
        for metric in metrics
        for arm in others
        for row in arm_differences(arm, metric, [(done[base], done[other]) for base, other in pairs[arm]])
    ]
    if absent := [metric for metric in metrics if metric not in {row.metric for row in rows}]:
        raise ValueError(f"--metric: got {', '.join(absent)}, which no finished pair of runs has, expected a metric")
    sampled = {(arm, step): share for arm in others for step, share in same_samples(pairs[arm]).items()}
    return PairResults(rows, sampled, [trial for trial in trials if trial_path(out, trial) not in done])


def arm_differences(arm: str, metric: str, pairs: Sequence[tuple[RunMetrics, RunMetrics]]) -> list[ArmDifference]:
    """An arm against the first one at every step that some pair of runs, (first, arm), has."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for base, other in pairs:
        for step in sorted(base.keys() & other.keys()):
            values = base[step].get(metric), other[step].get(metric)
            if None not in values:  # null is what was not finite
                by_step.setdefault(step, []).append(values)
    return [
        ArmDifference(arm, metric, step, paired_difference(*zip(*by_step[step], strict=True)))
        for step in sorted(by_step)
    ]


def same_samples(pairs: Sequence[tuple[Path, Path]]) -> dict[int, float]:
    """By step, the share of samples that are alike in both runs, of the pairs whose rollouts are kept in both."""
    from grpo_fn.shell.logging import rollout_store

    shares: dict[int, list[float]] = {}
    for pair in pairs:
        roots = [path / "rollouts" for path in pair]
        for step in sorted(set.intersection(*({*rollout_store.rollout_steps(root)} for root in roots))):
            base, other = (  # (problem, sample) -> the tokens of prompt and completion
                {(row["uid"], row["g"]): row["tokens"] for row in rollout_store.load_rows(file)}
                for file in (root / f"step_{step:06d}.jsonl.gz" for root in roots)
            )
            same = sum(other.get(key) == tokens for key, tokens in base.items())
            shares.setdefault(step, []).append(same / max(len(base), len(other)))
    return {step: fmean(values) for step, values in sorted(shares.items())}


# -- as tables


def write_tables(out: Path, pairing: Pairing, results: PairResults) -> str:
    """Write paired.jsonl and table.md; returns what a terminal shows."""
    lines: list[dict[str, Any]] = []
    for arm, metric, step, paired in results.rows:
        figures = {name: value if math.isfinite(value) else None for name, value in paired._asdict().items()}
        lines.append({"arm": arm, "to": pairing.first, "metric": metric, "step": step, **figures})
    for (arm, step), share in results.sampled.items():
        lines.append({"arm": arm, "metric": "same_samples", "step": step, "share": share})
    write_bytes(out / "paired.jsonl", "".join(to_json(line) + "\n" for line in lines).encode())
    tables = [(heading, cells) for heading, cells in pair_tables(results) if cells]
    outputs = [trial_path(out, trial, ".out") for trial in results.missing]
    rest = [f"- not finished: {path.stem}" + f", see {path}" * path.exists() for path in outputs]
    ends = ["\n".join(rest)] if rest else []
    title = f"# {', '.join(pairing.arms)}: paired differences to {pairing.first}"
    sections = [f"## {heading}\n\n{table_markdown(cells)}" for heading, cells in tables]
    write_bytes(out / "table.md", ("\n\n".join([title, INTERVALS, *sections, *ends]) + "\n").encode())
    shown = [f"{heading}\n\n{plain_table(cells)}" for heading, cells in tables]
    return "\n\n".join([*shown, *ends, f"written to {out / 'table.md'}"])


def pair_tables(results: PairResults) -> list[tuple[str, list[dict[str, str]]]]:
    """Heading and rows of each table: for every metric the last step, and the worth by step; then equal samples."""
    tables = []
    for metric in dict.fromkeys(row.metric for row in results.rows):
        paired = {(row.arm, row.step): row.paired for row in results.rows if row.metric == metric}
        last = dict(paired.keys())  # arm -> its last step: the steps ascend
        ends = [{"arm": arm, "step": str(step), **paired_cells(paired[arm, step])} for arm, step in last.items()]
        tables.append((f"{metric} at the last step", ends))
        if len({step for _, step in paired}) > 1:
            differences = {key: difference_cell(figures) for key, figures in paired.items()}
            worths = {key: paired_cells(figures)["worth"] for key, figures in paired.items()}
            tables.append((f"{metric}: difference by step", cells_by_step(differences)))
            tables.append((f"{metric}: worth by step", cells_by_step(worths)))
    shares = {key: three_digits(share) for key, share in results.sampled.items()}
    return [*tables, (f"same samples by step. {SAMPLED}", cells_by_step(shares))]


def difference_cell(paired: PairedDifference) -> str:
    """The difference, with half the width of its interval."""
    return f"{paired.difference:+.3g}" + f" ± {paired.high - paired.difference:.2g}" * (paired.n > 1)


def cells_by_step(cells: Mapping[tuple[str, int], str]) -> list[dict[str, str]]:
    """(arm, step) -> text, as a line for each arm and a column for each of some steps."""
    steps = spread_steps({step for _, step in cells})
    return [
        {"arm": arm, **{f"step {step}": cells.get((arm, step), "-") for step in steps}}
        for arm in dict.fromkeys(arm for arm, _ in cells)
    ]


def spread_steps(steps: set[int]) -> list[int]:
    """At most SHOWN_STEPS of the steps, evenly, the first and the last among them."""
    every = sorted(steps)
    if len(every) <= SHOWN_STEPS:
        return every
    return [every[round(i * (len(every) - 1) / (SHOWN_STEPS - 1))] for i in range(SHOWN_STEPS)]


if __name__ == "__main__":
    sys.exit(main())
