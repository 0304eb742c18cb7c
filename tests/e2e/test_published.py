"""The published GSM8K and MBPP through the whole program with a small random model, tools and sandbox included."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from e2e.running import finish, metrics
from published import published

from experiments.tiny import models
from grpo_fn import sandbox
from grpo_fn.config import load_config
from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import math
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks import benchmarks
from grpo_fn.tasks.task import train_problems

TRAIN, TEST = 7473, 1319
SHORT = {"STEPS": 2, "PROMPTS": 2, "EVAL_PROBLEMS": 4, "step.Algorithm.group_size": 2}
SHORT |= {"sections.Checkpoints.every": 1, "sections.Evaluation.every": 1}
# A run file: its data, what makes it small, and how many turns and sampled tokens it leaves when it is not.
RUNS = {
    "gsm8k": ("gsm8k", {"MAX_NEW_TOKENS": 4}),
    "mbpp_code": ("mbpp", {"MAX_NEW_TOKENS": 8}),
    "python_tool": ("gsm8k", {"MAX_NEW_TOKENS": 16}),
    "mbpp_retry": ("mbpp", {"MAX_NEW_TOKENS": 24, "MAX_TURN_TOKENS": 8}),
}
LIMITS = {"python_tool": (8, 1024), "mbpp_retry": (3, 1152)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = models.Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=4096)
    path = tmp_path_factory.mktemp("published") / "model"
    models.make_random(shape, path, seed=0, chat=True)
    return path


def needs_sandbox() -> None:
    if all(sandbox.available()[kind] for kind in ("bubblewrap", "namespaces")):
        pytest.skip(f"NOT TESTED: no sandbox on this machine: {sandbox.available()}")


def arguments(name: str, model: Path, run_dir: Path, **more: object) -> list[str]:
    """Of a run file made small; where it judges programs, the test needs a sandbox."""
    data, limits = RUNS[name]
    if name != "gsm8k":
        needs_sandbox()
    given = {"MODEL": model, "DATA": published(data), **SHORT, **limits, **more}
    flags = [part for key, value in given.items() for part in ("--gin_param", f"{key}={value}")]
    return ["--gin_file", f"run/{name}.gin", *flags, "--run_dir", str(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "mbpp_code"])
def test_a_run_file_takes_its_steps_on_the_real_files(name: str, model: Path, tmp_path: Path) -> None:
    assert finish(arguments(name, model, tmp_path / "run"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["reward/invalid"] == row["reward/timeouts"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    assert name != "gsm8k" or f"epochs of {TRAIN}" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("name", [pytest.param("python_tool", marks=pytest.mark.slow), "mbpp_retry"])
def test_episodes_of_a_run_file_go_through_two_steps(name: str, model: Path, tmp_path: Path) -> None:
    assert finish(arguments(name, model, tmp_path / "run"), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["episode/environment_failures"] == row["reward/invalid"] == 0 for row in rows[1:])
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows)
    stored = rollout_store.load_rows(tmp_path / "run" / "rollouts" / "step_000001.jsonl.gz")
    assert len(stored) == 4
    assert all(row["turns"] for row in stored), json.dumps(stored)[:500]
    kwargs = load_config([f"run/{name}.gin"], ["MODEL='x'", "DATA='x'"]).kwargs()
    episodes, sampling = kwargs["episodes"], kwargs["sampling"]
    assert (episodes.max_turns, sampling.max_new_tokens) == LIMITS[name]
    assert sampling.max_new_tokens <= episodes.max_turns * episodes.max_turn_tokens
    assert sampling.max_total_tokens > sampling.max_new_tokens


def scores(pool: RewardPool, golds: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    asked = [Problem(i, "", gold, {}) for i, gold in enumerate(golds)]
    return pool.score(math.correct, asked, [Completion(rf"\boxed{{{answer}}}", 9, False) for answer in answers])


def test_published_answers_are_right_for_themselves_and_wrong_for_others_in_a_worker() -> None:
    """A tenth of them; every one: tests/rewards."""
    task = benchmarks.gsm8k(data=str(published("gsm8k")), template="{question}")
    assert (task.size, len(task.test)) == (TRAIN, TEST)
    train = train_problems(task, prng.key(0, device="cpu"), 0, TRAIN)
    golds = [problem.answer for problem in (*train, *task.test)][::10]
    with RewardPool(workers=1, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True) as pool:
        assert scores(pool, golds, golds) == [1.0] * len(golds)
        assert scores(pool, golds, [f"{gold}1" for gold in golds]) == [0.0] * len(golds)


def test_the_reward_for_programs_separates_reference_programs_from_others(model: Path, tmp_path: Path) -> None:
    params = arguments("mbpp_code", model, tmp_path)[3:-2:2]
    kwargs = load_config(["run/mbpp_code.gin"], params).kwargs()
    passed, share = kwargs["rewards"].reward.keywords["parts"]
    for problem in kwargs["data"].task().test[:3]:
        right = Completion(f"Here it is.\n```python\n{problem.answer}\n```\n", 40, False)
        wrong = Completion("```python\nimport sys\nsys.exit(0)\n```", 10, False)
        assert (passed(problem, right), share(problem, right)) == (1.0, 1.0)
        assert (passed(problem, wrong), share(problem, wrong)) == (0.0, 0.0)


@pytest.mark.slow
def test_rows_come_once_each_and_as_they_were_published(model: Path, tmp_path: Path) -> None:
    """A sixth of the epoch, through prompts, sampling, verification and loss."""
    steps, prompts = 9, 141
    more = {"STEPS": steps, "PROMPTS": prompts, "MAX_NEW_TOKENS": 2, "sections.PolicyUpdate.micro_tokens": 65536}
    more |= {
        "sections.Evaluation.every": 0,
        "sections.Checkpoints.every": steps,
        "sections.Logging.keep_rollouts": steps,
    }
    code = finish(arguments("gsm8k", model, tmp_path / "run", **more), tmp_path / "out", seconds=300)
    assert code == 0, (tmp_path / "out").read_text()
    assert all(row["reward/invalid"] == 0 for row in metrics(tmp_path / "run")[1:])
    folder = tmp_path / "run" / "rollouts"
    files = [folder / f"step_{n:06d}.jsonl.gz" for n in rollout_store.rollout_steps(folder)]
    seen = [row for file in files for row in rollout_store.load_rows(file)]
    assert len(seen) == 2 * len({row["uid"] for row in seen}) == 2 * steps * prompts
    rows = [json.loads(line) for line in (published("gsm8k") / "train.jsonl").read_text().splitlines()]
    asked = {(row["prompt"].partition("\nPlease reason")[0], row["answer"]) for row in seen}
    assert asked < {(row["question"], benchmarks.gsm8k_answer(row["answer"])) for row in rows}
    assert all(row["length"] > 0 for row in seen)
