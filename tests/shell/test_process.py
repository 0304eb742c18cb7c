"""What is asked of the host."""

import os
import platform
import subprocess
import sys
from functools import partial

import pytest
import torch

from grpo_fn.shell.model.blocks import eager, torch_compile
from grpo_fn.shell.process import use_deterministic_kernels
from grpo_fn.shell.sampler.local import cuda_steps
from grpo_fn.shell.sampler.local.cuda_steps import split_kv_attention
from grpo_fn.trainer.validate import check_deterministic

# Two tensors, so that one is not simply given the place of the other.
FAULTS = """
import resource, torch
from grpo_fn.shell.process import keep_freed_memory

KEEP
def cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = torch.ones(1 << 24)
    second = torch.ones(1 << 24)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()

for _ in range(20):  # until both have found their places
    share = cleared() / (8 << 24)
print(share)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library is configured")
@pytest.mark.parametrize(
    ("keep", "settings", "again"),
    [("keep_freed_memory()", {}, False), ("keep_freed_memory()", {"MALLOC_MMAP_THRESHOLD_": "131072"}, True)],
)
def test_freed_memory_is_used_again_unless_the_environment_sets_otherwise(
    keep: str, settings: dict, again: bool
) -> None:
    """The share of 128 MiB, freed before, that the system has to clear again: pages are cleared once, not each time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | settings
    code = FAULTS.replace("KEEP", keep)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stderr
    assert (float(ran.stdout) > 0.9) if again else (float(ran.stdout) < 0.1)


# -- deterministic kernels


def fused_kernels() -> list[bool]:
    """Which of them `scaled_dot_product_attention` may take."""
    cuda = torch.backends.cuda
    return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]


def test_deterministic_kernels_are_what_torch_cublas_and_decoding_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(cuda_steps, "capturable", lambda model: True)
    monkeypatch.setattr(cuda_steps, "keep_logits_in_float32", lambda model: None)  # of a language model
    monkeypatch.setattr(cuda_steps, "choose_joined_model", lambda model, split_kv: model)  # nor this
    monkeypatch.setattr(cuda_steps, "CudaGraph", lambda: lambda step: step)
    monkeypatch.setattr(cuda_steps, "compiles_decoding", lambda model, *, deterministic: not deterministic)
    compiled = cuda_steps.StepCode(cuda_steps.attend, lambda token_sampler: token_sampler)
    monkeypatch.setattr(cuda_steps, "compile_decode_parts", lambda model: compiled)
    # The split-KV kernel is the same code for all sizes, and may be there under both.
    monkeypatch.setattr(cuda_steps, "choose_split_kv", lambda model: split_kv_attention)
    try:
        for expected in (True, False):
            use_deterministic_kernels(expected, "cuda")
            assert fused_kernels() == [not expected] * 3, "of scaled_dot_product_attention: with warn_only none repeats"
            assert torch.are_deterministic_algorithms_enabled() == expected
            code = cuda_steps.build_engine(model).code
            assert code == (cuda_steps.EAGER_CODE if expected else compiled)._replace(split_kv=split_kv_attention)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        use_deterministic_kernels(True, "cpu")
        assert fused_kernels() == [True] * 3, "a CPU's is the same again"
    finally:
        use_deterministic_kernels(False, "cuda")


@pytest.mark.parametrize("how", [torch_compile, partial(torch_compile)])
def test_deterministic_kernels_and_compiled_blocks_are_refused(how: object) -> None:
    with pytest.raises(
        ValueError, match=r"got True with compiled blocks.*expected mesh\.Parallelism\.compile = @blocks\.eager"
    ):
        check_deterministic(True, how)
    check_deterministic(False, how)
    check_deterministic(True, eager)
