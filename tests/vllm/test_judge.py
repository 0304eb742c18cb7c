"""A judge on a real server: its answers score rows, what it refuses is None, and without it the record is enough."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import POSITIONS, seat_of, small
from test_dedicated import Process

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.rewards.judge import Judge, marked_score
from grpo_fn.shell.reward_workers.judge_client import JudgeRecord, check_endpoint
from grpo_fn.shell.reward_workers.reward_pool import Outcome, RewardError, RewardPool

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENS = 6  # of an answer
PROBLEM = Problem(1, "1", "2", {})


def share_of_letters(answer: str, mark: str) -> float | None:
    """What a model of random weights can be asked for."""
    return sum(letter.isalpha() for letter in answer) / len(answer) if answer else None


def judge_on(process: Process, **changes: Any) -> Judge:
    knobs = {
        **{"name": "judge", "endpoint": f"{process.url}/v1", "model": str(process.folder), "system": ""},
        **{"template": "{completion}{fence}{mark}", "read": share_of_letters, "concurrency": 4, "retries": 1},
        "sampling": {"temperature": 0.0, "max_tokens": TOKENS, "min_tokens": TOKENS},
        **{"backoff_seconds": 0.1, "request_seconds": 120.0, "batch_seconds": 300.0, "max_failures": 4},
        "api_key_variable": None,
    }
    return Judge(**{**knobs, **changes})


def judged(judge: Judge, texts: list[str], folder: Path) -> tuple[list[Outcome], dict[str, float]]:
    pool = RewardPool(workers=1, timeout_per_completion=60.0, memory_mb=1024, stop_on_error=True)
    pool.judge_record = JudgeRecord(folder, 0)
    with pool:
        rows = [PROBLEM._replace(uid=uid) for uid in range(len(texts))], [Completion(text, 1, False) for text in texts]
        return pool.judge(judge, *rows), dict(pool.costs)


def test_a_model_on_a_server_is_a_judge(tmp_path: Path) -> None:
    seat_of(small("qwen2", tied=True), tmp_path / "model", dtype=torch.float32)
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT)
    process = Process(tmp_path / "model", tmp_path / "log")
    try:
        process.wait()
        judge = judge_on(process)
        asyncio.run(check_endpoint(judge))
        with pytest.raises(
            ValueError, match=rf"got judge.Judge.model 'other', .* has: {re.escape(str(process.folder))}"
        ):
            asyncio.run(check_endpoint(judge_on(process, model="other")))
        was, costs = judged(judge, ["1 + 1", "2 + 2", "12"], tmp_path / "record")
        assert all(0.0 <= outcome.value <= 1.0 for outcome in was)
        assert (costs["requests"], costs["completion_tokens"], costs["failures"]) == (3, 3 * TOKENS, 0)
        assert costs["prompt_tokens"] > 0
        again, _ = judged(judge, ["1 + 1", "2 + 2", "12"], tmp_path / "again")  # greedy: the same answers
        assert [outcome.value for outcome in again] == [outcome.value for outcome in was]
        strict = judge_on(process, read=partial(marked_score, low=0.0, high=1.0), sampling={"max_tokens": TOKENS})
        assert [outcome.value for outcome in judged(strict, ["1"], tmp_path / "strict")[0]] == [None]
        refused, costs = judged(judge, ["1" * 3 * POSITIONS, "3"], tmp_path / "long")
        assert refused[0].value is None
        assert "status 400" in refused[0].reason
        assert refused[1].value is not None
        assert costs["failures"] == 1
        with pytest.raises(RewardError, match="status 404"):
            judged(judge_on(process, model="other"), ["1"], tmp_path / "other")
    finally:
        process.kill()
    assert judged(judge, ["1 + 1", "2 + 2", "12"], tmp_path / "record")[0] == was
    with pytest.raises(RewardError, match="got no answer to 1 questions in a row"):
        judged(judge_on(process, max_failures=1), ["4"], tmp_path / "record")
