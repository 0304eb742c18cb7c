"""What more ranks gain and cost, and what a checkpoint takes from a step: `tools/bench scaling` and `checkpoint`.

`scaling` starts the same step under torchrun on each number of ranks: the same rows are sampled and trained on, shared
by the ranks. `checkpoint` takes steps with no save, with one that the step waits for, and with one written beside it.
With GPUs, one rank a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_rank import SIZES
from transformers import AutoModelForCausalLM


def ranks(args: argparse.Namespace) -> Iterable[str]:
    """Start the ranks; the table, as markdown lines."""
    numbers = [int(n) for n in (args.ranks or ("1" if args.what == "checkpoint" else "1,2")).split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SIZES[args.size].config()).save_pretrained(model)
        found = [started(args, n, model, Path(folder) / f"{n}.json") for n in numbers]
    yield f"{SIZES[args.size]}; {args.scale}; median of {args.steps} steps"
    yield ""
    yield from TABLES[args.what](numbers, found)


def started(args: argparse.Namespace, ranks: int, model: Path, out: Path) -> dict[str, Any]:
    """What the ranks measured, started together; raises RuntimeError with what they printed when they fail."""
    own = [args.what, "--scale", args.scale, "--size", args.size, "--steps", str(args.steps)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(Path(__file__).with_name("bench_rank.py")),
    ]
    environment = {"OMP_NUM_THREADS": "1"} if not torch.cuda.is_available() else {}
    done = subprocess.run(
        [*command, *own, "--model", str(model), "--out", str(out)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())


def scaling_table(numbers: Sequence[int], found: Sequence[dict[str, float]]) -> Iterable[str]:
    """A row for each number of ranks, against the first."""
    yield "| ranks | sampled tokens/s | trained tokens/s | a step's collectives, share |"
    yield "|---|---|---|---|"
    for n, row in zip(numbers, found, strict=True):
        rates = " | ".join(f"{row[k]:,.0f} ({row[k] / found[0][k]:.2f}x)" for k in ("sampled", "trained"))
        yield f"| {n} | {rates} | {row['talking']:.0%} |"


def checkpoint_table(numbers: Sequence[int], found: Sequence[dict[str, float]]) -> Iterable[str]:
    """A row for each number of ranks."""
    yield "| ranks | GB a rank | step | and a save it waits for | and a save beside it | lost, of the save |"
    yield "|---|---|---|---|---|---|"
    for n, row in zip(numbers, found, strict=True):
        plain, waiting, beside = row["plain"], row["waiting"], row["beside"]
        lost = (beside - plain) / max(1e-9, waiting - plain)
        yield (
            f"| {n} | {row['gigabytes']:.2f} | {plain:.2f} s | {waiting:.2f} s ({waiting / plain:.2f}x) | "
            f"{beside:.2f} s ({beside / plain:.2f}x) | {lost:.0%} |"
        )


TABLES = {"scaling": scaling_table, "checkpoint": checkpoint_table}
