"""What an engine is made of is looked for before a run makes or loads anything."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_fn.run import main
from grpo_fn.shell.sampler.local.local_sampler import local
from grpo_fn.shell.vllm import vllm_sampler, vllm_servers, vllm_transfer
from grpo_fn.trainer.requirements import check_engines

INSTALL = r"error: sampler: got no vllm \(.*\), expected it installed: pip install 'grpo-fn\[vllm\]'"
NO_GPU = r"error: transfer: got vllm_transfer\.NcclTransfer without a GPU here, expected vllm_transfer\.FileTransfer"
COLOCATED = ["--gin_file", "run/arithmetic_vllm.gin"]
BESIDE = [*COLOCATED, "--gin_param", "sections.Sampling.sampler=@local_sampler.local"]
BESIDE += ["--gin_param", "sections.Evaluation.async_sampler=@vllm_sampler.colocated_sampler"]
KNOBS = ["SERVERS=['http://127.0.0.1:9']", "vllm_transfer.NcclTransfer.host='127.0.0.1'"]
KNOBS += ["vllm_servers.DedicatedEngine.transfer=@vllm_transfer.NcclTransfer"]
SERVED = ["--gin_file", "run/arithmetic.gin", "--gin_file", "engine/vllm_dedicated.gin"]
SERVED += [word for knob in KNOBS for word in ("--gin_param", knob)]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with neither vLLM nor a GPU, whatever this one has."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("flags", "said"), [(COLOCATED, INSTALL), (BESIDE, INSTALL), (SERVED, NO_GPU)])
def test_a_run_without_its_engine_ends_before_anything_is_made_and_its_dry_run_does_not(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--run_dir", str(tmp_path / "run")]) == 2
    assert re.fullmatch(said + "\n", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    assert main([*flags, "--dry_run", "--run_dir", str(tmp_path / "run")]) == 0  # it may be about another machine


def served(transfer: partial) -> partial:
    return partial(vllm_sampler.dedicated_sampler, engine=partial(vllm_servers.DedicatedEngine, transfer=transfer))


def test_nccl_needs_vllm_too_and_files_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = partial(vllm_transfer.FileTransfer, folder="/nowhere")
    check_engines([partial(local, max_rows=4), served(files), None])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"transfer: got no vllm .* expected it installed"):
        check_engines([served(partial(vllm_transfer.NcclTransfer, host="127.0.0.1"))])
