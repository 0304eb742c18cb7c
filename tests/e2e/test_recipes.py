"""The recipes of experiments/: each takes two real steps, made small, and its launcher starts what it says."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.faults import job
from e2e.running import TESTS, finish, metrics
from launch.launching import Started, environment, program, run
from published import published

from grpo_fn import sandbox, tiny_model
from grpo_fn.config import load_config
from grpo_fn.shell.checkpoint.run_dir import write_config
from grpo_fn.shell.logging import rollout_store

PROJECT = TESTS.parent
RECIPES = PROJECT / "experiments"
TINY = {"STEPS": 2, "PROMPTS": 2, "EVAL_PROBLEMS": 4, "MAX_NEW_TOKENS": 16, "step.Algorithm.group_size": 4}
TINY |= {"sections.Checkpoints.every": 1, "sections.Evaluation.every": 1, "reward_pool.RewardPool.workers": 1}
TINY |= {"reward_pool.RewardPool.timeout_per_completion": 60.0}  # a loaded machine imports slowly
# A reward that even a random model gets now and then, beside the recipe's own: a step without signal trains nothing.
SIGNAL = """
from __gin__ import dynamic_registration
from e2e import rewards
from grpo_fn.rewards import code
from grpo_fn.rewards import combine
from grpo_fn.rewards import math

combine.combine.parts = [{verdict}, @rewards.digits]
combine.combine.weights = [1.0, 1.0]
"""


# What makes a recipe smaller, besides TINY.
SMALLER: dict[str, dict[str, Any]] = {
    "code_slurm_v100": {"sections.PolicyUpdate.initial_scale": 1024.0},
    "math_k8s_16gpu": {},
    "qwen_math_2gpu": {"sections.Compute.attention": '"sdpa"', "mesh.Parallelism.compile": "@blocks.eager"},
    "gsm8k_lora_8gb": {},
    "cluster_practice": {"TEST_SIZE": 4, "models.TinyModel.steps": 5, "step.Algorithm.prompts": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; the longest problem of MATH has to fit in bytes."""
    path = tmp_path_factory.mktemp("recipes") / "model"
    flags = ["--chat_template", "--hidden", "32", "--layers", "2", "--positions", "8192"]
    assert tiny_model.main([*flags, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of MATH under the field names of OpenMathInstruct-2, of which there is no copy here."""
    rows = map(json.loads, (published("math") / "train.jsonl").read_text().splitlines()[:40])
    named = ({"problem": r["problem"], "expected_answer": r["answer"], "problem_source": "math"} for r in rows)
    path = tmp_path_factory.mktemp("openmath") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in named))
    return path


def needs_sandbox() -> None:
    if all(sandbox.available()[kind] for kind in ("bubblewrap", "namespaces")):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")


def data_of(name: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a recipe cannot do without; the test is skipped when the published data or a sandbox is missing."""
    match name:
        case "qwen_math_2gpu":
            return {"DATA": published("math"), "GSM8K": published("gsm8k")}
        case "code_slurm_v100":
            needs_sandbox()
            return {"DATA": published("mbpp")}
        case "math_k8s_16gpu":
            rows, data = request.getfixturevalue("instructions"), published("math") / "math500.jsonl"
            read = {"rows.read_problems.read": "@rows.file", "rows.file.path": repr(str(rows))}
            return {"DATA": data} | {f"openmath/{knob}": value for knob, value in read.items()}
        case "gsm8k_lora_8gb":
            return {"DATA": published("gsm8k")}
        case _:
            return {"models.TinyModel.cache": repr(str(request.getfixturevalue("cache")))}


def flags(name: str, bindings: Mapping[str, Any]) -> list[str]:
    params = [part for knob, value in bindings.items() for part in ("--gin_param", f"{knob}={value}")]
    return ["--gin_file", f"experiments/{name}/run.gin", *params]


def small(
    name: str, model: Path, folder: Path, request: pytest.FixtureRequest, *, smaller: Mapping[str, Any] | None = None
) -> list[str]:
    """The arguments of a run of seconds, by the local sampler: tests/vllm has the engines."""
    tiny = {**TINY, "MODEL": model}
    if name == "cluster_practice":  # it makes its own model, and has no macros for these
        tiny = {k: v for k, v in tiny.items() if k not in ("MODEL", "PROMPTS", "EVAL_PROBLEMS")}
    verdict = "@code.all_tests_pass" if name == "code_slurm_v100" else "@math.correct"
    (folder / "signal.gin").write_text(SIGNAL.format(verdict=verdict))
    shrunk = SMALLER[name] if smaller is None else smaller
    first, file, *params = flags(name, data_of(name, request) | tiny | dict(shrunk))
    over = [part for name in ("engine/local.gin", folder / "signal.gin") for part in ("--gin_file", str(name))]
    return [first, file, *over, *params, "--run_dir", str(folder / "run")]


def learnt(run_dir: Path, *, overflows: bool) -> None:
    """Two steps, each with an update of gradients that were not all zero; and an evaluation before and after."""
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [(row["train/skipped_step"], row["reward/invalid"]) for row in rows[1:]] == [(0, 0)] * 2
    assert all(row["loss/grad_norm"] > 0 for row in rows[1:])
    assert rows[-1]["optimizer/step"] + (rows[-1]["optimizer/overflows"] if overflows else 0) == 2
    assert {"eval/accuracy"} <= rows[0].keys() & rows[-1].keys()
    assert (run_dir / "model" / "config.json").exists()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SMALLER)
def test_a_recipe_made_small_takes_two_steps_with_updates(
    name: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    argv = small(name, model, tmp_path, request)
    if name == "qwen_math_2gpu":
        over = job(tmp_path / "job", 2, argv)
        assert over.code == 0, over.everything()
        row = metrics(tmp_path / "run")[-1]
        assert {"eval/task/gsm8k", "eval/task/math"} <= row.keys()
        assert any(key.startswith("eval/level/") for key in row)
    else:
        assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    learnt(tmp_path / "run", overflows=name == "code_slurm_v100")
    assert (tmp_path / "run" / "adapter").exists() == (name in ("math_k8s_16gpu", "gsm8k_lora_8gb"))
    dtype = {"code_slurm_v100": "float16", "cluster_practice": "float32"}.get(name, "bfloat16")
    assert f'"{dtype}"' in (tmp_path / "run" / "config.gin").read_text().replace("'", '"')


@pytest.mark.slow
def test_weights_that_lie_on_the_host_make_the_same_run(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A check of cluster_practice: offload."""
    runs = []
    for name, more in {"kept": [], "offloaded": ["--gin_file", "scale/offload.gin"]}.items():
        (folder := tmp_path / name).mkdir()
        argv = [*small("cluster_practice", model, folder, request), *more]
        assert finish(argv, folder / "out") == 0, (folder / "out").read_text()
        files = sorted((folder / "run" / "rollouts").glob("step_*"))
        rows = [row for file in files for row in rollout_store.load_rows(file)]
        sampled = [(row["uid"], row["tokens"], row["reward"]) for row in rows]
        runs.append((sampled, metrics(folder / "run")[-1]["loss/grad_norm"]))
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "limits"),
    [("python_tool", "gsm8k", {"MAX_NEW_TOKENS": 16}), ("mbpp_retry", "mbpp", {"MAX_TURN_TOKENS": 8})],
)
def test_two_steps_of_a_run_file_whose_tool_runs_programs_in_a_sandbox(
    name: str, data: str, limits: dict[str, int], model: Path, tmp_path: Path
) -> None:
    needs_sandbox()
    given = {**TINY, "MODEL": model, "DATA": published(data), **limits}
    params = [part for knob, value in given.items() for part in ("--gin_param", f"{knob}={value}")]
    argv = ["--gin_file", f"run/{name}.gin", *params, "--run_dir", str(tmp_path / "run")]
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")[1:]
    assert [(row["episode/environment_failures"], row["reward/invalid"]) for row in rows] == [(0, 0)] * 2
    stored = rollout_store.load_rows(tmp_path / "run" / "rollouts" / "step_000001.jsonl.gz")
    assert all(row["turns"] for row in stored)


# -- what starts them


def test_the_job_goes_to_slurm_with_a_run_folder_that_the_next_one_finds(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f'#!/usr/bin/env bash\nprintf "%s\\n" "$RUN_DIR" "$@" >"{tmp_path}/asked"\n')
    launch = RECIPES / "code_slurm_v100" / "launch.sh"
    done = run([launch, "--gin_param", "MODEL=a b"], environment(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, *asked = (tmp_path / "asked").read_text().splitlines()
    assert folder == "runs/code_slurm_v100"
    script = asked.index("tools/launch/slurm.sbatch")
    assert {"--nodes=1", "--gpus-per-node=2", "--mem=64G"} <= {*asked[:script]}
    file = "experiments/code_slurm_v100/run.gin"
    assert asked[script + 1 :] == ["--gin_file", file, "--gin_param", "MODEL=a b"]
    more = {"GRES": "gpu:volta:4", "CONSTRAINT": "v100", "MEM": "0", "NODES": "2"}
    assert run([launch], environment(tmp_path, **more), cwd=tmp_path).returncode == 0
    _, *asked = (tmp_path / "asked").read_text().splitlines()
    options = asked[: asked.index("tools/launch/slurm.sbatch")]
    assert options[1:] == ["--nodes=2", "--mem=0", "--gres=gpu:volta:4", "--constraint=v100"]


@pytest.mark.slow
def test_a_job_of_another_configuration_is_refused_before_it_is_queued(model: Path, tmp_path: Path) -> None:
    """A dry run queues nothing either."""
    program(tmp_path, "sbatch", f'#!/usr/bin/env bash\necho "$@" >>"{tmp_path}/asked"\n')
    given = [part for knob in (f"MODEL={model}", f"DATA={published('mbpp')}") for part in ("--gin_param", knob)]
    folder = tmp_path / "run"
    queued = partial(run, env=environment(tmp_path, RUN_DIR=str(folder)), cwd=tmp_path)
    launch = [RECIPES / "code_slurm_v100" / "launch.sh", *given]
    dry = queued([*launch, "--dry_run"])
    assert dry.returncode == 0, dry.stderr
    assert "memory, each of 2" in dry.stdout
    config = load_config(["experiments/code_slurm_v100/run.gin"], given[1::2])
    folder.mkdir()
    write_config(folder, config.text, config.fingerprint, config.hparams)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    done = queued([*launch, "--gin_param", "PROMPTS=32"])
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: got run folder {folder} of another configuration, expected the same one")
    assert not (tmp_path / "asked").exists()


def test_the_launchers_of_one_host_start_what_they_say(tmp_path: Path) -> None:
    listen = f'if [[ $1 == *agent.py ]]; then printf "%s\\n" "$@" >"{tmp_path}/agent_args"; exit; fi'
    listening = program(tmp_path, "python", f'#!/usr/bin/env bash\n{listen}\nexec "{sys.executable}" "$@"\n')
    for name, ranks, files in (("qwen_math_2gpu", 2, 1), ("gsm8k_lora_8gb", 1, 2)):
        local = ["--gin_file", "engine/local.gin"]
        done = run([RECIPES / name / "launch.sh", *local], environment(PYTHON=str(listening)), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        agent_args = (tmp_path / "agent_args").read_text().splitlines()
        assert f"--nproc-per-node={ranks}" in agent_args
        assert agent_args[-4:] == ["--run_dir", f"runs/{name}", *local]
        named = [Path(agent_args[i + 1]) for i, word in enumerate(agent_args[:-2]) if word == "--gin_file"]
        assert len(named) == files
        assert all(path.exists() and path.resolve().parent == RECIPES / name for path in named)


HEALTHY = 'exec "$REAL" -m http.server --bind 127.0.0.1 --directory "$FOLDER/pages" "$PORT"'


def evaluated(folder: Path, *, training: str, server: str = HEALTHY) -> dict[str, str]:
    """The environment of qwen_math_2gpu's launcher: a Python of which vLLM is `server` and the training `training`."""
    (folder / "pages").mkdir()
    (folder / "pages" / "health").touch()
    lines = [
        "#!/usr/bin/env bash",
        'if [[ $1 == *agent.py ]]; then printf "%s\\n" "$@" >"$FOLDER/agent_args"; ' + training + "; fi",
        "if [[ $* == *find_spec* || $* == *version* ]]; then exit 0; fi",
        "if [[ $2 == vllm.* ]]; then",
        '  echo $$ >"$FOLDER/server"; echo "$CUDA_VISIBLE_DEVICES" >"$FOLDER/card"',
        '  printf "%s\\n" "$@" >"$FOLDER/asked"',
        f"  {server}",
        "fi",
        'exec "$REAL" "$@"',
    ]
    listening = program(folder, "python", "\n".join(lines) + "\n")
    program(folder, "nvidia-smi", '#!/usr/bin/env bash\nprintf "GPU %s\\n" 0 1\n')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"PYTHON": str(listening), "PORT": str(port), "FOLDER": str(folder), "REAL": sys.executable}
    return environment(folder, RUN_DIR=str(folder / "run"), **given)


QWEN = [RECIPES / "qwen_math_2gpu" / "launch.sh", "--gin_param", "MODEL=a/model"]


def over(folder: Path) -> bool:
    """Whether the server is gone."""
    return not psutil.pid_exists(int((folder / "server").read_text()))


def test_the_evaluation_server_is_there_while_the_training_is(tmp_path: Path) -> None:
    env = evaluated(tmp_path, training='kill -0 "$(<"$FOLDER/server")" && exit 0; exit 1')
    done = run(QWEN, env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert over(tmp_path)
    asked, agent_args = ((tmp_path / name).read_text().splitlines() for name in ("asked", "agent_args"))
    assert {"a/model", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.15", env["PORT"]} <= {*asked}
    assert any("grpo_file" in word for word in asked)  # not NCCL, which takes no card twice
    assert (tmp_path / "card").read_text() == "1\n"
    assert agent_args[-4:] == [*QWEN[1:], "--gin_param", f'EVAL_SERVERS=["http://127.0.0.1:{env["PORT"]}"]']


@pytest.mark.slow
def test_a_signal_is_the_trainings_and_the_server_stays_until_that_has_saved(tmp_path: Path) -> None:
    there = 'kill -0 "$(<"$FOLDER/server")" && exit 75; exit 1'
    saves = f"""trap '{there}' TERM; echo >"$FOLDER/on"; while :; do sleep 0.1; done"""
    with Started(QWEN, evaluated(tmp_path, training=saves), tmp_path / "log", cwd=tmp_path) as launch:
        launch.until((tmp_path / "on").exists)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.code() == 75, launch.log.read_text()
    assert over(tmp_path)


def test_without_an_evaluation_server_there_is_no_training(tmp_path: Path) -> None:
    done = run(QWEN, evaluated(tmp_path, training="exit 0", server="echo no such model; exit 1"), cwd=tmp_path)
    assert done.returncode == 2
    for part in ("no such model", "the evaluation server ended as it started"):
        assert part in done.stderr
    assert not (tmp_path / "agent_args").exists()


def test_every_test_that_the_practice_names_is_there() -> None:
    folder = RECIPES / "cluster_practice"
    text = (folder / "check.sh").read_text() + (folder / "README.md").read_text()
    named = set(re.findall(r"\btests/[\w/]+(?:\.py(?:::\w+)?)?", text))
    assert len(named) > 10
    for name in named:
        path, _, test = name.partition("::")
        assert (PROJECT / path).exists(), name
        assert not test or f"def {test}(" in (PROJECT / path).read_text(), name


@pytest.mark.slow
def test_the_real_launcher_and_compiled_blocks_on_two_ranks(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept = {"sections.Compute.attention": '"sdpa"'}
    _, _, *argv = small("qwen_math_2gpu", model, tmp_path, request, smaller=kept)
    env = environment(MODULE="grpo_fn.run") | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(PROJECT)))}
    done = run([RECIPES / "qwen_math_2gpu" / "launch.sh", *argv], env)
    assert done.returncode == 0, done.stderr
    learnt(tmp_path / "run", overflows=False)
