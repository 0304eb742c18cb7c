"""The two programs of `tools/bench trl`: how each is started, watched until it ends, and what it left behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bench_work
import psutil
import torch
import transformers

from grpo_fn.core.json_lines import metrics_by_step

TOOLS = Path(__file__).resolve().parent
EVALUATION = "time/evaluate"
POLL = 0.05  # seconds between two looks at a program's memory


class Used(NamedTuple):
    """What a program used of the machine: bytes of resident memory, and seconds of processor."""

    peak: float  # VmHWM of the program itself, plus the most that its helper processes held at once
    before: float  # of the program when its first step was about to begin
    processor: float  # of the program from then on, all threads together


class Measured(NamedTuple):
    """One start of one side, warm-up left out."""

    seconds: list[float]  # of each step
    rows: list[float]
    length: list[float]  # mean, of a step's completions
    phases: dict[str, list[float]]
    processor: float  # seconds a step, warm-up and what follows the last step included
    used: Used
    versions: dict[str, str]
    calls: list[float]  # of tools in an episode, mean; none where there are no episodes

    def rate(self) -> float:
        """Completions per second of the median step."""
        return median(self.rows) / median(self.seconds)


def together(several: list[Measured]) -> Measured:
    """The steps of several starts; the highest peak."""
    names = sorted({name for one in several for name in one.phases})
    return Measured(
        seconds=[x for one in several for x in one.seconds],
        rows=[x for one in several for x in one.rows],
        length=[x for one in several for x in one.length],
        phases={name: [x for one in several for x in of_phase(one, name)] for name in names},
        processor=sum(one.processor for one in several) / len(several),
        used=max((one.used for one in several), key=lambda used: used.peak),
        versions=several[0].versions,
        calls=[x for one in several for x in one.calls],
    )


def of_phase(one: Measured, name: str) -> list[float]:
    """Seconds in each step of a phase that need not have come up."""
    return one.phases.get(name, [0.0] * len(one.seconds))


def ours(shared: dict[str, Any], folder: Path, *, warm_up: int, threads: int, deadline: float) -> Measured:
    """`python -m grpo_fn.run` on the work, timed by its own metrics."""
    folder.mkdir()
    (folder / "bench.gin").write_text(bench_work.gin(shared))
    run = folder / "run"
    command = [sys.executable, "-m", "grpo_fn.run", "--gin_file", str(folder / "bench.gin"), "--run_dir", str(run)]
    used = watched(command, folder, run / "metrics.jsonl", threads=threads, deadline=deadline)
    return of_ours(metrics_by_step(run, torn_end=False), warm_up, used)


def of_ours(metrics: Mapping[int, dict[str, float | None]], warm_up: int, used: Used) -> Measured:
    """The figures of metrics.jsonl. time/total is from the end of one step's record to the end of the next one's.

    The evaluation that ends every run of ours is no part of a step: the other side has none.
    """
    every = [line for step, line in metrics.items() if step > 0]
    steps = every[warm_up:]
    phases = sorted({name for line in steps for name in line if name.startswith("time/")} - {"time/total", EVALUATION})
    return Measured(
        seconds=[line["time/total"] - line.get(EVALUATION, 0.0) for line in steps],
        rows=[line["generation/rows"] for line in steps],
        length=[line["generation/tokens"] / line["generation/rows"] for line in steps],
        phases={name: [line.get(name, 0.0) for line in steps] for name in phases},
        processor=used.processor / len(every),
        used=used,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        calls=[line["episode/tool_calls"] for line in steps if "episode/tool_calls" in line],
    )


def trl(shared: dict[str, Any], folder: Path, *, python: Path, warm_up: int, threads: int, deadline: float) -> Measured:
    """GRPOTrainer on the work, timed by a callback (bench_trl_side.py)."""
    folder.mkdir()
    (folder / "work.json").write_text(json.dumps(shared))
    out = folder / "out.json"
    command = [str(python), str(TOOLS / "bench_trl_side.py"), str(folder / "work.json"), str(out)]
    used = watched(command, folder, out, threads=threads, deadline=deadline)
    return of_trl(json.loads(out.read_text()), warm_up, used)


def of_trl(record: dict[str, Any], warm_up: int, used: Used) -> Measured:
    """What bench_trl_side.record wrote down."""
    steps = record["steps"][warm_up:]
    return Measured(
        seconds=[step["seconds"] for step in steps],
        rows=[step["rows"] for step in steps],
        length=[step["length"] for step in steps],
        phases={},
        processor=used.processor / len(record["steps"]),
        used=used,
        versions=record["versions"],
        calls=[step["calls"] for step in steps if "calls" in step],
    )


def watched(command: list[str], folder: Path, begun: Path, *, threads: int, deadline: float) -> Used:
    """Run a program to its end, looking at its memory; `begun` is the file that it makes before its first step.

    Raises RuntimeError with the end of what it printed when it fails, and TimeoutError when it takes too long.
    """
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    paths = [str(TOOLS), os.environ.get("PYTHONPATH", "")]
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    log, until = folder / "log.txt", time.monotonic() + deadline
    with log.open("w") as printed:
        program = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            used = looked_at(program, begun, until)
        finally:
            program.kill()
            program.wait()
    said = f"{' '.join(command[:3])}: {log.read_text()[-4000:]}"
    if program.returncode == -9 and time.monotonic() > until:
        raise TimeoutError(f"not over after {deadline:.0f} s; {said}")
    if program.returncode:
        raise RuntimeError(f"ended with {program.returncode}; {said}")
    return used


def looked_at(program: subprocess.Popen[bytes], begun: Path, until: float) -> Used:
    """Look at the program until it ends.

    Not ru_maxrss: what a process had before exec counts there, and that was this process.
    """
    status, before, peak, helpers, looks = Path(f"/proc/{program.pid}/status"), 0.0, 0.0, 0.0, 0
    began = spent = 0.0
    while program.poll() is None and time.monotonic() < until:
        held = sizes(status)
        peak = max(peak, held.get("VmHWM", 0.0))
        spent = max(spent, processor(program.pid))
        if not before and begun.exists():
            before, began = held.get("VmRSS", 0.0), spent
        if looks % 20 == 0:  # to look for them means to look at every process of the machine
            helpers = max(helpers, of_helpers(program.pid))
        looks += 1
        time.sleep(POLL)
    return Used(peak + helpers, before, spent - began)


def sizes(status: Path) -> dict[str, float]:
    """The kernel's figures about a process, in bytes; none of one that is ending."""
    try:
        lines = [line.split() for line in status.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): 1024.0 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def processor(pid: int) -> float:
    """Seconds of processor that a program has had; none of one that is ending."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def of_helpers(pid: int) -> float:
    """What the processes that a program has started hold, in bytes."""
    try:
        return float(sum(child.memory_info().rss for child in psutil.Process(pid).children(recursive=True)))
    except psutil.Error:
        return 0.0
