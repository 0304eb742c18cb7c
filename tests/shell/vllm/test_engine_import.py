"""What vLLM's import does to the process is undone where the trainer goes by it."""

import os
import sys
from pathlib import Path

import pytest

from grpo_fn.shell.vllm.engine import COMPILE_THREADS, import_vllm


@pytest.mark.parametrize("before", [None, "5"])
def test_the_trainers_compile_threads_are_what_they_were_before_vllm(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"import os\nos.environ[{COMPILE_THREADS!r}] = '1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # which it sets, put back afterwards
    monkeypatch.delenv(COMPILE_THREADS, raising=False)
    if before is not None:
        monkeypatch.setenv(COMPILE_THREADS, before)
    assert import_vllm("sampler").__file__ == str(tmp_path / "vllm" / "__init__.py")
    assert os.environ.get(COMPILE_THREADS) == before
    monkeypatch.delitem(sys.modules, "vllm")
