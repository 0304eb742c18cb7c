"""What the launcher tests share: the environment of a launch, runs of the stand-in, stub programs on PATH."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "tools" / "launch"
PATIENCE = 240.0  # seconds that a launch may take; a loaded machine imports torch slowly


def environment(path: Path | None = None, **more: str) -> dict[str, str]:
    """Of a launch: this Python, the stand-in, nothing that a batch system or another launch left; `path` goes first."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "TORCHELASTIC", "CUDA_", "GRPO_FN_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "MAX_RESTARTS", "RUN_DIR", "GRACE", "PORT")
    }
    kept |= {"PYTHON": sys.executable, "MODULE": "launch.stand_in", "OMP_NUM_THREADS": "1"}
    kept["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    if path is not None:
        kept["PATH"] = os.pathsep.join((str(path), kept["PATH"]))
    return kept | more


def flags(folder: Path, **bindings: object) -> list[str]:
    """Flags of the stand-in, its gin file included; the run folder is `folder`/run."""
    gin = folder / "a.gin"
    gin.touch()
    params = [part for name, value in bindings.items() for part in ("--gin_param", f"{name}={value}")]
    return ["--gin_file", str(gin), "--run_dir", str(folder / "run"), *params]


def run(argv: Sequence[str | Path], env: Mapping[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; PATIENCE is the deadline."""
    return subprocess.run(
        [str(arg) for arg in argv], env=env, capture_output=True, text=True, timeout=PATIENCE, **{"cwd": ROOT} | how
    )


class Started:
    """A launch in the background, in its own session, with its output in a file; ended when the block is left."""

    def __init__(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path, cwd: Path = ROOT) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(arg) for arg in argv], env=env, cwd=cwd, stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def code(self) -> int:
        """The exit code, once it is over; the log is in the error when it does not end."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(self.log.read_text()) from None

    def until(self, so: Callable[[], bool]) -> None:
        """Wait until it is so; fail when the launch ends before."""
        end = time.monotonic() + PATIENCE
        while not so():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)


def trace(run_dir: Path) -> list[dict[str, Any]]:
    """A line for every step of every rank."""
    path = run_dir / "trace.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(run_dir: Path, rank: int = 0) -> list[int]:
    """The steps that a rank took, in order."""
    return [line["step"] for line in trace(run_dir) if line["rank"] == rank]


def program(folder: Path, name: str, text: str) -> Path:
    """An executable in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def listening_python(folder: Path) -> Path:
    """A Python that writes down what agent.py was called with, NUL between arguments, and is itself for all else."""
    listen = f'if [[ $1 == *tools/launch/agent.py ]]; then printf "%s\\0" "$@" >"{folder}/agent_arguments"; exit; fi'
    return program(folder, "listening_python", f'#!/usr/bin/env bash\n{listen}\nexec "{sys.executable}" "$@"\n')


def agent_arguments(folder: Path) -> list[str]:
    """What that Python was called with."""
    return (folder / "agent_arguments").read_bytes().decode().split("\0")[:-1]


def documented(start: str) -> list[str]:
    """The commands of docs/running/cluster.md that begin so."""
    lines = (ROOT / "docs" / "running" / "cluster.md").read_text().splitlines()
    return [line.strip() for line in lines if line.startswith(f"    {start}")]
