"""What an engine is made of is looked for before a run makes or loads anything."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_fn.eval import __main__ as evaluating
from grpo_fn.run import main
from grpo_fn.shell.sampler.local.local_sampler import local
from grpo_fn.shell.vllm import vllm_sampler, vllm_servers, vllm_transfer
from grpo_fn.trainer.requirements import check_engines

INSTALL = r"error: sampler: got no vllm \(.*\), expected it installed: pip install 'grpo-fn\[vllm\]'"
COLOCATED = ["--gin_file", "run/arithmetic_vllm.gin"]
BESIDE = [*COLOCATED, "--gin_param", "sections.Sampling.sampler=@local_sampler.local"]
BESIDE += ["--gin_param", "sections.Evaluation.async_sampler=@vllm_sampler.colocated_sampler"]
SERVED = ["--gin_file", "run/arithmetic.gin", "--gin_file", "engine/vllm_dedicated.gin"]
SERVED += [
    "--gin_param",
    "SERVERS=['http://127.0.0.1:9']",
    "--gin_param",
    "vllm_transfer.NcclTransfer.host='127.0.0.1'",
]
SERVED += ["--gin_param", "vllm_servers.DedicatedEngine.transfer=@vllm_transfer.NcclTransfer"]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither vLLM nor a GPU, whatever this one has."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def refused(code: int, text: str, folder: Path, said: str) -> None:
    assert code == 2
    assert re.fullmatch(said + "\n", text), text
    assert not folder.exists()


@pytest.mark.parametrize("flags", [COLOCATED, BESIDE], ids=["the sampler", "the evaluator"])
def test_a_run_without_its_engine_ends_before_anything_is_made(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*flags, "--run_dir", str(tmp_path / "run")])
    refused(code, capsys.readouterr().err, tmp_path / "run", INSTALL)


def test_so_does_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = evaluating.main([*COLOCATED, "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    refused(code, capsys.readouterr().err, tmp_path / "out", INSTALL)


def test_weights_do_not_go_by_nccl_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*SERVED, "--run_dir", str(tmp_path / "run")])
    said = r"error: transfer: got vllm_transfer\.NcclTransfer without a GPU here, expected vllm_transfer\.FileTransfer"
    refused(code, capsys.readouterr().err, tmp_path / "run", said)


def test_nor_with_one_but_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"transfer: got no vllm .* expected it installed"):
        check_engines(
            [partial(vllm_sampler.dedicated_sampler, engine=partial(vllm_servers.DedicatedEngine, transfer=by_nccl()))]
        )


@pytest.mark.parametrize("flags", [COLOCATED, BESIDE, SERVED])
def test_a_dry_run_may_be_about_another_machine(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--dry_run", "--run_dir", str(tmp_path / "run")]) == 0
    assert "rows a step" in capsys.readouterr().out


def test_engines_that_need_neither_are_let_pass() -> None:
    files = partial(vllm_transfer.FileTransfer, folder="/nowhere", keep=False)
    served = partial(vllm_sampler.dedicated_sampler, engine=partial(vllm_servers.DedicatedEngine, transfer=files))
    check_engines([partial(local, max_rows=4), served, None])


def by_nccl() -> partial:
    return partial(vllm_transfer.NcclTransfer, host="127.0.0.1")
