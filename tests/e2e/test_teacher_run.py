"""Runs with a teacher: what they learn, record and refuse, and that they go on and repeat to the last bit."""

import signal
from pathlib import Path

import pytest
import torch
from e2e.running import command, ended, finish, metrics, outcome, signal_after_step
from transformers import AutoTokenizer
from vllm_stub import Stub

from grpo_fn import replay as replaying
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.policy.fsdp import AVERAGE, WEIGHTS

OPD = ["--gin_file", "algo/opd.gin", "--gin_file", "scale/teacher.gin"]


@pytest.fixture(scope="module")
def teacher(whole: Path) -> str:
    """The model of a run without a teacher."""
    return str(whole / "model")


def taught(cache: Path, run_dir: Path | None, teacher: str, *flags: str, **changes: object) -> list[str]:
    return command(cache, run_dir, *OPD, "--gin_param", f"TEACHER={teacher!r}", *flags, **changes)


@pytest.mark.slow
def test_the_policy_comes_nearer_to_its_teacher(cache: Path, teacher: str, tmp_path: Path) -> None:
    assert finish(taught(cache, tmp_path / "run", teacher), tmp_path / "out") == 0, (tmp_path / "out").read_text()
    rows = [row for row in metrics(tmp_path / "run") if "teacher/reverse_kl" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["teacher/reverse_kl"] < 0.5 * rows[0]["teacher/reverse_kl"]
    assert all(row["teacher/gap_abs"] > 0 > row["teacher/gap_min"] for row in rows)
    assert all(row["advantage/zero_variance_groups"] == 0 for row in rows)  # rewards compare nothing here
    assert replaying.main([str(tmp_path / "run"), "--step", "3"]) == 0


REFERENCE = """
from __gin__ import dynamic_registration
from grpo_fn.algo import objective

objective.policy_objective.beta = 1e-12
objective.policy_objective.kl = @objective.k3
"""


@pytest.mark.slow
def test_the_kl_to_the_start_is_that_to_a_reference_and_changes_nothing(
    cache: Path, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "over.gin").write_text(REFERENCE)
    watched = command(cache, tmp_path / "watched", sections__Logging__start_kl_every=1)
    referred = command(cache, tmp_path / "kept", "--gin_file", str(tmp_path / "over.gin"))
    for argv in (watched, referred):
        assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    found = [row.get("loss/kl_start") for row in metrics(tmp_path / "watched")][1:]
    assert found == pytest.approx([row["loss/kl"] for row in metrics(tmp_path / "kept")[1:]], rel=1e-3, abs=1e-9)
    assert abs(found[0]) < 1e-9 < 1e-6 < found[5]
    ours, theirs = outcome(tmp_path / "watched"), outcome(whole)
    rows = [{k: v for k, v in row.items() if k != "loss/kl_start"} for row in ours.pop("metrics")]
    assert (rows, ours) == (theirs.pop("metrics"), theirs)


SELF = ["--gin_file", "algo/sdpo.gin", "--gin_file", "scale/sibling_teacher.gin"]


@pytest.fixture(scope="module")
def alone(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is its own teacher: the average of its weights reads a sibling's completion."""
    folder = tmp_path_factory.mktemp("alone")
    assert finish(command(cache, folder / "run", *SELF), folder / "out") == 0, (folder / "out").read_text()
    return folder / "run"


def test_a_policy_that_teaches_itself_goes_on_from_its_average(cache: Path, alone: Path, tmp_path: Path) -> None:
    assert replaying.main([str(alone), "--step", "3"]) == 0
    argv = command(cache, tmp_path / "run", *SELF)
    assert ended(argv, tmp_path / "out", [signal_after_step(3, signal.SIGKILL)]) == [-9, 0]
    assert outcome(tmp_path / "run") == outcome(alone)
    rows = [row for row in metrics(alone) if "teacher/rows_taught" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert any(0 < row["teacher/rows_taught"] < 1 for row in rows)  # some rows have no right sibling
    newest = max((alone / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    averages = store.read_tensors(newest, AVERAGE)
    weights = store.read_tensors(newest, WEIGHTS)
    assert averages.keys() <= weights.keys()
    assert any(not torch.equal(x, weights[name]) for name, x in averages.items())


def test_a_run_learns_from_a_teacher_on_a_server_and_at_temperature_1_alone(
    cache: Path, alone: Path, tmp_path: Path
) -> None:
    stub = Stub()
    stub.tokenizer = AutoTokenizer.from_pretrained(alone / "model")
    stub.vocabulary = len(stub.tokenizer)
    served = ["--gin_file", "algo/opd.gin", "--gin_file", "engine/vllm_teacher.gin"]
    served += ["--gin_param", f"TEACHER_SERVERS = ['{stub.url}']"]
    try:
        argv = command(cache, tmp_path / "run", *served, STEPS=2)
        assert finish(argv, tmp_path / "out") == 0, (tmp_path / "out").read_text()
    finally:
        stub.kill()
    asked = [sent["prompt"] for path, sent in stub.calls if path == "/v1/completions"]
    assert len(asked) == 1 + 2 * 16  # the check, and each row of each step once
    assert all(row["teacher/reverse_kl"] > 0 for row in metrics(tmp_path / "run") if row["step"])
    warm = command(cache, None, *served, "--dry_run", sections__Sampling__temperature=0.7)
    assert finish(warm, tmp_path / "out") == 2
    assert "sections.Sampling.temperature: got 0.7 with a teacher on vLLM servers" in (tmp_path / "out").read_text()
