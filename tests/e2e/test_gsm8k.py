"""The published GSM8K through the whole program with a small random model: every row, without a hitch."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from e2e.running import TESTS, AtPhase, finish, metrics, outcome
from published import published

from experiments.tiny import models
from grpo_fn.core import prng
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards import math
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.reward_workers.reward_pool import RewardPool
from grpo_fn.tasks import benchmarks
from grpo_fn.tasks.task import train_problems

PROJECT = TESTS.parent
TRAIN, TEST = 7473, 1319


@pytest.fixture(scope="module")
def data() -> Path:
    return published("gsm8k")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = models.Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=2048)
    path = tmp_path_factory.mktemp("gsm8k") / "model"
    models.make_random(shape, path, seed=0, chat=True)
    return path


def gsm8k_command(model: Path, data: Path, run_dir: Path, **changes: object) -> list[str]:
    bindings = {"MODEL": model, "DATA": data, **{k.replace("__", "."): v for k, v in changes.items()}}
    params = [part for name, value in bindings.items() for part in ("--gin_param", f"{name}={value}")]
    return ["--gin_file", "run/gsm8k.gin", *params, "--run_dir", str(run_dir)]


SHORT = {
    "STEPS": 3,
    "PROMPTS": 3,
    "EVAL_PROBLEMS": 8,
    "MAX_NEW_TOKENS": 4,
    "step__Algorithm__group_size": 2,
    "sections__Checkpoints__every": 1,
    "sections__Evaluation__every": 2,
}


@pytest.mark.slow
def test_a_few_steps_on_the_real_files_resume_exactly(model: Path, data: Path, tmp_path: Path) -> None:
    argv = gsm8k_command(model, data, tmp_path / "whole", **SHORT)
    assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert f"epochs of {TRAIN}" in log
    assert "held-out problems     8" in log
    rows = metrics(tmp_path / "whole")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 3]
    assert all(row["reward/invalid"] == 0 for row in rows[1:])
    again = gsm8k_command(model, data, tmp_path / "again", **SHORT)
    assert finish(again, tmp_path / "out", AtPhase("train", 3, signal.SIGKILL)) == -signal.SIGKILL
    assert finish(again, tmp_path / "out") == 0
    # The checkpoint of step 2 may not be there yet; that of step 1 is, or there would be no other.
    assert re.search("resumed after step [12] ", (tmp_path / "again" / "log.txt").read_text())
    assert outcome(tmp_path / "again") == outcome(tmp_path / "whole")


def scores(pool: RewardPool, golds: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    asked = [Problem(i, "", gold, {}) for i, gold in enumerate(golds)]
    return pool.score(math.correct, asked, [Completion(rf"\boxed{{{answer}}}", 9, False) for answer in answers])


def test_every_published_answer_is_right_for_itself_and_wrong_for_another(data: Path) -> None:
    task = benchmarks.gsm8k(data=str(data), template="{question}")
    assert (task.size, len(task.test)) == (TRAIN, TEST)
    train = train_problems(task, prng.key(0, device="cpu"), 0, TRAIN)
    golds = [problem.answer for problem in (*train, *task.test)]
    with RewardPool(workers=1, timeout_per_completion=5.0, memory_mb=1024, stop_on_error=True) as pool:
        assert scores(pool, golds, golds) == [1.0] * (TRAIN + TEST)
        assert scores(pool, golds, [f"{gold}1" for gold in golds]) == [0.0] * (TRAIN + TEST)


@pytest.mark.slow
def test_every_row_goes_through_prompt_sampling_verification_and_loss(model: Path, data: Path, tmp_path: Path) -> None:
    prompts = 141  # 53 steps of 141 are the 7,473 rows, once each
    changes = {"STEPS": 53, "PROMPTS": prompts, "EVAL_PROBLEMS": TEST, "MAX_NEW_TOKENS": 2}
    changes |= {"step__Algorithm__group_size": 2, "sections__PolicyUpdate__micro_tokens": 65536}
    changes |= {"sections__Evaluation__every": 0, "sections__Logging__keep_rollouts": 53}
    code = finish(gsm8k_command(model, data, tmp_path / "run", **changes), tmp_path / "out", seconds=1800)
    assert code == 0, (tmp_path / "out").read_text()
    rows = metrics(tmp_path / "run")
    assert rows[0]["eval/problems"] == rows[-1]["eval/problems"] == TEST
    assert rows[0]["eval/unscorable"] == rows[-1]["eval/unscorable"] == 0
    assert all(row["reward/invalid"] == 0 for row in rows[1:])
    seen = [
        row
        for n in range(1, 54)
        for row in rollout_store.load_rollouts(next((tmp_path / "run").glob(f"*/step_{n:06d}.*")))
    ]
    assert len(seen) == 2 * TRAIN
    assert {row["uid"] for row in seen} == set(range(TRAIN))
    published = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    asked = {(row["prompt"].partition("\nPlease reason")[0], row["answer"]) for row in seen}
    assert asked == {(row["question"], benchmarks.gsm8k_answer(row["answer"])) for row in published}
    assert all(row["length"] > 0 for row in seen)
