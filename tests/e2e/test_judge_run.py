"""Runs that a judge rewards: killed, resumed and replayed without the judge, they are what they were."""

import json
import random
import signal
from pathlib import Path

import pytest
from e2e.running import TESTS, AtPhase, board, command, finish, metrics, timeless
from judge_server import JudgeServer, Reply, judge_server, mark_in, said

from grpo_fn.replay import main as replay

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


def stored(run_dir: Path) -> dict[str, bytes]:
    """What a run has written about its steps, by file."""
    files = [*(run_dir / "rollouts").iterdir(), *(run_dir / "eval").iterdir(), *(run_dir / "judge").iterdir()]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files if path.name[0] != "."}


def test_without_the_judge_a_killed_run_goes_on_and_its_steps_are_replayed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with judge_server(moody) as up:
        argv = judged(cache, run, up.url)
        # Every step is taken, the newest checkpoint is that of step 4, and step 6 may not be written yet.
        assert finish(argv, out, AtPhase("checkpoint", 3, signal.SIGKILL)) == -signal.SIGKILL, out.read_text()
    lines, files, digests = timeless(run), stored(run), (run / "digests.jsonl").read_text()
    assert len(lines) >= 6
    assert finish(argv, out) == 0, out.read_text()
    assert "resumed after step 4" in out.read_text()
    assert timeless(run)[: len(lines)] == lines
    assert {name: stored(run)[name] for name in files} == files
    assert (run / "digests.jsonl").read_text().startswith(digests)
    capsys.readouterr()
    assert replay([str(run), "--step", "6"]) == 0
    assert f"step 6 of {run} is what it was" in capsys.readouterr().out
    check_figures(run, up)


def check_figures(run: Path, up: JudgeServer) -> None:
    """What the judge cost is in the metrics and in TensorBoard; the record has every request, once."""
    rows = metrics(run)[1:]
    record = (run / "judge" / "rank_0.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["requests"] for line in record) == len(up.questions)
    assert all(row["judge/requests"] > 0 and row["time/judge_requests"] > 0 for row in rows)
    calm = [row for row in rows if row["judge/failures"] == 0]
    assert all(row["judge/completion_tokens"] == 7 * (row["judge/requests"] - row["judge/retries"]) for row in calm)
    assert sum(row["judge/unreadable"] for row in rows) > 0
    assert any(row["reward/invalid"] > 0 for row in rows)  # no verdict is no 0
    tags = board(run).Tags()["scalars"]
    assert {"judge/requests", "judge/retries", "judge/prompt_tokens", "judge/failures", "reward/judge"} <= {*tags}


def test_a_judge_that_is_not_there_ends_a_run_before_it_begins(cache: Path, tmp_path: Path) -> None:
    with judge_server(moody, models=("judge-2", "judge-3")) as up:
        assert finish(judged(cache, tmp_path / "run", up.url), tmp_path / "out") == 2
    assert "got judge.Judge.model 'judge-1', expected one that" in (tmp_path / "out").read_text()
    assert not (tmp_path / "run").exists()
