"""`python -m grpo_fn.eval` measures what training measures, of any weights that a run leaves, and refuses the rest."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.running import TESTS, command, finish, metrics
from published import published

from grpo_fn.eval import __main__ as evaluation
from grpo_fn.shell.logging import rollout_store
from grpo_fn.shell.model import hf, tiny
from grpo_fn.trainer.model_source import locate

PROJECT = TESTS.parent
STEPS = [0, 2, 4, 6]
ASKED = {"sections__Evaluation__samples": 3, "sections__Evaluation__ks": "(1, 3)"}
JUDGES = {"sections__Evaluation__graders": "[@rewards.named, @rewards.digits]"}


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated four times, with samples, by two judges."""
    folder = tmp_path_factory.mktemp("trained")
    code = finish(command(cache, folder / "run", **ASKED, **JUDGES), folder / "out")
    assert code == 0, (folder / "out").read_text()
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that may be harmed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def measured(model: Path | str, out: Path, *flags: str, **changes: object) -> dict[str, Any]:
    """results.json of an evaluation in this process, where jaxtyping looks on."""
    params = [part for name, value in changes.items() for part in ("--gin_param", f"{name.replace('__', '.')}={value}")]
    assert evaluation.main(["--model", str(model), "--out", str(out), *params, *flags]) == 0
    return json.loads((out / "results.json").read_text())


def figures(results: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results["figures"].items() if name.startswith("eval/")}


def of_training(run: Path, step: int) -> dict[str, float]:
    return {name: value for name, value in metrics(run)[step].items() if name.startswith("eval/")}


# -- in training


def test_training_leaves_every_answer_it_was_measured_by(trained: Path) -> None:
    assert rollout_store.evaluation_steps(trained / "eval") == STEPS
    for step in STEPS:
        rows = rollout_store.load_rows(trained / "eval" / f"step_{step}.jsonl")
        assert len(rows) == 16
        said = of_training(trained, step)
        assert said.keys() >= {"eval/accuracy", "eval/digits", "eval/pass@1", "eval/pass@3", "eval/maj@3"}
        verdicts = [row["verdict"] for row in rows]
        assert said["eval/accuracy"] == verdicts.count("right") / 16
        assert said["eval/digits"] == pytest.approx(sum(row["scores"]["digits"] for row in rows) / 16)
        passed = [[sample["verdict"] == "right" for sample in row["samples"]] for row in rows]
        assert said["eval/pass@1"] == pytest.approx(sum(map(sum, passed)) / 48)
        assert said["eval/pass@3"] == pytest.approx(sum(map(any, passed)) / 16)
        assert all(row.keys() >= {"uid", "prompt", "answer", "meta", "text", "marked", "length"} for row in rows)
    assert of_training(trained, 0) != of_training(trained, 6)


# -- of what a run leaves


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("what", ["", "model", "checkpoints/step_4"])
def test_the_command_finds_what_training_found(trained: Path, tmp_path: Path, what: str) -> None:
    step = 4 if what.endswith("4") else 6
    flags = ["--gin_file", str(trained / "config.gin")] if what == "model" else []
    results = measured(trained / what, tmp_path / "out", *flags)
    assert figures(results) == of_training(trained, step)
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == (trained / "eval" / f"step_{step}.jsonl").read_bytes()
    assert results["weights"] == str(trained / (what or "model"))
    assert results["parameters"] == 17_568
    assert results["figures"].keys() >= {"time/load", "time/evaluate", "time/score", "time/total"}
    again = measured(trained / what, tmp_path / "again", "--gin_file", str(tmp_path / "out" / "config.gin"))
    assert figures(again) == figures(results)
    assert again["fingerprint"] == results["fingerprint"]


def test_an_evaluation_leaves_the_run_as_it_is(trained: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    measured(trained / "checkpoints" / "step_4", tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_the_newer_weights_of_a_run_that_went_on_after_its_end_are_evaluated(run: Path) -> None:
    assert locate(str(run), warn=pytest.fail).checkpoint is None
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "steps": 4}))  # as if the export were of an earlier end
    assert locate(str(run), warn=pytest.fail).path == str(run / "checkpoints" / "step_6")


# -- bad input


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *said: str) -> None:
    capsys.readouterr()
    assert evaluation.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") or "\nerror: " in err
    for text in said:
        assert text in err, f"{text!r} is not in:\n{err}"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))


HARM: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "a run that saved nothing": (
        lambda run: [shutil.rmtree(run / name) for name in ("model", "checkpoints")],
        "",
        ["without a whole checkpoint, expected one that has saved"],
    ),
    "a broken checkpoint": (
        lambda run: damage(run / "checkpoints" / "step_4" / "__0_0.distcp"),
        "checkpoints/step_4",
        ["step_4, which is broken: __0_0.distcp has sha256", "expected a whole one"],
    ),
    "no such checkpoint": (lambda run: None, "checkpoints/step_5", ["step_5, which is broken", "is missing"]),
    "a checkpoint of another model": (
        lambda run: (shutil.rmtree(run / "model"), make_other(run / "model")),
        "checkpoints/step_4",
        ["of another model: ", "expected", "weights differ"],
    ),
    "no tokenizer": (
        lambda run: [path.unlink() for path in (run / "model").glob("token*")],
        "",
        ["tokenizer", "expected"],
    ),
}


def make_other(folder: Path) -> None:
    shape = tiny.Qwen2Sizes(vocabulary=352, hidden=64, layers=1, heads=2, kv_heads=1, intermediate=32, positions=128)
    tiny.make_random(shape, folder, seed=0, chat=False)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("fault", HARM)
def test_a_model_that_is_not_there_or_not_whole(
    run: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(shutil.copy(run / "config.gin", tmp_path / "config.gin"))
    harm, what, said = HARM[fault]
    harm(run)
    out = tmp_path / "out"
    refused(["--model", str(run / what), "--gin_file", config, "--out", str(out)], capsys, *said)
    assert not out.exists()


def test_a_checkpoint_by_itself_needs_its_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = shutil.move(run / "checkpoints" / "step_4", tmp_path / "step_4")
    said = ["in no run folder", "expected DIR/checkpoints/step_4"]
    refused(["--model", str(alone), "--gin_file", str(run / "config.gin")], capsys, *said)


BAD_KNOBS = {
    "too few samples": (["sections.Evaluation.samples=2"], ["ks: got [1, 3] with 2 samples", "expected each of them"]),
    "too long a completion": (["MAX_NEW_TOKENS=500"], ["prompts: got 16 of 16 held-out ones over", "expected none"]),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("fault", BAD_KNOBS)
def test_knobs_that_do_not_fit_are_refused_before_weights_are_loaded(
    trained: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    params, said = BAD_KNOBS[fault]
    given = [part for param in params for part in ("--gin_param", param)]
    refused(["--model", str(trained), "--out", str(tmp_path / "out"), *given], capsys, *said)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_weights")
def test_a_gin_file_without_the_bindings_names_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.gin").write_text('include "base.gin"\n')
    argv = ["--model", str(trained), "--gin_file", str(tmp_path / "bare.gin")]
    expected = "grpo_fn.trainer.sections.Data: got no value for task, expected"
    refused(argv, capsys, expected, "SEED: got no value")
    refused(["--model", str(trained / "model")], capsys, "--gin_file: got none", "is no run folder")


@pytest.mark.usefixtures("no_weights")
def test_results_are_not_written_over(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("mine")
    refused(["--model", str(trained), "--out", str(tmp_path / "out")], capsys, "with results.json of another")
    assert (tmp_path / "out" / "results.json").read_text() == "mine"
    (tmp_path / "file").write_text("")
    refused(["--model", str(trained), "--out", str(tmp_path / "file")], capsys, "a file; expected a folder")


def test_a_failure_at_work_is_no_bad_input_and_leaves_no_results(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_fn.shell.sampler.local.local_sampler import LocalSampler

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("got a nan")

    monkeypatch.setattr(LocalSampler, "sample", fail)
    with pytest.raises(ValueError, match="got a nan") as caught:
        evaluation.main(["--model", str(trained), "--out", str(tmp_path / "out")])
    assert caught.value.__notes__ == [f"while evaluating {trained / 'model'}"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.gin"]


# -- the command line and the gin files


def test_help_needs_no_torch_and_a_missing_model_is_said() -> None:
    code = (
        "import sys; from grpo_fn.eval import __main__ as m; m.flags().format_help(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=60).returncode == 0
    done = subprocess.run([sys.executable, "-m", "grpo_fn.eval"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--model" in done.stderr


# -- the published data


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.Qwen2Sizes(vocabulary=259, hidden=32, layers=1, heads=1, kv_heads=1, intermediate=32, positions=4096)
    path = tmp_path_factory.mktemp("random") / "model"
    tiny.make_random(shape, path, seed=0, chat=True)
    return path


def test_math_by_level_and_subject_with_samples(random_model: Path, tmp_path: Path) -> None:
    flags = ["--gin_file", "eval/math500.gin", "--gin_file", "eval/samples.gin"]
    changes = {"DATA": published("math"), "EVAL_PROBLEMS": 30, "MAX_NEW_TOKENS": 4, "SAMPLES": 2, "KS": "(1, 2)"}
    results = measured(random_model, tmp_path / "out", *flags, **changes)
    rows = rollout_store.load_rows(tmp_path / "out" / "samples.jsonl")
    published_rows = [json.loads(line) for line in (published("math") / "math500.jsonl").read_text().splitlines()]
    places = [[row["answer"] for row in published_rows].index(row["answer"]) for row in rows]
    assert len({*places}) >= 25, "a few answers come twice"
    counts = Counter(str(row["level"]) for row in published_rows)
    for level, part in results["parts"]["level"].items():  # a share of every level, not the front of the file
        assert abs(part["problems"] - 30 * counts[level] / len(published_rows)) < 1
    levels = {*counts}
    assert results["parts"]["level"].keys() == levels
    assert {name for name in results["figures"] if name.startswith("eval/level/")} == {
        f"eval/level/{v}" for v in levels
    }
    assert sum(part["problems"] for part in results["parts"]["subject"].values()) == 30
    names = {"eval/accuracy", "eval/lenient", "eval/boxed", "eval/pass@2", "eval/maj@2", "eval/subject/Algebra"}
    assert results["figures"].keys() >= names
    assert results["figures"]["eval/unscorable"] == 0
