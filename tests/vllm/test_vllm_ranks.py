"""Engines in the ranks of a torchrun job: one in each, or one over all of them, through vLLM's external launcher."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import seat_of, small

pytestmark = pytest.mark.xdist_group("vllm")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 2
PATIENCE = 300.0  # seconds; two processes import vLLM
CLOSE = 1e-4


@pytest.fixture(scope="module", params=[1, 2], ids=["an engine in each", "one engine over both"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """How many ranks an engine has, and what every rank reported."""
    folder = tmp_path_factory.mktemp("job")
    # Four heads of queries and one of keys and values: those are held by both ranks, the queries divided.
    seat_of(small("qwen2", tied=True, num_attention_heads=4, hidden_size=128), folder / "model", dtype=torch.float32)
    return request.param, launched(folder, request.param)


def launched(folder: Path, tensor_parallel: int) -> list[dict[str, Any]]:
    path = os.pathsep.join(map(str, (ROOT, HERE.parent, HERE.parent / "helpers", HERE)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *(str(HERE / "one_rank.py"), str(folder / "model"), str(tensor_parallel), str(folder)),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_samples_are_the_policys(job: tuple[int, list[dict[str, Any]]]) -> None:
    assert all(gap < CLOSE for rank in job[1] for gap in rank["gaps"])


def test_all_ranks_see_the_same_rows(job: tuple[int, list[dict[str, Any]]]) -> None:
    tensor_parallel, (first, second) = job
    assert first["engines"] == RANKS // tensor_parallel
    assert first["completions"] == second["completions"]
    assert [row[-1] not in first["ends"] for row in first["completions"]] == first["truncated"]


def test_episodes_are_the_same_rows_for_one_rank_and_for_two(job: tuple[int, list[dict[str, Any]]]) -> None:
    """Environments answer in another order on each. One engine over both has the same numbers for both."""
    for rank in job[1]:
        assert rank["turns"] == job[1][0]["turns by itself"]
        assert rank["rows"] == job[1][0]["rows by itself"]
    assert "144" in job[1][0]["turns"]


def test_the_parts_of_an_engine_hold_together_what_was_sent(job: tuple[int, list[dict[str, Any]]]) -> None:
    assert job[1][0]["held"] == job[1][1]["held"] != "None"


def test_a_rank_that_loses_a_tensor_makes_its_engine_stale(job: tuple[int, list[dict[str, Any]]]) -> None:
    tensor_parallel, ranks = job
    assert [rank["stale"] for rank in ranks] == ([False, True] if tensor_parallel == 1 else [True, True])


def test_the_trainers_process_group_outlives_the_engine(job: tuple[int, list[dict[str, Any]]]) -> None:
    assert [rank["ranks"] for rank in job[1]] == [RANKS] * RANKS
