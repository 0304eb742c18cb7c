"""tools/launch/skypilot.yaml: fields that SkyPilot has, and its run command as two nodes would run it."""

import re
from pathlib import Path

import pytest
import yaml
from launch.launching import LAUNCH, ROOT, agent_arguments, environment, listening_python, run
from torch.distributed import run as torchrun

TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_both_nodes_meet_at_the_first_and_run_the_same(tmp_path: Path, rank: int) -> None:
    sky = {
        "NODE_IPS": "10.0.0.4\n10.0.0.5",
        "NODE_RANK": rank,
        "NUM_NODES": 2,
        "NUM_GPUS_PER_NODE": 8,
        "TASK_ID": "t-1",
    }
    assert {*re.findall(r"SKYPILOT_(\w+)", TASK["run"])} == sky.keys()
    env = environment(PYTHON=str(listening_python(tmp_path))) | TASK["envs"] | {"MODEL": "a b", "DATA": "/runs/data"}
    done = run(["bash", "-c", TASK["run"]], env | {f"SKYPILOT_{name}": str(value) for name, value in sky.items()})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"node {rank} of 2, 8 GPUs; MASTER_ADDR=10.0.0.4 MASTER_PORT=29400\n"
    script, *words = agent_arguments(tmp_path)
    assert script == "tools/launch/agent.py"
    args = torchrun.get_args_parser().parse_args(words)
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("c10d", "10.0.0.4:29400", "t-1")
    assert args.rdzv_conf.startswith(f"is_host={int(rank == 0)},")
    assert (args.module, args.training_script) == (True, "grpo_fn.run")
    params = ["--gin_param", "MODEL=a b", "--gin_param", "DATA=/runs/data"]
    assert args.training_script_args == ["--run_dir", "/runs/grpo", "--gin_file", "run/gsm8k.gin", *params]


def test_the_task_has_skypilots_fields_our_gin_file_and_the_dockerfiles_vllm() -> None:
    assert TASK.keys() == {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
    assert all(isinstance(value, str) for value in TASK["envs"].values())
    assert (ROOT / "gin" / TASK["envs"]["GIN_FILE"]).is_file()
    assert re.search(r"vllm==\S+(?=')", (LAUNCH / "Dockerfile").read_text())[0] in TASK["setup"]
