"""Which runs are compared: arms and seeds, what all of them must have in common, and the model that they begin with."""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sweep_spec import Trial, run_flags

from grpo_fn.config import Config, freeze, load_config, value_fingerprint
from grpo_fn.config.resolve import Node, full_name

# Knobs of train.train, and of its sections, that have to be alike: with another value the arms share no problems, no
# order, no random numbers, or are measured otherwise. The seed is bound to each run.
ALIKE = ("model", "seed", "steps", "data", "episodes", "evaluation")
ALIKE_BELOW = {"algorithm": ("prompts",), "sampling": ("sampler", "token_sampler")}


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Arms and seeds of which every pair is a run."""

    arms: Mapping[str, str]  # name -> gin file; the first is the baseline
    gin_files: Sequence[str]
    gin_params: Sequence[str]
    seed_knob: str
    seeds: Sequence[str]
    start: str | None  # what --start named
    starts: Mapping[str, str] = field(default_factory=dict)  # seed -> folder of the model that its runs begin with

    def files(self, arm: str) -> list[str]:
        """The gin files of an arm, in order."""
        return [*self.gin_files, self.arms[arm]]

    def bindings(self, seed: str) -> list[str]:
        """What is bound for the runs of a seed."""
        model = [f"train.train.model={self.starts[seed]!r}"] if seed in self.starts else []
        return [*self.gin_params, f"{self.seed_knob}={seed}", *model]

    def flags(self, one: Trial) -> list[str]:
        """The flags of `python -m grpo_fn.run` for a run."""
        return run_flags(self.files(one.values["arm"]), self.bindings(one.values["seed"]))


def trials(asked: Pairing) -> list[Trial]:
    """All runs; every arm of a seed before the next seed, so that what is done can be compared."""
    return [trial(arm, seed) for seed in asked.seeds for arm in asked.arms]


def trial(arm: str, seed: str) -> Trial:
    """The run of an arm and a seed."""
    return Trial(f"{arm}-seed_{seed}", {"arm": arm, "seed": seed})


def wanted(args: argparse.Namespace) -> Pairing:
    """What the command line asks for. Raises ValueError for what cannot be compared."""
    if len(args.arms) < 2:
        raise ValueError(f"got {len(args.arms)} arms ({' '.join(args.arms)}), wanted two gin files or more")
    names = [Path(file).stem for file in args.arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"got several arms called {', '.join(twice)}, wanted files with different names")
    if args.jobs < 1 or args.timeout <= 0:
        raise ValueError(f"--jobs, --timeout: got {args.jobs}, {args.timeout}, wanted above 0")
    if odd := [seed for seed in args.seeds if not seed.isdigit()]:
        raise ValueError(f"--seeds: got {' '.join(odd)}, wanted whole numbers from 0")
    if len({*args.seeds}) < len(args.seeds):
        raise ValueError(f"--seeds: got {' '.join(args.seeds)}, wanted each once")
    return Pairing(
        arms=dict(zip(names, args.arms, strict=True)),
        gin_files=args.gin_file,
        gin_params=args.gin_param,
        seed_knob=args.seed_knob,
        seeds=args.seeds,
        start=args.start,
    )


# -- what the arms have in common


def check_alike(asked: Pairing) -> None:
    """Raise ValueError, before anything starts, for an unknown name and for arms that cannot share random numbers."""
    first, *others = asked.arms
    bases = {seed: configuration(asked, first, seed) for seed in asked.seeds}
    values: dict[Any, str] = {}
    for seed, base in bases.items():
        if (value := base.root.knobs["seed"]) in values:
            raise ValueError(
                f"--seed_knob: got {asked.seed_knob}, with which seeds {values[value]} and {seed} are both "
                f"train.train.seed = {value}; wanted a knob or macro that makes them differ"
            )
        values[value] = seed
    for seed in {asked.seeds[0]: None, asked.seeds[-1]: None}:  # an arm may bind the seed to one of them
        for arm in others:
            check_pair(first, bases[seed], arm, configuration(asked, arm, seed), seed)


def check_pair(first: str, base: Config, arm: str, other: Config, seed: str) -> None:
    """Raise ValueError for an arm that differs from the first in what has to be alike."""
    for knob, (wanted_value, got) in compared_knobs(base, other).items():
        if value_fingerprint(got) != value_fingerprint(wanted_value):
            where, a, b = first_difference(knob, wanted_value, got)
            raise ValueError(
                f"arm {arm}, seed {seed}: got {where} = {b}, wanted {a} as in {first}: arms are compared that share "
                "model, problems, order and random numbers"
            )


def configuration(asked: Pairing, arm: str, seed: str) -> Config:
    """An arm's configuration, checked. Raises ValueError naming the arm."""
    try:
        return load_config(asked.files(arm), asked.bindings(seed))
    except ValueError as error:
        raise ValueError(f"arm {arm}, seed {seed}: {error}") from error


def compared_knobs(base: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The value of every knob that has to be alike, in both."""
    pairs = {f"train.train.{name}": (base.root.knobs[name], other.root.knobs[name]) for name in ALIKE}
    for section, names in ALIKE_BELOW.items():
        mine, theirs = base.root.knobs[section].knobs, other.root.knobs[section].knobs
        pairs |= {f"{section}.{name}": (mine.get(name), theirs.get(name)) for name in names}
    return pairs


def first_difference(where: str, a: Any, b: Any) -> tuple[str, str, str]:
    """The first place at which two values differ, and what each has there."""
    if isinstance(a, Node) and isinstance(b, Node) and a.target is b.target:
        for name in sorted({*a.knobs, *b.knobs}):
            mine, theirs = a.knobs.get(name), b.knobs.get(name)
            if value_fingerprint(mine) != value_fingerprint(theirs):
                module = a.target.__module__.rpartition(".")[2]
                return first_difference(f"{module}.{a.target.__name__}.{name}", mine, theirs)
    return where, *(f"@{full_name(x.target)}" if isinstance(x, Node) else repr(x) for x in (a, b))


# -- the folder


def spec(out: Path) -> Path:
    """Where the folder says what it is."""
    return out / "pair.json"


def stored(out: Path) -> Pairing:
    """What a folder compares. Raises OSError or ValueError for one that is none."""
    return Pairing(**json.loads(spec(out).read_text(encoding="utf-8")))


def entered(out: Path, asked: Pairing) -> Pairing:
    """Make the folder and the models that runs begin with, or widen a folder of the same files; all its arms and seeds.

    Raises ValueError when the folder is that of another comparison, or of something else.
    """
    from grpo_fn.shell.atomic_io import write_json

    if spec(out).exists():
        there = stored(out)
        for name in ("gin_files", "gin_params", "seed_knob", "start"):
            if (got := getattr(asked, name)) != getattr(there, name):
                raise ValueError(f"got {name} {got}, wanted {getattr(there, name)}, with which {out} was begun")
        if (first := next(iter(asked.arms))) != (begun := next(iter(there.arms))):
            raise ValueError(f"got {first} as the first arm, wanted {begun}, with which {out} was begun")
        if other := [name for name, file in asked.arms.items() if there.arms.get(name, file) != file]:
            raise ValueError(
                f"arm {other[0]}: got {asked.arms[other[0]]}, wanted {there.arms[other[0]]}, with which {out} was begun"
            )
        seeds = [*dict.fromkeys([*there.seeds, *asked.seeds])]
        asked = replace(asked, arms={**there.arms, **asked.arms}, seeds=seeds, starts=there.starts)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"got {out}, wanted a new folder or that of tools/pair")
    (out / "trials").mkdir(parents=True, exist_ok=True)
    write_json(spec(out), asdict(asked))
    asked = replace(asked, starts={seed: start for seed in asked.seeds if (start := start_of(out, asked, seed))})
    write_json(spec(out), asdict(asked))
    return asked


def start_of(out: Path, asked: Pairing, seed: str) -> str | None:
    """The folder of the model that the runs of a seed begin with, made where it is not there.

    None where the configuration names a folder or a hub name: all arms read that. Raises ValueError for a model or
    checkpoint that there is not, and for a start that is gone and would be made as another one.
    """
    if seed in asked.starts and Path(asked.starts[seed]).is_dir():
        return asked.starts[seed]
    made = given_start(out, asked.start) if asked.start is not None else configured_start(out, asked, seed)
    if (before := asked.starts.get(seed)) not in (None, made):
        raise ValueError(f"seed {seed}: got no folder {before}, which its runs began with, and would make {made}")
    return made


def given_start(out: Path, name: str) -> str:
    """The model folder or hub name itself; of a run or a checkpoint its weights, exported once."""
    from grpo_fn.shell.model.hf import Pretrained
    from grpo_fn.trainer.model_source import export_whole, find_run_checkpoint, run_of

    if run_of(name) is None:
        folder = Pretrained(name).folder()
        return str(Path(folder).absolute()) if Path(folder).is_dir() else folder
    target = (out / "starts" / "checkpoint").absolute()
    if not target.is_dir():
        found = find_run_checkpoint(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        export_whole(found, target)
    return str(target)


def configured_start(out: Path, asked: Pairing, seed: str) -> str | None:
    """A copy of what the configuration's recipe makes."""
    from grpo_fn.shell.model.hf import Pretrained
    from grpo_fn.trainer.sections import model_source

    unbound = replace(asked, starts={})
    value = configuration(unbound, next(iter(asked.arms)), seed).root.knobs["model"]
    source = model_source(freeze({"model": value}, {})["model"], "train.train.model")
    folder = Path(source.folder())
    if isinstance(source, Pretrained):
        return None
    target = (out / "starts" / folder.name).absolute()
    if not target.is_dir():
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        part.rename(target)
    return str(target)
