"""GRPO on programs: the published MBPP through the whole program with a small random model, sandbox included."""

import signal
from pathlib import Path

import pytest
from e2e.running import AtPhase, finish, metrics, outcome
from published import published

from experiments.tiny import models
from grpo_fn import sandbox
from grpo_fn.config import load_config
from grpo_fn.core.problem import Completion
from grpo_fn.shell.logging import rollout_store

SHORT = {
    "STEPS": 2,
    "PROMPTS": 2,
    "EVAL_PROBLEMS": 4,
    "MAX_NEW_TOKENS": 8,
    "step.Algorithm.group_size": 2,
    "sections.Checkpoints.every": 1,
    "sections.Evaluation.every": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = models.Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=2048)
    path = tmp_path_factory.mktemp("mbpp") / "model"
    models.make_random(shape, path, seed=0, chat=True)
    return path


@pytest.fixture(scope="module")
def params(model: Path) -> list[str]:
    data = published("mbpp")
    if all(sandbox.available()[name] for name in ("bubblewrap", "namespaces")):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")
    return [f"{name}={value}" for name, value in {"MODEL": model, "DATA": data, **SHORT}.items()]


def argv(params: list[str], run_dir: Path) -> list[str]:
    flags = [part for param in params for part in ("--gin_param", param)]
    return ["--gin_file", "run/mbpp_code.gin", *flags, "--run_dir", str(run_dir)]


@pytest.mark.slow
def test_a_run_on_programs_resumes_exactly_and_judges_every_time_alike(params: list[str], tmp_path: Path) -> None:
    assert finish(argv(params, tmp_path / "whole"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "whole")
    assert all(row["reward/invalid"] == row["reward/timeouts"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    judged = [rollout_store.load_evaluation(tmp_path / "whole" / "eval" / f"step_{n}.jsonl") for n in (0, 1)]
    asked = [[(row["uid"], row["prompt"]) for row in part] for part in judged]
    assert asked[0] == asked[1]
    again = argv(params, tmp_path / "again")
    assert finish(again, tmp_path / "out", AtPhase("train", 2, signal.SIGKILL)) == -signal.SIGKILL
    assert finish(again, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    assert outcome(tmp_path / "again") == outcome(tmp_path / "whole")


def test_the_runs_own_reward_separates_reference_programs_from_others(params: list[str]) -> None:
    kwargs = load_config(["run/mbpp_code.gin"], params).kwargs()
    passed, share = kwargs["rewards"].reward.keywords["parts"]
    for problem in kwargs["data"].task().test[:3]:
        right = Completion(f"Here it is.\n```python\n{problem.answer}\n```\n", 40, False)
        wrong = Completion("```python\nimport sys\nsys.exit(0)\n```", 10, False)
        assert (passed(problem, right), share(problem, right)) == (1.0, 1.0)
        assert (passed(problem, wrong), share(problem, wrong)) == (0.0, 0.0)
