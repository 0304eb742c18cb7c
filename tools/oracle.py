"""Make short training runs of every kind, and compare their bits with those of another revision of this code.

python tools/oracle.py record FILE [--revision REV]
python tools/oracle.py compare FILE [--strict] [--only NAME,NAME]

`record` makes the runs of RUNS with the code and the gin files of a revision, in a worktree of its own (default: the
working tree), and writes what they computed to FILE: the checksums and metrics of every step, and a hash of every final
weight. `compare` makes them with the working tree and prints of each run 'identical' or the first quantity that differs,
with its step and both values. Metrics that are new or gone are listed, and fail under --strict alone. What measures time
or memory is left out. Exit code 0 when all runs agree, 1 when one differs or fails, 2 for bad input.

Bits depend on torch, the processor and the threads: a FILE of another machine is refused. This file and the gin files
and rewards of tools/oracle_runs serve every revision. All runs of one call share the tiny models that the first ones make.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from safetensors import deserialize

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tools" / "oracle_runs"
PARALLEL, THREADS = 2, 1  # runs at a time, threads of each process
RUN_DEADLINE, GIT_DEADLINE = 180.0, 60.0  # seconds
TAIL = 12  # last lines shown of a run that fails
HOST = ("ranks", "device", "torch")  # fields of a checksum line that name the machine
MACHINE, CLOCKS = ("time/", "system/"), ("_per_second", "_seconds")  # how metrics of the machine begin and end
# Runs are forked from a server that has these modules of their tree.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["grpo_fn.train", "grpo_fn.trainer.loop", "transformers.models.qwen2.modeling_qwen2"]
PRELOADED += ["torch.distributed.tensor", "torch.utils.tensorboard", "transformers.generation"]

# Knobs that no preset binds, by the name that RUNS has for them: before the refactoring of grpo_fn/algo/step.py, and after.
OLD_KNOBS = {
    name: f"step.Algorithm.{name}"
    for name in ("prompts", "group_size", "minibatches", "epochs", "old_logp", "kl_control")
}
NEW_KNOBS = OLD_KNOBS | {}  # FILL IN: each knob that has another name after the refactoring


class RunSpec(NamedTuple):
    """A run: gin files in order (those of tools/oracle_runs win over the tree's), bindings, and its ranks."""

    files: tuple[str, ...]
    params: tuple[str, ...] = ()
    ranks: int = 1


def words(*files: str, params: Sequence[str] = (), ranks: int = 1) -> RunSpec:
    """A run on word problems, with rewards that a model without skill can get."""
    sizes = ("MAX_NEW_TOKENS=12", "{prompts}=4", "{group_size}=4")
    return RunSpec(("run/arithmetic.gin", "small.gin", "signal.gin", *files), (*sizes, *params), ranks)


def episodes(name: str, *files: str) -> RunSpec:
    """A run of episodes in an environment."""
    return RunSpec((f"run/{name}.gin", "small.gin", *files), ("{prompts}=4", "{group_size}=4"))


DEMONSTRATIONS = "demonstrations.jsonl"  # of prompts and right completions, where the runs start
ADAPTIVE = [f"controllers.adaptive_kl.{knob}" for knob in ("target=0.5", "rate=0.1", "limit=0.9")]
RUNS = {
    "arithmetic": RunSpec(("run/arithmetic.gin", "small.gin"), ("STEPS=10", "{prompts}=8", "{group_size}=8")),
    "calculator": episodes("calculator"),
    "maze": episodes("maze"),
    "ranks": words("algo/grpo.gin", "scale/full_shard.gin", "scale/bf16.gin", ranks=2),
    "echo": episodes("calculator", "algo/echo.gin"),
    "grpo": words("algo/grpo.gin", params=("{minibatches}=2", "{epochs}=2")),
    "dapo": words("algo/dapo.gin", params=("combine.combine.weights=[1.0, 0.0]",)),
    "gspo": words("algo/gspo.gin", params=("{old_logp}=@step.from_trainer", "{minibatches}=2")),
    "otb": words("algo/otb.gin"),
    "real": words("algo/real.gin", params=("{minibatches}=2",)),
    "lora": words("algo/grpo.gin", "scale/lora.gin"),
    "opd": words("algo/opd.gin", "teacher.gin"),
    "rlsd": words("algo/rlsd.gin", "scale/self_teacher.gin"),
    "sdpo": words("algo/sdpo.gin", "scale/sibling_teacher.gin"),
    "sft": words(
        *("run/sft.gin", "small.gin"),
        params=(f"DATA='{DEMONSTRATIONS}'", "HELD_OUT=8", "{prompts}=8", "{group_size}=1"),
    ),
    "chord": words(
        *("algo/chord.gin", "task/demonstrations.gin"),
        params=(f"DEMONSTRATIONS='{DEMONSTRATIONS}'", "DEMONSTRATION_ROWS=4", "STEPS=4"),
    ),
    "async": words("algo/grpo.gin", "async.gin", params=("STEPS=4",)),
    "fp16": words("algo/dr_grpo.gin", "scale/fp16.gin", params=("sections.PolicyUpdate.initial_scale=1048576.0", "STEPS=5")),
    "adaptive_kl": words("algo/grpo.gin", params=("{kl_control}=@controllers.adaptive_kl", *ADAPTIVE, "STEPS=4")),
    "own_pass": words(*("engine/async_one_step.gin", "scale/bf16.gin"), params=("sections.Sampling.max_staleness=0",)),
    "curriculum": words("levels.gin", params=("STEPS=4",)),
}


# -- the runs


def make_runs(names: Sequence[str], revision: str | None) -> dict[str, Any]:
    """What each run computed, by name: its outcome, or a text that says how it failed."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder, code_of(revision, Path(folder)) as tree:
        place = Path(folder)
        pairs = (
            {"prompt": f"What is {a}+{b}? ", "completion": f"\\boxed{{{a + b}}}"} for a in range(6) for b in range(6)
        )
        (tree / DEMONSTRATIONS).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        start_server(tree)
        try:
            return dict(finished_runs(list(names), tree, place))
        finally:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def finished_runs(waiting: list[str], tree: Path, place: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Start the runs, some at a time; the name and the outcome of each as it ends.

    Of the runs that share a tiny model, one makes it before another starts.
    """
    active: dict[str, tuple[Any, float]] = {}
    models: set[str] = set()
    while waiting or active:
        for name in waiting[:]:
            busy = {RUNS[other].files[0] for other in active}
            if len(active) < PARALLEL and (RUNS[name].files[0] in models or RUNS[name].files[0] not in busy):
                process = SERVER.Process(target=run_in_child, args=(command_line(RUNS[name], tree), tree, place / name))
                process.start()
                active[name] = process, time.monotonic()
                waiting.remove(name)
        connection.wait([process.sentinel for process, _ in active.values()], timeout=1.0)
        for name, (process, began) in [*active.items()]:
            seconds = time.monotonic() - began
            if process.exitcode is None and seconds < RUN_DEADLINE:
                continue
            del active[name]
            models.add(RUNS[name].files[0])
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            if process.exitcode == 0:
                yield name, {"seconds": round(seconds, 1), **outcome(place / name)}
                continue
            end = f"no end within {RUN_DEADLINE:g} s" if process.exitcode is None else f"exit code {process.exitcode}"
            process.kill()
            lines = (place / f"{name}.out").read_text(errors="replace").splitlines()[-TAIL:]
            yield name, "\n    ".join([end, *lines])


@contextmanager
def code_of(revision: str | None, folder: Path) -> Iterator[Path]:
    """A folder with the code and the gin files of a revision; None copies the working tree as it is now."""
    tree = folder / "tree"
    if revision is None:
        for part in ("grpo_fn", "gin", "tests/e2e"):
            shutil.copytree(ROOT / part, tree / part)
        yield tree
        return
    git("worktree", "add", "--detach", str(tree), revision)
    try:
        yield tree
    finally:
        git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> str:
    """What a git command in this repository prints. Raises ValueError when it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=GIT_DEADLINE)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def start_server(tree: Path) -> None:
    """Start the server of runs: it has the tree's package before any other, and a home of its own for tiny models."""
    sys.path[:0] = (paths := [str(tree), str(OWN), str(tree / "tests")])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(tree.parent), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"OMP_NUM_THREADS": str(THREADS), "PYTHONSAFEPATH": "1"}  # the current folder is on no path
    try:
        SERVER.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def command_line(spec: RunSpec, tree: Path) -> list[str]:
    """The arguments of a run, from the word before grpo_fn.run's own; torchrun's come first when there are several ranks."""
    old = "class StepKnobs" in (tree / "grpo_fn" / "algo" / "step.py").read_text()
    params = [param.format(**(OLD_KNOBS if old else NEW_KNOBS)) for param in spec.params]
    files = [str(OWN / file) if (OWN / file).exists() else file for file in spec.files]
    flags = [part for file in files for part in ("--gin_file", file)]
    flags += [part for param in params for part in ("--gin_param", param)]
    launcher = ["--standalone", f"--nproc-per-node={spec.ranks}", "-m", "grpo_fn.run"]
    return [*(launcher if spec.ranks > 1 else []), *flags]


def run_in_child(argv: Sequence[str], tree: Path, run_dir: Path) -> None:
    """Make one run in this process, which the server forked; what it prints goes to a file beside the run's folder."""
    with open(f"{run_dir}.out", "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(tree)
    import grpo_fn.run
    import torch
    from torch.distributed import run as torchrun

    if Path(grpo_fn.run.__file__).parents[1] != tree:
        sys.exit(f"got the package {grpo_fn.run.__file__}, wanted that of {tree}")
    torch.set_num_threads(THREADS)  # after a fork torch makes its threads anew
    argv = [*argv, "--run_dir", str(run_dir)]
    sys.exit(torchrun.main(argv) if argv[0] == "--standalone" else grpo_fn.run.main(argv))


# -- what a run computed


def outcome(run_dir: Path) -> dict[str, Any]:
    """Checksums and metrics by step, hashes of the final weights by name."""
    files = sorted([*run_dir.glob("model/*.safetensors"), *run_dir.glob("adapter/*.safetensors")])
    return {
        "checksums": by_step(run_dir / "digests.jsonl", lambda name: name not in HOST),
        "metrics": by_step(run_dir / "metrics.jsonl", is_computed),
        "weights": {
            f"{file.parent.name}/{name}": sha256(f"{x['dtype']} {x['shape']} ".encode() + x["data"]).hexdigest()[:16]
            for file in files
            for name, x in deserialize(file.read_bytes())
        },
    }


def is_computed(metric: str) -> bool:
    """Whether a metric says what was computed, and not how long the machine took."""
    return not metric.startswith(MACHINE) and not metric.endswith(CLOCKS)


def by_step(file: Path, keep: Any) -> dict[str, dict[str, Any]]:
    """The values of a file of JSON lines by step, those with a name to keep."""
    steps: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        steps.setdefault(str(row.pop("step")), {}).update({k: v for k, v in row.items() if keep(k)})
    return steps


# -- the comparison


def quantities(run: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """All values of a run by (step, name), in the order in which they are computed; the step of weights is 'end'."""
    steps = sorted({*run["checksums"], *run["metrics"]}, key=int)
    table: dict[tuple[str, str], Any] = {}
    for step in steps:
        table |= {(step, f"checksum of {name}"): x for name, x in run["checksums"].get(step, {}).items()}
        table |= {(step, name): x for name, x in run["metrics"].get(step, {}).items()}
    return table | {("end", f"weight {name}"): x for name, x in run["weights"].items()}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first quantity of both runs that differs, with both values; None when all are equal."""
    old, new = quantities(before), quantities(now)
    for kind in ("checksums", "metrics"):
        if before[kind].keys() != now[kind].keys():
            return f"steps with {kind}: recorded {', '.join(before[kind])}; now {', '.join(now[kind])}"
    for at in old:
        if at in new and json.dumps(old[at]) != json.dumps(new[at]):  # as text, NaN equals itself and 0.0 is not -0.0
            return f"step {at[0]}, {at[1]}: recorded {old[at]}, now {new[at]}"
    return None


def changed_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each quantity that only one of two runs has, with the steps that have it."""
    old, new = quantities(before), quantities(now)
    lines: dict[str, list[str]] = {}
    for word, one, other in (("new", new, old), ("gone", old, new)):
        for step, name in one:
            if (step, name) not in other:
                lines.setdefault(f"{word}: {name}", []).append(step)
    return [f"{line} (step {', '.join(steps)})" for line, steps in lines.items()]


def compare_runs(recorded: Mapping[str, Any], now: Mapping[str, Any], *, strict: bool) -> tuple[list[str], bool]:
    """The lines of a comparison, and whether the runs agree."""
    lines, agree = [], True
    for name, run in now.items():
        if isinstance(run, str):
            verdict, names = f"failed: {run}", []
        else:
            verdict, names = difference(recorded[name], run) or "identical", changed_names(recorded[name], run)
        lines += [f"{name}: {verdict}", *(f"    {line}" for line in names)]
        agree &= verdict == "identical" and not (strict and names)
    return lines, agree


def machine() -> dict[str, Any]:
    """What the bits of a run depend on beside its code."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    cpu = ", ".join(fields.get(name, "unknown") for name in ("model name", "cpu family", "model"))
    return {"torch": version("torch"), "cpu": cpu, "threads": THREADS}


def check_machine(record: Mapping[str, Any], here: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for a record of another machine."""
    odd = [f"{name} {record.get(name)!r}, here {value!r}" for name, value in here.items() if record.get(name) != value]
    if odd:
        raise ValueError(
            f"{file} was recorded with {'; '.join(odd)}: record it here first: "
            f"python tools/oracle.py record {file} --revision {record.get('revision')}"
        )


# -- the commands


def record(file: Path, revision: str | None, names: Sequence[str]) -> int:
    """Make the runs of a revision and write what they computed."""
    dirty = "-dirty" if revision is None and git("status", "--porcelain", "--untracked-files=no") else ""
    label = git("rev-parse", "--verify", f"{revision or 'HEAD'}^{{commit}}") + dirty
    runs = make_runs(names, revision)
    failed = [f"{name}: failed: {run}" for name, run in runs.items() if isinstance(run, str)]
    if failed:
        raise ValueError("\n".join([f"{file} is not written", *failed]))
    head = {**machine(), "cores": os.cpu_count(), "revision": label, "date": f"{datetime.now():%Y-%m-%d %H:%M}"}
    file.write_text(json.dumps({**head, "runs": runs}, indent=1) + "\n")
    print(f"{len(runs)} runs of {label[:12]}{dirty} are in {file}")
    return 0


def compare(file: Path, names: Sequence[str] | None, *, strict: bool) -> int:
    """Make the runs of the working tree and print how they compare with a record."""
    recorded = json.loads(file.read_text())
    check_machine(recorded, machine(), file)
    names = names or [name for name in RUNS if name in recorded["runs"]]
    if missing := [name for name in names if name not in recorded["runs"]]:
        raise ValueError(f"got the runs {', '.join(missing)}, wanted some of {file}: {', '.join(recorded['runs'])}")
    lines, agree = compare_runs(recorded["runs"], make_runs(names, None), strict=strict)
    print("\n".join(lines))
    return 0 if agree else 1


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python tools/oracle.py", description="Compare short runs with another revision's."
    )
    parser.add_argument("command", choices=("record", "compare"), help="make runs and write them, or compare with them")
    parser.add_argument("file", type=Path, metavar="FILE", help="the record, as JSON")
    parser.add_argument("--revision", metavar="REV", help="record: the revision (default: the working tree)")
    parser.add_argument("--strict", action="store_true", help="compare: new and gone metrics fail, too")
    parser.add_argument("--only", metavar="NAME,...", help=f"these runs alone, of {', '.join(RUNS)}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare; the exit code."""
    args = flags().parse_args(argv)
    names = args.only.split(",") if args.only else None
    try:
        if unknown := {*(names or [])} - {*RUNS}:
            raise ValueError(f"--only: got {', '.join(sorted(unknown))}, wanted some of {', '.join(RUNS)}")
        if args.command == "record":
            return record(args.file, args.revision, names or [*RUNS])
        return compare(args.file, names, strict=args.strict)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
