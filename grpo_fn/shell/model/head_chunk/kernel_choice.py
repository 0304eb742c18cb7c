"""Which kernels the head computes with on a device, and why: Triton's where a trial is right, torch's elsewhere."""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fn.shell.model.head_chunk.plain_kernels import ChunkKernels, PlainKernels

TRIAL = (3, 8211)  # rows and logits: two blocks and a part of a third
TRIAL_ERROR = 1e-4  # nats, and of a signal of 1: three hundred times the rounding of float32


class KernelChoice(NamedTuple):
    """The head's kernels on a device, and in words which they are and why."""

    kernels: ChunkKernels
    text: str


def kernels_for(hidden: Tensor) -> ChunkKernels:
    """Those of the states' device; torch's for float64, for parts of a mesh, and under functorch, whose tensors have
    no memory of their own.
    """
    plain = type(hidden) is Tensor and torch._C._functorch.peek_interpreter_stack() is None
    fits = plain and hidden.dtype is not torch.float64
    return choose_head_kernels(hidden.device).kernels if fits else PlainKernels()


@cache
def choose_head_kernels(device: torch.device) -> KernelChoice:
    """Triton's kernels on a CUDA device on which they give what torch's operations do; otherwise those.

    Warns once (RuntimeWarning) where a CUDA device has to do without Triton's.

    Args:
        device: where the head computes.
    """
    if device.type != "cuda":
        return KernelChoice(PlainKernels(), f"torch's operations (Triton has no kernels for {device.type})")
    reason = why_no_triton(device)
    if reason is None:
        from grpo_fn.shell.model.head_chunk.triton_kernels import TritonKernels

        return KernelChoice(TritonKernels(), "Triton's kernels")
    warnings.warn(f"the head runs on torch's operations, not Triton's kernels: {reason}", RuntimeWarning, stacklevel=2)
    return KernelChoice(PlainKernels(), f"torch's operations ({reason})")


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels are not used on that device; None where they are, after a trial.

    Args:
        device: a CUDA device.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE is 1"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from grpo_fn.shell.model.head_chunk.triton_kernels import TritonKernels

        error = trial_error(TritonKernels(), device)
    except Exception as error:  # a driver, a compiler or a version that it cannot work with: many kinds
        lines = str(error).splitlines()
        return f"{type(error).__name__}, {lines[0] if lines else 'without a word'}"
    return None if error <= TRIAL_ERROR else f"in a trial they were {error:.1g} off"


@torch.no_grad()
def trial_error(kernels: ChunkKernels, device: torch.device) -> float:
    """The largest difference from torch's operations over a few rows, of statistics and gradients; inf for a NaN.

    Args:
        kernels: what is tried.
        device: where.
    """
    n, vocabulary = TRIAL
    at = torch.arange(n * vocabulary, device=device, dtype=torch.float32)
    logits = 4 * torch.sin(at * at).view(TRIAL)  # numbers without a generator, whose state a run depends on
    target = torch.arange(n, device=device) * (vocabulary // n)
    signals = (torch.linspace(-1, 1, n, device=device), torch.linspace(1, 0.5, n, device=device))
    found = []
    for one in (kernels, PlainKernels()):
        z = logits.clone()
        stats = one.reduce(z, target, temperature=0.7, spare=one.spare(z))
        slope = one.slope(z, target, *signals, stats, temperature=0.7, fresh=False, dtype=torch.float32)
        found.append((stats.logp, stats.entropy, slope))
    return max(float((x - y).abs().max().nan_to_num(torch.inf)) for x, y in zip(*found, strict=True))
