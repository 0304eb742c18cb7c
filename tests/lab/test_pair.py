"""Paired runs: what may be compared, what is resumed, and the numbers in tables."""

import gzip
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from e2e.running import SMALL, TESTS, Forked, metrics

from grpo_fn.lab import pair as tool
from grpo_fn.lab import trials
from grpo_fn.lab.paired import paired_difference

BASE = ["--gin_file", "run/arithmetic.gin", "--gin_file", str(SMALL)]
HEAD = """from __gin__ import dynamic_registration
from grpo_fn import train
from grpo_fn.algo import step
from grpo_fn.core import sampling
from experiments.tiny import models
from grpo_fn.shell.policy import optimizer
from grpo_fn.tasks import arithmetic
from grpo_fn.trainer import sections
"""


def arm(folder: Path, name: str, text: str = "") -> str:
    path = folder / f"{name}.gin"
    path.write_text(f"{HEAD}{text}\n")
    return str(path)


def argv(folder: Path, *flags: str, **arms: str) -> list[str]:
    """The small run, in arms."""
    (folder / "models").mkdir(exist_ok=True)
    files = [arm(folder, name, text) for name, text in arms.items()]
    cache = folder / "cache.gin"  # in a file: arms begin from a folder, and make no model
    head = "from __gin__ import dynamic_registration\nfrom experiments.tiny import models\n"
    cache.write_text(f"{head}models.TinyModel.cache = {str(folder / 'models')!r}\n")
    return [*files, *BASE, "--gin_file", str(cache), "--gin_param", "STEPS=2", "--out", str(folder / "out"), *flags]


# -- what may be compared

SLOW = "optimizer.adamw.lr = 1e-4"


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("b", "flags", "complaint"),
    [
        ("train.train.steps = 3", [], "arm b, seed 0: got train.train.steps = 3, expected 2 as in a"),
        ("models.TinyModel.hidden = 64", [], "got models.TinyModel.hidden = 64, expected 32 as in a"),
        ("train.train.seed = 0", [], "arm b, seed 2: got train.train.seed = 0, expected 2 as in a"),
        ("optimizer.adamw.rate = 1", [], "arm b, seed 0: "),
        (SLOW, ["--seeds", "0", "0"], "--seeds: got 0 0, expected whole numbers from 0, each once"),
        (SLOW, ["--seed_knob", "models.TinyModel.seed"], "with which seeds 0 and 1 are both"),
        (SLOW, ["--jobs", "0"], "--jobs, --timeout: got 0"),
        (None, [], "got 1 arms"),
    ],
)
def test_arms_that_share_no_luck_are_refused_before_anything_starts(b, flags, complaint, tmp_path, capsys) -> None:
    assert tool.main(argv(tmp_path, *flags, a="", **({} if b is None else {"b": b}))) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_all_runs_by_seed_and_makes_nothing(tmp_path, capsys) -> None:
    assert tool.main(argv(tmp_path, "--dry_run", "--seeds", "4", "7", a="", b=SLOW)) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        "4 trials, 1 at a time",
        *("a-seed_4", "b-seed_4", "a-seed_7", "b-seed_7"),
    ]
    assert "SEED=7" in said[-1]
    assert not (tmp_path / "out").exists()


# -- the numbers

FIGURES = {"a": {"0": [0.0, 0.5], "1": [0.25, 1.0]}, "b": {"0": [0.0, 1.0], "1": [0.25, 1.25]}, "c": {"0": [0.0, 0.5]}}
TOKENS = {"a": [[1, 2], [3]], "b": [[1, 2], [4]], "c": [[1, 2], [3], [9]]}


def finished(out: Path, name: str, seed: str) -> None:
    """A run's folder, as far as the tool looks into it."""
    where = out / "trials" / f"{name}-seed_{seed}"
    (where / "rollouts").mkdir(parents=True)
    (where / "summary.json").write_text("{}")
    lines = [{"step": i + 1, "reward/mean": x, "odd": None} for i, x in enumerate(FIGURES[name][seed])]
    (where / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [json.dumps({"uid": 5, "g": g, "tokens": tokens}) for g, tokens in enumerate(TOKENS[name])]
    (where / "rollouts" / "step_000002.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    arms = {name: f"{name}.gin" for name in FIGURES}
    pairing = tool.Pairing(arms=arms, gin_files=[], gin_params=[], seed_knob="SEED", seeds=["0", "1"])
    for name, seeds in FIGURES.items():
        for seed in seeds:
            finished(tmp_path, name, seed)
    (tmp_path / tool.SPEC).write_text(json.dumps(vars(pairing)))
    return tmp_path


def test_every_arm_is_compared_with_the_first_over_the_seeds_of_both(out, capsys) -> None:
    assert tool.main(["--report", "--out", str(out), "--metric", "reward/mean"]) == 1  # c has no seed 1
    said = capsys.readouterr().out
    assert "not finished: c-seed_1" in said
    lines = [json.loads(line) for line in (out / "paired.jsonl").read_text().splitlines()]
    found = {(line["arm"], line["step"]): line for line in lines if line["metric"] == "reward/mean"}
    assert found.keys() == {(name, step) for name in "bc" for step in (1, 2)}
    expected = paired_difference([0.5, 1.0], [1.0, 1.25])
    assert found["b", 2] == {"arm": "b", "to": "a", "metric": "reward/mean", "step": 2, **expected._asdict()}
    assert (found["b", 1]["difference"], found["b", 1]["worth"]) == (0.0, None)
    assert (found["c", 2]["n"], found["c", 2]["low"]) == (1, None)
    shares = {line["arm"]: line["share"] for line in lines if line["metric"] == "same_samples"}
    assert shares == {"b": 0.5, "c": pytest.approx(2 / 3)}
    for text in (said, (out / "table.md").read_text()):
        assert f"{expected.difference:+.3g}" in text
        assert f"{expected.worth:.3g}" in text
        assert "equal" in text


def test_a_metric_that_no_pair_has_and_a_folder_without_pairs_are_named(out, capsys) -> None:
    assert tool.main(["--report", "--out", str(out), "--metric", "odd"]) == 2
    assert "--metric: got odd, which no finished pair of runs has" in capsys.readouterr().err
    for name in ("b", "c"):
        for seed in FIGURES[name]:
            (out / "trials" / f"{name}-seed_{seed}" / "summary.json").unlink()
    assert tool.main(["--report", "--out", str(out)]) == 2
    assert "got 2 finished runs of 6, none of which is the partner of one of a" in capsys.readouterr().err
    assert tool.main(["--report", "--out", str(out / "trials")]) == 2
    assert "pair.json" in capsys.readouterr().err


def test_the_steps_of_a_table_are_few_and_have_both_ends() -> None:
    assert tool.spread_steps({3, 1, 2}) == [1, 2, 3]
    found = tool.spread_steps({*range(0, 500, 5)})
    assert (len(found), found[0], found[-1]) == (tool.SHOWN_STEPS, 0, 495)


# -- the runs


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(trials, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


@pytest.mark.slow
def test_arms_begin_alike_and_a_second_call_runs_what_is_new(tmp_path, capsys, forked) -> None:
    out, arms = tmp_path / "out", {"a": "", "b": "optimizer.adamw.lr = 0.1"}
    assert tool.main(argv(tmp_path, "--seeds", "0", "--timeout", "300", **arms)) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.err.count(": done") == 2
    a, b = (metrics(out / "trials" / f"{name}-seed_0") for name in "ab")
    assert a[0]["eval/accuracy"] == b[0]["eval/accuracy"]
    assert a[1]["reward/mean"] == b[1]["reward/mean"]  # the first step samples alike
    lines = [json.loads(line) for line in (out / "paired.jsonl").read_text().splitlines()]
    shares = {line["step"]: line["share"] for line in lines if line["metric"] == "same_samples"}
    assert shares[1] == 1.0
    assert shares[2] < 1.0

    assert len(list((tmp_path / "models").iterdir())) == 1  # the warm start, once for both arms

    again = [*argv(tmp_path, "--seeds", "0", **arms), "--gin_param", "optimizer.adamw.beta1=0.8"]
    assert tool.main(again) == 2
    assert "with which" in capsys.readouterr().err
    assert tool.main(argv(tmp_path, "--seeds", "0", **{"b": arms["b"], "a": ""})) == 2
    assert "got first b, expected a, with which" in capsys.readouterr().err

    stamps = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/summary.json")}
    assert tool.main(argv(tmp_path, "--seeds", "0", **arms, c=SLOW)) == 0, capsys.readouterr().err
    assert capsys.readouterr().err.count(": started") == 1
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
