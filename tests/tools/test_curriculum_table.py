"""The table of curricula: read from finished runs, differences paired by seed."""

import json
from pathlib import Path

import curriculum_table
import pytest


def finished(folder: Path, name: str, seed: int, accuracies: list[float]) -> None:
    where = folder / f"{name}-{seed}"
    where.mkdir(parents=True)
    (where / "summary.json").write_text("{}")
    rows = [{"step": 0, "eval/accuracy": accuracies[0], "eval/task/one": 0.5}]
    for step, accuracy in enumerate(accuracies[1:], 1):
        shares = {"curriculum/share/one": 0.25, "curriculum/share/two": 0.75}
        tasks = {"eval/task/one": accuracy, "eval/task/two": accuracy / 2}
        rows.append({"step": step, "eval/accuracy": accuracy, "generation/rows": 8.0, **shares, **tasks})
    (where / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_differences_are_of_the_same_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, base in enumerate((0.2, 0.4, 0.6)):
        finished(tmp_path, "uniform_arms", seed, [base, base, base])
        finished(tmp_path, "progress_bandit", seed, [base, base, base + 0.1 + 0.01 * (seed - 1)])
    flags = ["--runs", str(tmp_path), "--seeds", "0", "1", "2", "3", "--table_only"]
    assert curriculum_table.main(flags) == 0
    *_, plain, bandit = capsys.readouterr().out.splitlines()
    assert plain == "| `uniform_arms` | 3 | 16 | 0.400 | 0.400 | 0.400 |  |  | 0.25 0.75 | 0.40 0.20 |"
    # 4.303 * 0.01 / sqrt(3) either way
    paired = "+0.100 (+0.075 to +0.125) | +0.050 (+0.038 to +0.062)"
    assert bandit == f"| `progress_bandit` | 3 | 16 | 0.400 | 0.500 | 0.450 | {paired} | 0.25 0.75 | 0.50 0.25 |"


def test_a_curriculum_that_it_does_not_know_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert curriculum_table.main(["--runs", str(tmp_path), "--curricula", "best", "--table_only"]) == 2
    assert "got ['best'], wanted some of ['uniform_arms'" in capsys.readouterr().err
