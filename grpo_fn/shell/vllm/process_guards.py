"""Living with vLLM in one process.

vLLM takes a process for its own. What it does to the rest of it is undone here: it reseeds and consumes the global
random generators, makes `torch.set_num_threads` do nothing, has Inductor compile with one thread, and calls the default
process group into being. That group is made here first, the very one that FSDP2 would make, so it does not matter which
of them comes first.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

NO_PACKAGE = "a folder of that name is no package"
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # the environment variable that `blocks.torch_compile` goes by


def import_vllm() -> ModuleType:
    """The vllm module, set to be quiet and to stay in this process. Raises ValueError where there is none."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with restore_compile_threads():
            import vllm
    except ImportError as error:
        raise missing_vllm_error("sampler", str(error)) from error
    if getattr(vllm, "__file__", None) is None:
        raise missing_vllm_error("sampler", NO_PACKAGE)
    return vllm


def check_installed(knob: str) -> None:
    """Raise ValueError where there is no vLLM for what this knob names. It is looked for, not imported."""
    spec = find_spec("vllm")
    if spec is None:
        raise missing_vllm_error(knob, "No module named 'vllm'")
    if spec.origin is None:
        raise missing_vllm_error(knob, NO_PACKAGE)


def missing_vllm_error(knob: str, why: str) -> ValueError:
    """What is raised where vLLM is wanted and not there."""
    return ValueError(f"{knob}: got no vllm ({why}), wanted it installed: pip install 'grpo-fn[vllm]'")


def group_of_one(device: torch.device) -> None:
    """The default process group, where there is none: what `Parallelism.mesh` would make, and finds."""
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def restore_generators(device: torch.device) -> Iterator[None]:
    """The global generators of torch, NumPy and Python are afterwards where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def restore_compile_threads() -> Iterator[None]:
    """COMPILE_THREADS is afterwards what it was: vLLM's import makes it 1, for processes that its engine would fork.

    Inductor's own setting stays as vLLM leaves it, so that an engine in this process compiles as it means to.
    """
    before = os.environ.get(COMPILE_THREADS)
    try:
        yield
    finally:
        os.environ.pop(COMPILE_THREADS, None)
        if before is not None:
            os.environ[COMPILE_THREADS] = before


@contextmanager
def restore_thread_count() -> Iterator[None]:
    """`torch.set_num_threads` does afterwards what it did, and the number of threads is what it was."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        setter(threads)
