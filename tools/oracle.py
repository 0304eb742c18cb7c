"""Make short training runs of every kind, and compare their bits with those of another revision of this code.

python tools/oracle.py record FILE [--only NAME,NAME]
python tools/oracle.py compare FILE [--only NAME,NAME]

`record` makes RUNS with the code and the gin files of the working tree (of another revision: in a git worktree of it)
and writes what they computed to FILE: checksums and metrics of every step, and a hash of every final weight. `compare`
makes them and prints of each 'identical' or the first quantity that differs, with its step and both values. Metrics
that are new or gone are listed and are no difference; those of time and memory are left out. Exit code 0 when all runs
agree, 1 when one differs or fails, 2 for bad input.

Bits depend on torch, the processor and the threads: a FILE of another machine is refused. All runs of one call share
the tiny models that the first ones make.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import psutil
from safetensors import deserialize

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "tools" / "oracle_runs"
PARALLEL, THREADS = 2, 1  # runs at a time, threads of each process
DEADLINE, RUN_DEADLINE = 1200, 180  # seconds of all runs and of a run
TAIL = 12  # last lines shown of a run that fails
HOST = ("ranks", "device", "torch")  # fields of a checksum line that name the machine
MACHINE, CLOCKS = ("time/", "system/"), ("_per_second", "_seconds")  # how metrics of the machine begin and end
SERVER = multiprocessing.get_context("forkserver")  # forks the runs, with these modules of their tree
SERVER.set_forkserver_preload(["grpo_fn.train", "grpo_fn.trainer.loop", "transformers.models.qwen2.modeling_qwen2"])
# A run is gin files in order, those of tools/oracle_runs before the tree's, and bindings; ranks=N starts torchrun.
SIZES = "step.Algorithm.prompts=4 step.Algorithm.group_size=4"
WORDS = "run/arithmetic.gin small.gin signal.gin MAX_NEW_TOKENS=12"  # whose rewards even a poor model gets
TRAINER = "step.Algorithm.old_logp=@step.from_trainer"
CONTROL = (
    "step.Algorithm.control=@objective.next_gains objective.next_gains.kl_control=@objective.adaptive_kl "
    "objective.adaptive_kl.target=0.5 objective.adaptive_kl.rate=0.1 objective.adaptive_kl.limit=0.9"
)
PAIRS = "demonstrations.jsonl"  # a file in the runs' current folder
RUNS = {
    "arithmetic": "run/arithmetic.gin small.gin STEPS=10 step.Algorithm.prompts=8 step.Algorithm.group_size=8",
    "calculator": f"run/calculator.gin small.gin models.TinyModel.steps=100 {SIZES}",
    "maze": f"run/maze.gin small.gin models.TinyModel.rows=8 {SIZES}",
    "ranks": f"{WORDS} algo/grpo.gin scale/full_shard.gin scale/bf16.gin {SIZES} ranks=2",
    "echo": f"run/calculator.gin small.gin models.TinyModel.steps=100 algo/echo.gin {SIZES}",
    "grpo": f"{WORDS} algo/grpo.gin {SIZES} step.Algorithm.minibatches=2 step.Algorithm.epochs=2",
    "dapo": f"{WORDS} algo/dapo.gin {SIZES} combine.combine.weights=[1.0,0.0]",
    "gspo": f"{WORDS} algo/gspo.gin {SIZES} {TRAINER} step.Algorithm.minibatches=2",
    "otb": f"{WORDS} algo/otb.gin {SIZES}",
    "real": f"{WORDS} algo/real.gin {SIZES} step.Algorithm.minibatches=2",
    "lora": f"{WORDS} algo/grpo.gin scale/lora.gin {SIZES}",
    "opd": f"{WORDS} algo/opd.gin teacher.gin {SIZES}",
    "rlsd": f"{WORDS} algo/rlsd.gin scale/self_teacher.gin {SIZES}",
    "sdpo": f"{WORDS} algo/sdpo.gin scale/sibling_teacher.gin {SIZES}",
    "sft": f"{WORDS} run/sft.gin small.gin DATA='{PAIRS}' HELD_OUT=8 ROWS=8",
    "chord": f"{WORDS} algo/chord.gin task/demonstrations.gin {SIZES} STEPS=4 "
    f"DEMONSTRATIONS='{PAIRS}' DEMONSTRATION_ROWS=4",
    "async": f"{WORDS} algo/grpo.gin async.gin {SIZES} STEPS=4",
    "fp16": f"{WORDS} algo/dr_grpo.gin scale/fp16.gin {SIZES} STEPS=5 sections.PolicyUpdate.initial_scale=1048576.0",
    "adaptive_kl": f"{WORDS} algo/grpo.gin {SIZES} STEPS=4 {CONTROL}",
    "own_pass": f"{WORDS} engine/async_one_step.gin scale/bf16.gin {SIZES} sections.Sampling.max_staleness=0",
    "curriculum": f"{WORDS} levels.gin {SIZES} STEPS=4",
}


# -- the runs


def make_runs(names: Sequence[str]) -> dict[str, dict[str, Any] | str]:
    """What each run computed, by name: its outcome, or a text that says how it failed."""
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(DEADLINE)
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        tree = Path(folder) / "tree"
        for part in ("grpo_fn", "gin", "experiments/tiny", "tests/e2e"):  # the working tree may change meanwhile
            shutil.copytree(ROOT / part, tree / part)
        texts = ((f"What is {a}+{b}? ", f"\\boxed{{{a + b}}}") for a in range(6) for b in range(6))
        rows = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in texts]
        (tree / PAIRS).write_text("\n".join(rows))
        try:
            start_server(tree)
            runs = dict(finished_runs(list(names), tree, Path(folder)))
        finally:
            signal.alarm(0)
            stop_children(os.getpid())
    return {name: runs[name] for name in names}


def raise_timeout(*_: object) -> None:
    """Raise TimeoutError: the runs together have a deadline."""
    raise TimeoutError(f"the runs are not over after {DEADLINE} s")


def start_server(tree: Path) -> None:
    """Start the server of runs, for which the tree's package comes before any other and HOME is beside the tree."""
    sys.path[:0] = (paths := [str(tree), str(OWN), str(tree / "tests")])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "HOME": str(tree.parent)}
    os.environ |= {"OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": ""}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def stop_children(pid: int) -> None:
    """SIGKILL to every process that a process started, its children's too, and wait for their ends."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=10)


def finished_runs(waiting: list[str], tree: Path, folder: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Start the runs, some at a time; the name and the outcome of each as it ends.

    Of the runs that share a tiny model, one makes it before another starts.
    """
    active: dict[str, tuple[Any, float]] = {}
    models: set[str] = set()
    while waiting or active:
        for name in waiting[:]:
            file, busy = RUNS[name].split()[0], {RUNS[other].split()[0] for other in active}
            if len(active) < PARALLEL and (file in models or file not in busy):
                process = SERVER.Process(target=run_in_child, args=(RUNS[name], tree, folder / name))
                process.start()
                active[name] = process, time.monotonic()
                waiting.remove(name)
        connection.wait([process.sentinel for process, _ in active.values()], timeout=1)
        for name, (process, began) in [*active.items()]:
            code, seconds = process.exitcode, round(time.monotonic() - began, 1)
            if code is not None or seconds > RUN_DEADLINE:
                del active[name]
                models.add(RUNS[name].split()[0])
                stop_children(process.pid)
                process.kill()
                print(f"{name}: {seconds} s", file=sys.stderr, flush=True)
                end = f"no end within {RUN_DEADLINE} s" if code is None else f"exit code {code}"
                lines = (folder / f"{name}.out").read_text(errors="replace").splitlines()[-TAIL:]
                failure = "\n    ".join([end, *lines])
                yield name, failure if code != 0 else {"seconds": seconds, **outcome(folder / name)}


def run_in_child(spec: str, tree: Path, run_dir: Path) -> None:
    """Make one run in this process, which the server forked; what it prints goes to a file beside the run's folder."""
    with open(f"{run_dir}.out", "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(tree)
    import torch
    from torch.distributed import run as torchrun

    from grpo_fn import run

    if Path(run.__file__).parents[1] != tree:
        sys.exit(f"got the package {run.__file__}, expected that of {tree}")
    torch.set_num_threads(THREADS)  # after a fork torch makes its threads anew
    ranks, argv = 1, ["--run_dir", str(run_dir)]
    for part in spec.split():
        if part.startswith("ranks="):
            ranks = int(part.removeprefix("ranks="))
        elif part.endswith(".gin"):
            argv += ["--gin_file", str(OWN / part) if (OWN / part).exists() else part]
        else:
            argv += ["--gin_param", part]
    launcher = ["--standalone", f"--nproc-per-node={ranks}", "-m", "grpo_fn.run"]
    sys.exit(torchrun.main([*launcher, *argv]) if ranks > 1 else run.main(argv))


# -- what a run computed


def outcome(run_dir: Path) -> dict[str, Any]:
    """Checksums and metrics by step, hashes of the final weights by name."""
    files = sorted([*run_dir.glob("model/*.safetensors"), *run_dir.glob("adapter/*.safetensors")])
    return {
        "checksums": by_step(run_dir / "digests.jsonl", lambda name: name not in HOST),
        "metrics": by_step(
            run_dir / "metrics.jsonl", lambda name: not name.startswith(MACHINE) and not name.endswith(CLOCKS)
        ),
        "weights": {
            f"{file.parent.name}/{name}": sha256(f"{x['dtype']} {x['shape']} ".encode() + x["data"]).hexdigest()[:16]
            for file in files
            for name, x in deserialize(file.read_bytes())
        },
    }


def by_step(file: Path, keep: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
    """The values of a file of JSON lines by step, those with a name to keep."""
    steps: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        steps.setdefault(str(row.pop("step")), {}).update({name: x for name, x in row.items() if keep(name)})
    return steps


# -- the comparison


def quantities(run: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """All values of a run by (step, kind and name), in the order in which they are computed."""
    table: dict[tuple[str, str], Any] = {}
    for step in sorted({*run["checksums"], *run["metrics"]}, key=int):
        for kind in ("checksum", "metric"):
            table |= {(step, f"{kind} {name}"): x for name, x in run[f"{kind}s"].get(step, {}).items()}
    return table | {("end", f"weight {name}"): x for name, x in run["weights"].items()}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first quantity that differs, with both values, or 'identical'; a metric of one run alone does not count."""
    old, new = quantities(before), quantities(now)
    for step, name in old | new:
        values = [json.dumps(table.get((step, name))) for table in (old, new)]  # as text, in which NaN equals NaN
        alone = (step, name) not in old or (step, name) not in new
        if values[0] != values[1] and not (alone and name.startswith("metric ")):
            return f"step {step}, {name}: recorded {values[0]}, now {values[1]}"
    return "identical"


def changed_metrics(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each metric that only one of two runs has, with the steps that have it."""
    old, new = quantities(before), quantities(now)
    steps: dict[str, list[str]] = {}
    for word, table, other in (("new", new, old), ("gone", old, new)):
        for step, name in [at for at in table if at not in other and at[1].startswith("metric ")]:
            steps.setdefault(f"{word}: {name}", []).append(step)
    return [f"{line}, step {', '.join(at)}" for line, at in steps.items()]


def compare_runs(recorded: Mapping[str, Any], runs: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The lines of a comparison, and whether all runs agree."""
    lines, agree = [], True
    for name, run in runs.items():
        failed = isinstance(run, str)
        verdict = f"failed: {run}" if failed else difference(recorded[name], run)
        changes = [] if failed else changed_metrics(recorded[name], run)
        lines += [f"{name}: {verdict}", *(f"    {line}" for line in changes)]
        agree &= verdict == "identical"
    return lines, agree


def machine() -> dict[str, Any]:
    """What the bits of a run depend on beside its code."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    cpu = ", ".join(fields.get(name, "unknown") for name in ("model name", "cpu family", "model"))
    return {"torch": version("torch"), "cpu": cpu, "threads": THREADS}


# -- the commands


def record(file: Path, names: Sequence[str]) -> int:
    """Make the runs and write what they computed."""
    git = partial(subprocess.check_output, cwd=ROOT, text=True)
    changes = git(["git", "status", "--porcelain", "--untracked-files=no"])
    label = git(["git", "rev-parse", "HEAD"]).strip() + ("-dirty" if changes else "")
    runs = make_runs(names)
    if failed := [f"{name}: failed: {run}" for name, run in runs.items() if isinstance(run, str)]:
        raise ValueError("\n".join([f"{file} is not written", *failed]))
    head = {**machine(), "cores": os.cpu_count(), "revision": label, "date": f"{datetime.now():%Y-%m-%d %H:%M}"}
    file.write_text(json.dumps({**head, "runs": runs}, indent=1) + "\n")
    print(f"{len(runs)} runs of {label} are in {file}")
    return 0


def compare(file: Path, names: Sequence[str] | None) -> int:
    """Make the runs of the working tree and print how they compare with a record."""
    recorded, here = json.loads(file.read_text()), machine().items()
    if odd := [f"{name} {recorded.get(name)!r}, here {x!r}" for name, x in here if recorded.get(name) != x]:
        command, revision = f"python tools/oracle.py record {file}", recorded.get("revision")
        raise ValueError(
            f"{file} was recorded with {'; '.join(odd)}: first run `{command}` in a worktree of {revision}"
        )
    names = names or [*recorded["runs"]]
    if missing := [name for name in names if name not in recorded["runs"] or name not in RUNS]:
        raise ValueError(f"got the runs {', '.join(missing)}, expected some that {file} and tools/oracle.py both have")
    lines, agree = compare_runs(recorded["runs"], make_runs(names))
    print("\n".join(lines))
    return 0 if agree else 1


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python tools/oracle.py", description="Compare short runs with another revision's."
    )
    parser.add_argument("command", choices=("record", "compare"), help="make runs and write them, or compare with them")
    parser.add_argument("file", type=Path, metavar="FILE", help="the record, as JSON")
    parser.add_argument("--only", metavar="NAME,...", help=f"these runs alone, of {', '.join(RUNS)}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare; the exit code."""
    args = flags().parse_args(argv)
    names = args.only.split(",") if args.only else None
    try:
        if unknown := {*(names or [])} - {*RUNS}:
            raise ValueError(f"--only: got {', '.join(sorted(unknown))}, expected some of {', '.join(RUNS)}")
        if args.command == "record":
            return record(args.file, names or [*RUNS])
        return compare(args.file, names)
    except (ValueError, OSError, EOFError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
