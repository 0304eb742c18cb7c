"""What a plan says about the device: which it is, the head's chunks, a dtype's cost, how blocks and decoding run."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.logprob_model import chunk_elements
from grpo_fn.shell.model.lora import LoRA, attach
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.sampler.local.joined_projections import joining_note
from grpo_fn.shell.sampler.local.split_kv import split_kv_unsupported_reason


def planned_device(name: str) -> torch.device | None:
    """The device that a run would compute on; None for a card that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return None if name.startswith("cuda") and not torch.cuda.is_available() else torch.device(name)


def planned_chunk(bound: int, device: torch.device | None) -> int:
    """Logits in a chunk of the head."""
    return bound if device is None else chunk_elements(bound, device)


def precision_notes(dtype: torch.dtype, device: torch.device | None) -> list[str]:
    """A line for a run in float32 on a card: what it costs, and what to lay over it."""
    if dtype is not torch.float32 or (device is not None and device.type != "cuda"):
        return []
    return [
        "float32 on a GPU: no tensor cores, no kernels for packed rows (50 TFLOP/s of an H100's 800 in bfloat16); lay "
        " --gin_file scale/bf16.gin over the run, or scale/fp16.gin before Ampere"
    ]


class BlockPlan(NamedTuple):
    """How the blocks of a run are executed, and what a plan says of it."""

    parallelism: Parallelism  # with a `compile` that no longer depends on the device
    notes: tuple[str, ...]


def plan_blocks(
    parallelism: Parallelism, device: torch.device | None, *, config: PretrainedConfig, deterministic: bool
) -> BlockPlan:
    """`blocks.compiled_on_cuda` made `torch_compile` or `eager`; any other choice stays as it is."""
    if function_and_knobs(parallelism.compile)[0] is not blocks.compiled_on_cuda:
        return BlockPlan(parallelism, ())
    if device is not None and device.type != "cuda":
        return BlockPlan(replace(parallelism, compile=blocks.eager), ())
    reason = compile_refusal(parallelism, deterministic=deterministic)
    if reason is None:
        reason = blocks.small_block_reason(blocks.largest_block(hf.empty_model(config)))
    if reason is None and device is not None:
        reason = blocks.compile_unsupported_reason(device)
    if reason is None:
        compiled = partial(blocks.torch_compile, mode="default")
        return BlockPlan(replace(parallelism, compile=compiled), ("blocks are compiled, the default on CUDA",))
    note = f"blocks run as written, not compiled as is the default on CUDA: {reason}"
    return BlockPlan(replace(parallelism, compile=blocks.eager), (note,))


def compile_refusal(parallelism: Parallelism, *, deterministic: bool) -> str | None:
    """What in a configuration rules compiled blocks out by default; None where nothing does."""
    if deterministic:
        return "sections.Compute.deterministic is True"
    if parallelism.tp > 1:
        return f"mesh.Parallelism.tp is {parallelism.tp}"
    if function_and_knobs(parallelism.activation_checkpointing)[0] is blocks.selective_checkpointing:
        return "blocks.selective_checkpointing would compute all of a compiled block again"
    return None


def decoding_note(device: torch.device | None) -> str:
    """How the local sampler's steps attend on a device, and why not in the split-KV kernel where they do not."""
    if device is None:
        return "decoding attends in the split-KV kernel where Triton imports, else in matrix products"
    reason = split_kv_unsupported_reason(device)
    return f"decoding attends in {'the split-KV kernel' if reason is None else f'matrix products ({reason})'}"


def decoding_notes(config: PretrainedConfig, adapters: LoRA | None, device: torch.device | None) -> list[str]:
    """What is known of the local sampler's steps on a device: `decoding_note`, and on a card `projection_notes`."""
    return [decoding_note(device), *projection_notes(config, adapters, device)]


def projection_notes(config: PretrainedConfig, adapters: LoRA | None, device: torch.device | None) -> list[str]:
    """Which projections the local sampler's steps have in one product on a card, and why not the others."""
    if device is not None and device.type != "cuda":
        return []
    model = hf.empty_model(config)
    if adapters is not None:
        attach(model, adapters)
    return [f"decoding has {joining_note(model)}"]
