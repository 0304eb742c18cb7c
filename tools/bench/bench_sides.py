"""The two programs of `tools/bench`: how each is started, watched until it ends, and what it left behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil

from grpo_fn.core.json_lines import metrics_by_step

TOOLS = Path(__file__).resolve().parent
EVALUATION = "time/evaluate"
POLL = 0.05  # seconds between two looks at a program's memory


class Measured(NamedTuple):
    """One side, over one start or several; warm-up is left out."""

    steps: list[dict[str, float]]  # seconds, rows, length (mean of completions), calls of tools; time/... of ours
    peak: float  # bytes that the program and its helper processes had resident at most
    versions: dict[str, str]

    def rate(self) -> float:
        """Completions per second of the median step."""
        return median(self.of("rows")) / median(self.of("seconds"))

    def of(self, name: str) -> list[float]:
        """That figure of every step; 0 where it did not come up."""
        return [step.get(name, 0.0) for step in self.steps]

    def mean(self, name: str) -> float:
        """Of that figure over the steps."""
        return mean(self.of(name))


def together(several: list[Measured]) -> Measured:
    """The steps of several starts; the highest peak."""
    steps = [step for start in several for step in start.steps]
    return Measured(steps, max(start.peak for start in several), several[0].versions)


def ours(shared: dict[str, Any], folder: Path, *, warm_up: int, threads: int, deadline: float) -> Measured:
    """`python -m grpo_fn.run` on the work, timed by its own metrics."""
    from bench_work import gin_flags  # needs torch

    folder.mkdir()
    run = folder / "run"
    command = [sys.executable, "-m", "grpo_fn.run", *gin_flags(shared), "--run_dir", str(run)]
    peak = watched(command, folder, threads=threads, deadline=deadline)
    return of_ours(metrics_by_step(run, torn_end=False), warm_up, peak)


def of_ours(metrics: Mapping[int, dict[str, float | None]], warm_up: int, peak: float) -> Measured:
    """The figures of metrics.jsonl. time/total is from the end of one step's record to the end of the next one's.

    The evaluation that ends every run of ours is no part of a step: the other side has none.
    """
    steps = []
    for line in [line for step, line in metrics.items() if step > 0][warm_up:]:
        phases = {name: x for name, x in line.items() if name.startswith("time/") and name != EVALUATION}
        seconds, rows = phases.pop("time/total") - line.get(EVALUATION, 0.0), line["generation/rows"]
        steps.append({"seconds": seconds, "rows": rows, "length": line["generation/tokens"] / rows, **phases})
        if "episode/tool_calls" in line:
            steps[-1]["calls"] = line["episode/tool_calls"]
    return Measured(steps, peak, {name: version(name) for name in ("torch", "transformers")})


def trl(shared: dict[str, Any], folder: Path, *, python: Path, warm_up: int, threads: int, deadline: float) -> Measured:
    """GRPOTrainer on the work, timed by a callback (bench_trl_side.py)."""
    folder.mkdir()
    (folder / "work.json").write_text(json.dumps(shared))
    out = folder / "out.json"
    command = [str(python), str(TOOLS / "bench_trl_side.py"), str(folder / "work.json"), str(out)]
    peak = watched(command, folder, threads=threads, deadline=deadline)
    record = json.loads(out.read_text())
    return Measured(record["steps"][warm_up:], peak, record["versions"])


def watched(command: list[str], folder: Path, *, threads: int, deadline: float) -> float:
    """Run a program to its end; returns the most bytes that it and the processes it started had resident.

    Raises RuntimeError with the end of what it printed when it fails, and TimeoutError when it takes too long.
    """
    settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    paths = [str(TOOLS), os.environ.get("PYTHONPATH", "")]
    settings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
    log, until, looks, peak, helpers = folder / "log.txt", time.monotonic() + deadline, 0, 0.0, 0.0
    with log.open("w") as printed:
        program = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            while program.poll() is None and time.monotonic() < until:
                peak = max(peak, high_water(program.pid))
                if looks % 20 == 0:  # to look for them means to look at every process of the machine
                    helpers = max(helpers, of_helpers(program.pid))
                looks += 1
                time.sleep(POLL)
        finally:
            late = program.poll() is None
            program.kill()
            program.wait()
    output = f"{' '.join(command[:3])}: {log.read_text()[-4000:]}"
    if late:
        raise TimeoutError(f"not over after {deadline:.0f} s; {output}")
    if program.returncode:
        raise RuntimeError(f"ended with {program.returncode}; {output}")
    return peak + helpers


def high_water(pid: int) -> float:
    """The most bytes that a program had resident so far; 0 for one that is ending.

    Not ru_maxrss: what a process had before exec counts there, and that was this process.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def of_helpers(pid: int) -> float:
    """What the processes that a program has started hold, in bytes."""
    try:
        return float(sum(child.memory_info().rss for child in psutil.Process(pid).children(recursive=True)))
    except psutil.Error:
        return 0.0
