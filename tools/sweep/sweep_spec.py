"""The trials that a sweep consists of: points of a grid, draws of random values, and the folder that lists them."""

import argparse
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Trial(NamedTuple):
    """One run of the sweep: what it binds on top of the files, as text."""

    name: str
    values: dict[str, str]


def wanted(args: argparse.Namespace) -> list[Trial]:
    """The trials that the command line asks for. Raises ValueError for what asks for none, or twice for one name."""
    if not args.gin_file:
        raise ValueError("--gin_file: got none, wanted the file of the run")
    if args.jobs < 1 or args.timeout <= 0 or (args.trials is not None and args.trials < 1):
        raise ValueError(f"--jobs, --timeout, --trials: got {args.jobs}, {args.timeout}, {args.trials}, wanted above 0")
    if args.trials is not None and not args.random:
        raise ValueError("--trials: got it without --random, wanted both: a grid says itself how many trials it has")
    grid = {name: split(text) for name, text in map(named, args.grid)}
    dists = dict(map(named, args.random))
    names = [named(text)[0] for text in (*args.grid, *args.random)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"got {', '.join(twice)} more than once in --grid and --random, wanted each name once")
    if not names:
        raise ValueError("got neither --grid nor --random, wanted something to try")
    if empty := [name for name, values in grid.items() if not all(values)]:
        raise ValueError(f"--grid: got an empty value of {', '.join(empty)}, wanted NAME=A,B,...")
    draws = range(8 if args.trials is None else args.trials) if dists else [0]
    drawn = [{name: draw(dist, f"{args.draw_seed}/{i}/{name}") for name, dist in dists.items()} for i in draws]
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    found = [trial({**values, **point}) for values in drawn for point in points]
    return list({one.name: one for one in found}.values())


def named(text: str) -> tuple[str, str]:
    """NAME and what stands behind the first `=`."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[\w./]+", name.strip()):
        raise ValueError(f"got {text!r}, wanted NAME=...")
    return name.strip(), value.strip()


def split(text: str) -> list[str]:
    """The parts between commas that stand outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def draw(dist: str, seed: str) -> str:
    """A value of the distribution, the same for the same seed. Raises ValueError for one that there is not."""
    found = re.fullmatch(r"(\w+)\((.*)\)", dist)
    kind, values = (found[1], split(found[2])) if found else ("", [])
    chance = random.Random(seed)
    if kind == "choice" and all(values):
        return chance.choice(values)
    try:
        low, high = map(float, values)
    except ValueError:
        low, high = 1.0, 0.0
    if low < high < math.inf and kind == "uniform":
        return f"{chance.uniform(low, high):.4g}"
    if 0 < low < high < math.inf and kind == "loguniform":
        return f"{math.exp(chance.uniform(math.log(low), math.log(high))):.4g}"
    if low < high < math.inf and kind == "integer" and low.is_integer() and high.is_integer():
        return str(chance.randint(int(low), int(high)))
    raise ValueError(
        f"--random: got {dist!r}, wanted uniform(low,high), loguniform(low,high) with low > 0, integer(low,high) "
        "or choice(a,b,...)"
    )


def trial(values: dict[str, str]) -> Trial:
    """A trial goes by its values, so that it is found again when a sweep is widened."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    short = "_".join(f"{name.rpartition('.')[2]}={value}" for name, value in sorted(values.items()))
    return Trial(f"{re.sub(r'[^A-Za-z0-9.=_+-]', '', short)[:60]}-{digest}", values)


def check_bindings(args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """Every name and value against the functions that they are for. Raises ValueError before anything starts."""
    from grpo_fn.config import load_config

    for one in trials:
        try:
            load_config(args.gin_file, params(args.gin_param, one))
        except ValueError as error:
            raise ValueError(f"trial {one.name}: {error}") from error


def params(common: Sequence[str], one: Trial) -> list[str]:
    """The bindings of a trial."""
    return [*common, *(f"{name}={value}" for name, value in one.values.items())]


def run_flags(files: Sequence[str], bindings: Sequence[str]) -> list[str]:
    """Gin files and bindings as flags of `python -m grpo_fn.run`."""
    named = [("--gin_file", file) for file in files] + [("--gin_param", binding) for binding in bindings]
    return [word for pair in named for word in pair]


def spec(out: Path) -> Path:
    """Where a sweep says what it is."""
    return out / "sweep.json"


def entered(args: argparse.Namespace, trials: Sequence[Trial]) -> list[Trial]:
    """Make the sweep's folder, or widen one with the same files; all its trials, older ones first.

    Raises ValueError when the folder is that of another sweep, or of something else.
    """
    from grpo_fn.shell.atomic_io import write_json

    base = {"gin_files": args.gin_file, "gin_params": args.gin_param}
    before: dict[str, Trial] = {}
    if spec(args.out).exists():
        there = json.loads(spec(args.out).read_text())
        if {key: there[key] for key in base} != base:
            raise ValueError(
                f"got {args.out}, a sweep of {there['gin_files']} with {there['gin_params']}, wanted the same"
            )
        before = {one["name"]: Trial(**one) for one in there["trials"]}
    elif args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"got {args.out}, wanted a new folder or that of a sweep")
    (args.out / "trials").mkdir(parents=True, exist_ok=True)
    every = [*{**before, **{one.name: one for one in trials}}.values()]
    write_json(spec(args.out), {**base, "trials": [one._asdict() for one in every]})
    return every
