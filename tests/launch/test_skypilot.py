"""tools/launch/skypilot.yaml: fields that SkyPilot has, and its run command as two nodes would run it."""

import re
from pathlib import Path

import pytest
import yaml
from launch.launching import LAUNCH, ROOT, agent_arguments, environment, listening_python, run
from torch.distributed import run as torchrun

TEXT = (LAUNCH / "skypilot.yaml").read_text()
TASK = yaml.safe_load(TEXT)
SET_BY_SKYPILOT = {"NODE_IPS", "NODE_RANK", "NUM_NODES", "NUM_GPUS_PER_NODE", "TASK_ID"}  # SKYPILOT_...


def node(rank: int, folder: Path, **envs: str) -> list[str]:
    """What a node of two asks agent.py for."""
    skypilot = {
        "NODE_IPS": "10.0.0.4\n10.0.0.5",
        "NODE_RANK": rank,
        "NUM_NODES": 2,
        "NUM_GPUS_PER_NODE": 8,
        "TASK_ID": "t-1",
    }
    assert skypilot.keys() == SET_BY_SKYPILOT
    more = {f"SKYPILOT_{name}": str(value) for name, value in skypilot.items()}
    env = environment(PYTHON=str(listening_python(folder))) | TASK["envs"] | more | envs
    done = run(["bash", "-c", TASK["run"]], env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"node {rank} of 2, 8 GPUs; MASTER_ADDR=10.0.0.4 MASTER_PORT=29400\n"
    return agent_arguments(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_nodes_meet_at_the_first_and_run_the_same(tmp_path: Path, rank: int) -> None:
    script, *given = node(rank, tmp_path, MODEL="a b", DATA="/runs/data")
    assert script == "tools/launch/agent.py"
    asked = torchrun.get_args_parser().parse_args(given)
    assert (asked.nnodes, asked.nproc_per_node, asked.max_restarts) == ("2", "8", 3)
    assert (asked.rdzv_backend, asked.rdzv_endpoint, asked.rdzv_id) == ("c10d", "10.0.0.4:29400", "t-1")
    assert asked.rdzv_conf.startswith(f"is_host={int(rank == 0)},")
    assert (asked.module, asked.training_script) == (True, "grpo_fn.run")
    params = ["--gin_param", "MODEL=a b", "--gin_param", "DATA=/runs/data"]
    assert asked.training_script_args == ["--run_dir", "/runs/grpo", "--gin_file", "run/gsm8k.gin", *params]


@pytest.mark.slow
def test_the_program_takes_the_flags(tmp_path: Path) -> None:
    """Those of another task, as a user would set them: a dry run of them."""
    given = node(0, tmp_path, GIN_FILE="run/arithmetic.gin", RUN_DIR=str(tmp_path / "run"))
    flags = given[given.index("grpo_fn.run") + 1 :]
    done = run([environment()["PYTHON"], "-m", "grpo_fn.run", *flags[:4], "--dry_run", "--ranks", "16"], environment())
    assert done.returncode == 0, done.stderr
    assert "memory, each of 16" in done.stdout


def test_it_has_skypilots_fields_and_reads_what_skypilot_sets() -> None:
    assert TASK.keys() == {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
    assert {*re.findall(r"SKYPILOT_(\w+)", TASK["run"])} == SET_BY_SKYPILOT
    assert all(isinstance(value, str) for value in TASK["envs"].values())
    assert (ROOT / "gin" / TASK["envs"]["GIN_FILE"]).is_file()
    vllm = re.search(r"vllm==\S+(?=')", (LAUNCH / "Dockerfile").read_text())
    assert vllm is not None
    assert vllm[0] in TASK["setup"]
