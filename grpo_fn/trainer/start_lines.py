"""The first lines of a run: what is being done, with the seconds since the start, and one line for each rank."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil
import torch
from transformers import PretrainedConfig

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.model.logprob_model import choose_head_kernels
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.world import World
from grpo_fn.trainer.checks.device_plan import decoding_notes, plan_blocks, precision_notes
from grpo_fn.trainer.plan import Plan
from grpo_fn.trainer.sections import Settings

StartReport = Callable[[str], None]


def report_start(world: World, started: float) -> StartReport:
    """Prints a line with the seconds since the start, on the main rank alone."""

    if not world.main:
        return no_report

    def report(text: str) -> None:
        with suppress(OSError, ValueError):  # a console that is gone ends no run
            print(f"{time.perf_counter() - started:5.1f} s  {text}", flush=True)

    return report


def no_report(text: str) -> None:
    """Prints nothing: of a rank other than 0, and of a replay, which starts no run."""


def settle_blocks(
    settings: Settings, config: PretrainedConfig, device: torch.device
) -> tuple[Settings, tuple[str, ...]]:
    """The settings with `mesh.Parallelism.compile` as it is on the device; and lines on it and on attention."""
    found = plan_blocks(settings.parallelism, device, config=config, deterministic=settings.compute.deterministic)
    attends = attention_note(settings.compute.attention, hf.find_dtype(settings.compute.dtype), device)
    return replace(settings, parallelism=found.parallelism), (*found.notes, *attends)


def rank_line(settings: Settings, world: World) -> str:
    """This rank in one line: host, device with its memory, strategy, precision, attention, blocks, rows a step."""
    compute, algo, parallelism = settings.compute, settings.algorithm, settings.parallelism
    shape = parallelism.shape(world.size, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
    mesh = " x ".join(f"{name} {size}" for name, size in zip(("replicate", "shard", "tensor"), shape, strict=True))
    compile_, how = function_and_knobs(parallelism.compile)
    blocks_ = f"{compile_.__name__} {how.get('mode', '')}".rstrip()
    rows = algo.prompts * algo.group_size
    return (
        f"rank {world.rank}  {socket.gethostname()}  {device_text(world.device)}  {mesh}"
        f"{', offload' if parallelism.offload else ''}  {compute.dtype}, {compute.attention}, {blocks_}  "
        f"{rows // (algo.minibatches * world.size)} of {rows // algo.minibatches} rows an update, at least "
        f"{settings.policy.min_micro_batches} micro-batch"
    )


def plan_lines(plan: Plan, notes: Sequence[str], rows: int, world: World, dtype: torch.dtype) -> list[str]:
    """What a start says of the run: its numbers with so many training rows, the notes, and what the precision costs.

    The last line is what the head computes with, which a trial on the device has found. Raises RuntimeError on all
    ranks where it has found different kernels: every rank calls this.
    """
    numbers = replace(plan, train_rows=rows, ranks=world.size).lines()
    choice = choose_head_kernels(world.device)
    world.same(type(choice.kernels).__name__, what="the head's kernels, by a trial on each rank")
    head = f"the head computes with {choice.text}"
    return [*numbers, *notes, *precision_notes(dtype, world.device), head]


def sampler_line(settings: Settings, config: PretrainedConfig, device: torch.device) -> str:
    """The sampler that is started, how the local one attends on a card, and whether the first step compiles."""
    sampler = function_and_knobs(settings.sampling.sampler)[0]
    here = sampler is local_sampler.local and device.type == "cuda"
    notes = decoding_notes(config, settings.lora, device) if here else []
    name = "; ".join([sampler.__name__, *notes])
    compiles = function_and_knobs(settings.parallelism.compile)[0] is not blocks.eager
    return f"starting the sampler, {name}" + ("; blocks are compiled in the first step" if compiles else "")


def device_text(device: torch.device) -> str:
    """A device with its memory in GB of 1e9 bytes: a card's name, or the threads of a CPU."""
    if device.type != "cuda":
        return f"{device} ({torch.get_num_threads()} threads, {psutil.virtual_memory().total / 1e9:.0f} GB)"
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {properties.total_memory / 1e9:.0f} GB)"
