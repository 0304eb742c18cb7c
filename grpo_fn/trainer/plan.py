"""What a run would be, worked out before anything expensive starts; and its first lines, where it does start."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import torch
from transformers import PretrainedConfig

from grpo_fn.core.partials import function_and_knobs
from grpo_fn.shell.logging.console import format_number
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.attention import attention_note
from grpo_fn.shell.model.logprob_model import choose_head_kernels
from grpo_fn.shell.model.lora import LoRA, attach
from grpo_fn.shell.policy.memory_estimate import GB, WIDE, Memory
from grpo_fn.shell.policy.mesh import plan_blocks
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.sampler.local.cuda_steps import split_kv_unsupported_reason
from grpo_fn.shell.sampler.local.joined_projections import joining_note
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Settings


@dataclass(frozen=True)
class Plan:
    """The numbers of a run, and those that follow from them."""

    prompts: int
    group_size: int
    minibatches: int
    epochs: int
    steps: int
    train_rows: int
    test_rows: int
    max_new_tokens: int
    parameters: int
    trained: int  # of them
    kv_bytes_per_token: int
    max_rows: int
    average: bool = False  # whether a moving average of what trains is kept
    ranks: int = 1
    arrangement: str = ""  # how the ranks share the model, in words
    memory: Memory | None = None  # of one device; None where not estimated

    def lines(self) -> list[str]:
        """The plan as a person would read it."""
        rows = self.prompts * self.group_size
        drawn = self.prompts * self.steps
        trained = f", of which {self.trained:,} train" if self.trained != self.parameters else ""
        each = f"memory, each of {self.ranks:<6} {self.arrangement}; estimated:"
        return [
            f"rows a step           {self.prompts} prompts x {self.group_size} samples = {rows}",
            f"optimizer updates     {self.epochs} epochs x {self.minibatches} minibatches = "
            f"{self.epochs * self.minibatches} a step, {self.epochs * self.minibatches * self.steps} in all",
            f"problems drawn        {drawn} in {self.steps} steps = {drawn / self.train_rows:.2f} epochs "
            f"of {self.train_rows}",
            f"held-out problems     {self.test_rows}",
            f"parameters            {self.parameters:,}{trained}",
            f"disk, one checkpoint  {format_number(self.checkpoint_bytes() / GB, 3)} GB",
            *([] if self.memory is None else [each, *self.memory.lines()]),
        ]

    def kv_bytes(self) -> int:
        """Keys and values of the completions that one rank decodes at once, `max_rows` rows at most."""
        rows = -(-self.prompts // self.ranks) * self.group_size
        return min(rows, self.max_rows) * self.max_new_tokens * self.kv_bytes_per_token

    def checkpoint_bytes(self) -> int:
        """What trains, both of its moments and its average, where one is kept, on disk, in float32."""
        return (3 + self.average) * self.trained * WIDE

    def need_bytes(self) -> int:
        """Free disk space to start with: the newest checkpoint, the one being written, and the exported model."""
        return 2 * self.checkpoint_bytes() + self.parameters * WIDE + 2**24


def kv_bytes_per_token(config: object, bytes_per_value: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes; 0 of a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv * head * bytes_per_value


@dataclass(frozen=True)
class ValidatedPlan:
    """What validation found out about a run, for `build`."""

    source: hf.ModelSource
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    task: Task
    reference: bool  # whether objective or credit declare logp_ref
    frozen: bool  # whether a frozen copy of the start model is kept, as that reference or to measure the KL to it
    teachers: Mapping[str, tuple[hf.ModelSource, PretrainedConfig]]  # those that are loaded, by key
    parts: Sequence[str]  # of the reward
    demonstrations: Task | None  # that are learned from beside the sampled completions
    plan: Plan


# -- what a plan says about the device: which it is, a dtype's cost, how blocks and decoding run


def planned_device(name: str) -> torch.device | None:
    """The device that a run would compute on; None for a card that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return None if name.startswith("cuda") and not torch.cuda.is_available() else torch.device(name)


def precision_notes(dtype: torch.dtype, device: torch.device | None) -> list[str]:
    """A line for a run in float32 on a card: what it costs, and what to lay over it."""
    if dtype is not torch.float32 or (device is not None and device.type != "cuda"):
        return []
    return [
        "float32 on a GPU: no tensor cores, no kernels for packed rows (50 TFLOP/s of an H100's 800 in bfloat16); lay "
        " --gin_file scale/bf16.gin over the run, or scale/fp16.gin before Ampere"
    ]


def decoding_notes(config: PretrainedConfig, adapters: LoRA | None, device: torch.device | None) -> list[str]:
    """How the local sampler's steps attend on a device, and on a card which projections they have in one product."""
    if device is None:
        attends = "the split-KV kernel where Triton imports, else in matrix products"
    else:
        reason = split_kv_unsupported_reason(device)
        attends = "the split-KV kernel" if reason is None else f"matrix products ({reason})"
    attention = f"decoding attends in {attends}"
    if device is not None and device.type != "cuda":
        return [attention]
    model = hf.empty_model(config)
    if adapters is not None:
        attach(model, adapters)
    return [attention, f"decoding has {joining_note(model)}"]


# -- the first lines of a run: what is being done, with the seconds since the start, and one line for each rank


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
    blocks_plan = plan_blocks(settings.parallelism, device, config=config, deterministic=settings.compute.deterministic)
    attends = attention_note(settings.compute.attention, hf.find_dtype(settings.compute.dtype), device)
    return replace(settings, parallelism=blocks_plan.parallelism), (*blocks_plan.notes, *attends)


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
