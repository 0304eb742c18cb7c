"""Runs that a judge rewards: killed, resumed and replayed without the judge, they are what they were."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from e2e.running import TESTS, AtPhase, board, command, finish, metrics, timeless
from judge_server import JudgeServer, Reply, judge_server, mark_in, said

from grpo_fn.replay.__main__ import main as replay

MOOD = random.Random(0)


def moody(question: str, before: int) -> Reply:
    """Another grade every time; now and then none, or not now."""
    mood = MOOD.random()
    if mood < 0.05:
        return Reply({"error": {"message": "overloaded"}}, 529)
    return said("I cannot say." if mood < 0.15 else f"So so.\n{mark_in(question)}: {MOOD.randint(0, 10)}")


def judged(cache: Path, run_dir: Path, endpoint: str, *flags: str, **changes: object) -> list[str]:
    files = ("--gin_file", str(TESTS / "e2e" / "judge.gin"))
    return command(cache, run_dir, *files, *flags, JUDGE_ENDPOINT=repr(endpoint), **changes)


def left(run_dir: Path) -> dict[str, object]:
    """All of a run that has to be the same after it is taken again."""
    files = [*(run_dir / "rollouts").iterdir(), *(run_dir / "eval").iterdir(), run_dir / "digests.jsonl"]
    record = {path.name: path.read_bytes() for path in (run_dir / "judge").iterdir()}
    return {
        "metrics": timeless(run_dir),
        **{str(path.relative_to(run_dir)): path.read_bytes() for path in files},
        **record,
    }


def test_without_the_judge_a_killed_run_goes_on_and_its_steps_are_replayed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with judge_server(moody) as up:
        argv = judged(cache, run, up.url)
        assert finish(argv, out, AtPhase("checkpoint", 3, signal.SIGKILL)) == -signal.SIGKILL, out.read_text()
    assert len(metrics(run)) == 7  # all steps are taken and logged, and the last checkpoint is after step 4
    assert up.questions
    was = left(run)
    assert finish(argv, out) == 0, out.read_text()
    assert "resumed after step 4" in out.read_text()
    assert left(run) == was
    capsys.readouterr()
    assert replay([str(run), "--step", "6"]) == 0
    assert f"step 6 of {run} is what it was" in capsys.readouterr().out
    check_figures(run, up)


def check_figures(run: Path, up: JudgeServer) -> None:
    """What the judge cost is in the metrics and in TensorBoard, and is what it was asked."""
    rows = metrics(run)[1:]
    entries = [json.loads(line) for line in (run / "judge" / "rank_0.jsonl").read_text().splitlines()]
    assert sum(entry["requests"] for entry in entries) == len(up.questions)
    assert 0 < sum(row["judge/requests"] for row in rows) <= len(up.questions)
    assert all(
        row["judge/completion_tokens"] == 7 * (row["judge/requests"] - row["judge/retries"])
        for row in rows
        if row["judge/failures"] == 0
    )
    assert sum(row["judge/unreadable"] for row in rows) > 0
    assert all(row["time/judge_requests"] > 0 for row in rows)
    assert any(row["reward/invalid"] > 0 for row in rows)  # no verdict is no 0
    tags = board(run).Tags()["scalars"]
    assert {"judge/requests", "judge/retries", "judge/prompt_tokens", "judge/failures", "reward/judge"} <= {*tags}


def test_a_judge_that_is_not_there_ends_a_run_before_it_begins(cache: Path, tmp_path: Path) -> None:
    with judge_server(moody, models=("judge-2", "judge-3")) as up:
        assert finish(judged(cache, tmp_path / "run", up.url), tmp_path / "out") == 2
    assert "got judge.Judge.model 'judge-1', wanted one that" in (tmp_path / "out").read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_judge_that_leaves_ends_the_run_which_goes_on_when_it_is_back(cache: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    limit = {"judge__Judge__max_failures": 2}
    asked: list[str] = []

    def leaving(question: str, before: int) -> Reply:
        asked.append(question)
        return Reply({"error": "gone"}, 503) if len(asked) > 120 else moody(question, before)

    with judge_server(leaving) as up:
        port = up.url
        code = finish(judged(cache, run, port, **limit), out)
        said_so = out.read_text()
        assert code not in (0, 2), said_so
        assert "got no answer to 2 questions in a row (judge.Judge.max_failures)" in said_so
        before = len((run / "judge" / "rank_0.jsonl").read_text().splitlines())
        asked.clear()
        assert finish(judged(cache, run, port, **limit), out) == 0, out.read_text()
    assert len((run / "judge" / "rank_0.jsonl").read_text().splitlines()) > before
    shutil.rmtree(run)
