"""What a run would be, worked out before anything expensive starts, and the first lines of a run that does start.

Bytes are sums over the model's weights. Seconds are a coarse estimate: operations, bytes and launches at rates that
were measured on one H100. Links between two cards were never measured: their rates are assumptions.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PretrainedConfig

from grpo_fn.algo.step import Algorithm, from_trainer
from grpo_fn.algo.supervised import Stage
from grpo_fn.core.partials import function_and_knobs, uses_of
from grpo_fn.shell.logging.console import format_number, short_time
from grpo_fn.shell.model import blocks, hf
from grpo_fn.shell.model.attention import attention_note, model_attention
from grpo_fn.shell.model.logprob_model import choose_head_kernels, chunk_elements
from grpo_fn.shell.model.lora import LoRA, attach
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.policy.memory_estimate import GB, WIDE, Memory, Weight
from grpo_fn.shell.policy.mesh import Parallelism, plan_blocks
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.sampler.local.cuda_steps import split_kv_unsupported_reason
from grpo_fn.shell.sampler.local.joined_projections import joining_note
from grpo_fn.shell.world import World
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Settings

# "H100": measured on one H100 80GB, 2026-11-26, torch 2.11; docs/running/run.md has the measurements.
COMPILED_ACTIVATIONS = 0.65  # of those of blocks as written: H100, peaks of `train-1.5b-compiled` and of a whole run
PRODUCTS = 783e12  # operations a second of bfloat16 products of 8192 x 8192: H100
SINGLE_PRODUCTS = 50e12  # the same in float32: assumed
TRAINING_SHARE = 0.335  # of PRODUCTS: H100, 0.313 in `step`, 0.333 in `train-1.5b-compiled`, 0.360 in a whole run
LAUNCHING = 2.77e-3  # seconds of a pass of one block as written, however few its tokens: H100, `train-0.5b`
DECODING_SHARE = 0.45  # of PRODUCTS, as rows are added to a decoding step: H100, decoding of 64 to 1,024 rows
READING = 2.79e12  # bytes a second of weights, keys and values: H100, decoding of 128 to 3,968 columns
LAUNCHES, OTHER_LAUNCHES = 14, 51  # of a decoding step for each block, and besides: H100, 387 of 24 blocks
ADAPTED_LAUNCHES = 28  # for each block with adapters: H100, sampling in `memory`
LAUNCH = 2.74e-6  # seconds of each: H100, what of a decoding step neither rows nor columns change
AROUND = 1.14  # seconds of a call of the sampler over those of its decoding steps: H100, 609 and 535 ms
NVLINK = 0.8 * 450e9  # bytes a second to a card of the same host: assumed
NETWORK = 0.8 * 50e9  # bytes a second to a card of another host: assumed
HOST_LINK = 0.8 * 64e9  # bytes a second between a card and its host's memory: assumed
PROMPT_TOKENS = 128  # of every prompt: assumed


@dataclass(frozen=True)
class ValidatedPlan:
    """What validation found out about a run, for `build`."""

    source: hf.ModelSource
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    task: Task
    reference: bool  # whether objective or credit declare logp_ref
    frozen: bool  # whether a frozen copy of the start model is kept, as that reference or to measure the KL to it
    average: bool  # whether a moving average of what trains is kept
    teachers: Mapping[str, tuple[hf.ModelSource, PretrainedConfig]]  # those that are loaded, by key
    parts: Sequence[str]  # of the reward
    demonstrations: Task | None  # that are learned from beside the sampled completions
    parameters: int
    trained: int  # of them

    def checkpoint_bytes(self) -> int:
        """What trains, both of its moments and its average, where one is kept, on disk, in float32."""
        return (3 + self.average) * self.trained * WIDE

    def need_bytes(self) -> int:
        """Free disk space to start with: the newest checkpoint, the one being written, and the exported model."""
        return 2 * self.checkpoint_bytes() + self.parameters * WIDE + 2**24


def run_lines(settings: Settings, checked: ValidatedPlan, train_rows: int) -> list[str]:
    """The numbers of a run as a person would read them, and those that follow from them."""
    algorithm, steps = settings.algorithm, settings.steps
    prompts, size, updates = algorithm.prompts, algorithm.group_size, algorithm.epochs * algorithm.minibatches
    trained = f", of which {checked.trained:,} train" if checked.trained != checked.parameters else ""
    drawn = prompts * steps
    return [
        f"rows a step           {prompts} prompts x {size} samples = {prompts * size}",
        f"optimizer updates     {algorithm.epochs} epochs x {algorithm.minibatches} minibatches = {updates} a step, "
        f"{updates * steps} in all",
        f"problems drawn        {drawn} in {steps} steps = {drawn / train_rows:.2f} epochs of {train_rows}",
        f"held-out problems     {len(checked.task.test)}",
        f"parameters            {checked.parameters:,}{trained}",
        f"disk, one checkpoint  {format_number(checked.checkpoint_bytes() / GB, 3)} GB",
    ]


def opening_lines(
    settings: Settings, checked: ValidatedPlan, run_dir: Path, device: torch.device | None, *, ranks: int, hosts: int
) -> list[str]:
    """What is trained, on what, how much of it, and where it is written."""
    algorithm, config, source = settings.algorithm, checked.config, checked.source
    name = (config.architectures or [f"a {type(config).__name__.removesuffix('Config')}"])[0]
    origin = source.name if isinstance(source, hf.Pretrained | hf.GgufFile) else type(source).__name__
    part = f", of which {checked.trained:,} train" if checked.trained != checked.parameters else ""
    task = function_and_knobs(settings.data.task)[0]
    if isinstance(algorithm, Stage):
        step, graded = f"{algorithm.prompts} demonstrations", ""
    else:
        completions = f"{algorithm.group_size} completions of up to {longest_completion(settings)} tokens"
        step, graded = f"{algorithm.prompts} prompts x {completions}", f", rewarded by {', '.join(checked.parts)}"
    seconds = "" if isinstance(algorithm, Stage) else "; the first evaluation shows about how long they take"
    if device is None or device.type == "cuda":
        with suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # of the model's own code
            parts = device_step(settings, checked, settings.parallelism.shape(ranks, ranks // hosts))[0]
            each = sampling_seconds(parts) + training_seconds(parts)
            seconds = f", about {format_number(each, 1)} s each on H100s, {short_time(each * settings.steps)} in all"
    return [
        f"trains    {name}, {checked.parameters:,} parameters{part}, from {origin}",
        f"on        {checked.task.size:,} training and {len(checked.task.test):,} held-out problems of "
        f"{task.__module__.rpartition('.')[2]}.{getattr(task, '__name__', type(task).__name__)}{graded}",
        f"takes     {settings.steps} steps of {step}{seconds}",
        f"writes    {run_dir}",
    ]


def longest_completion(settings: Settings) -> int:
    """Most tokens of a row behind its prompt."""
    sampling = settings.sampling
    return sampling.max_new_tokens if settings.episodes is None else sampling.max_total_tokens - 1


def kv_bytes(settings: Settings, checked: ValidatedPlan, ranks: int) -> int:
    """Keys and values of the completions that one of the ranks decodes at once, `max_rows` rows at most."""
    rows = -(-settings.algorithm.prompts // ranks) * settings.algorithm.group_size
    per_token = kv_bytes_per_token(checked.config, checked.dtype.itemsize)
    return min(rows, settings.sampling.max_rows) * longest_completion(settings) * per_token


def kv_bytes_per_token(config: object, bytes_per_value: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes; 0 of a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv * head * bytes_per_value


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


def report_start(world: World, started: float) -> Callable[[str], None]:
    """Prints a line with the seconds since the start, on the main rank alone."""

    def report(text: str) -> None:
        if not world.main:
            return
        with suppress(OSError, ValueError):  # a console that is gone ends no run
            print(f"{time.perf_counter() - started:5.1f} s  {text}", flush=True)

    return report


def settle_attention(settings: Settings, config: PretrainedConfig) -> Settings:
    """The settings with the attention that the model is built with in the place of "auto"."""
    attention = model_attention(settings.compute.attention, config)
    return replace(settings, compute=replace(settings.compute, attention=attention))


def settle_blocks(
    settings: Settings, config: PretrainedConfig, device: torch.device
) -> tuple[Settings, tuple[str, ...]]:
    """The settings with `mesh.Parallelism.compile` as it is on the device, attention as the model has it; and lines on
    both.
    """
    settings = settle_attention(settings, config)
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


def device_notes(world: World, dtype: torch.dtype) -> list[str]:
    """What the precision costs on the device, and the kernels of the head, which a trial on the device has found.

    Raises RuntimeError on all ranks where different kernels were found: every rank calls this.
    """
    choice = choose_head_kernels(world.device)
    world.same(type(choice.kernels).__name__, what="the head's kernels, by a trial on each rank")
    return [*precision_notes(dtype, world.device), f"LM head: {choice.text}"]


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


# -- a dry run: the plan of a run on so many ranks


def dry_run_lines(settings: Settings, checked: ValidatedPlan, *, ranks: int, hosts: int) -> list[str]:
    """The plan of a run on so many ranks, evenly on so many hosts, with memory, traffic and time of one device."""
    settings = settle_attention(settings, checked.config)
    mesh = settings.parallelism.shape(ranks, ranks // hosts)
    device = planned_device(settings.compute.device)
    planned = plan_blocks(
        settings.parallelism, device, config=checked.config, deterministic=settings.compute.deterministic
    )
    memory, unknown = None, []
    try:
        memory = estimated_memory(settings, checked, mesh=mesh, planned=planned.parallelism, device=device)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:  # of the model's own code
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        unknown = [f"memory: not estimated, as {type(checked.config).__name__} was not passed without data ({reason})"]
    shape = "replicate {} x shard {} x tensor {}".format(*mesh)
    local = any(uses_of(local_sampler.local, [settings.sampling.sampler]))
    engine = (
        [] if local else ["  nor counted: the sampler's engine, which has a share of the device or devices of its own"]
    )
    step, weights = device_step(settings, checked, mesh)
    each = f"memory, each of {ranks:<6} {shape}; estimated:"
    return [
        *run_lines(settings, checked, checked.task.size),
        *([] if memory is None else [each, *memory.lines()]),
        *unknown,
        *engine,
        *step_estimate_lines(step, traffic(step, weights, settings.parallelism, on_host=ranks // hosts)),
        *(decoding_notes(checked.config, settings.lora, device) if local else []),
        *planned.notes,
        *precision_notes(checked.dtype, device),
        *attention_note(settings.compute.attention, checked.dtype, device),
        *checked.task.notes,
    ]


def estimated_memory(
    settings: Settings,
    checked: ValidatedPlan,
    *,
    mesh: tuple[int, int, int],
    planned: Parallelism,
    device: torch.device | None,
) -> Memory:
    """What one device of a mesh holds, its blocks being run as `planned` says."""
    replicate, shard, tensor = mesh
    local = any(uses_of(local_sampler.local, [settings.sampling.sampler]))
    chunk = settings.compute.logits_chunk_elements
    relative = settings.teacher is not None and settings.teacher.relative_entropy
    memory = memory_estimate.device_memory(
        checked.config,
        settings.lora,
        settings.parallelism,
        settings.policy.optimizer,
        mesh=mesh,
        dtype=checked.dtype,
        attention=settings.compute.attention,
        reference=checked.frozen,
        teachers=[config for _, config in checked.teachers.values()],
        offload_teachers=settings.teacher is not None and settings.teacher.offload,
        relative_to=next((config for _, config in checked.teachers.values()), None) if relative else None,
        average=checked.average,
        micro_tokens=settings.policy.micro_tokens,
        width=settings.sampling.max_new_tokens,
        logits_chunk_elements=chunk if device is None else chunk_elements(chunk, device),
        cache=kv_bytes(settings, checked, replicate * shard * tensor) if local else 0,
        local_sampler=local,
    )
    if not is_compiled(planned):
        return memory
    kept = (
        part._replace(bytes=round(COMPILED_ACTIVATIONS * part.bytes)) if part.name == "activations" else part
        for part in memory.training
    )
    return memory._replace(training=tuple(kept))


def is_compiled(parallelism: Parallelism) -> bool:
    """Whether torch compiles the blocks."""
    return function_and_knobs(parallelism.compile)[0] is blocks.torch_compile


# -- a step


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """One device's part of a step: a model, the rows that it samples, and the rows that it trains on."""

    mesh: tuple[int, int, int]  # replicate, shard, tensor
    blocks: int
    block_weights: int  # of matrices, multiplied with every token
    trained: int  # weights, of all devices together
    head: tuple[int, int]  # vocabulary, hidden size
    kv_bytes: int  # of a token
    width: int  # bytes of a number in the dtype that is computed in
    adapted: bool
    compiled: bool
    recomputed: bool  # the backward pass begins with a forward pass of each block
    sampled_groups: int
    trained_groups: int  # by the ranks that share every product together
    group_size: int
    prompt_tokens: int
    new_tokens: int
    max_rows: int  # sampled at once
    frozen_passes: int  # over the trained rows, without a gradient
    epochs: int
    minibatches: int
    micro_batches: int  # of all minibatches

    def rate(self) -> float:
        """Operations a second of large products."""
        return PRODUCTS if self.width < WIDE else SINGLE_PRODUCTS

    def tokens(self) -> int:
        """Tokens that a pass over the trained rows reads: a prompt once for its group."""
        return self.trained_groups * (self.prompt_tokens + self.group_size * self.new_tokens)

    def operations(self) -> float:
        """A forward pass over the trained rows: 2 a weight and token, 4 a block, hidden number and pair of tokens."""
        vocabulary, hidden = self.head
        prompt, sampled, new = self.prompt_tokens, self.group_size * self.new_tokens, self.new_tokens
        pairs = prompt * (prompt + 1) / 2 + sampled * (prompt + (new + 1) / 2)
        of_group = 2 * vocabulary * hidden * sampled + 4 * self.blocks * hidden * pairs
        return (2 * self.block_weights * self.tokens() + self.trained_groups * of_group) / self.mesh[2]


def device_step(
    settings: Settings, checked: ValidatedPlan, mesh: tuple[int, int, int]
) -> tuple[DeviceStep, list[Weight]]:
    """What a card of a mesh does in a step, with the weights as it has them; completions are as long as they may be."""
    how, algorithm = settings.parallelism, settings.algorithm
    replicate, shard, tensor = mesh
    model = memory_estimate.meta_model(checked.config, settings.lora, settings.compute.attention)
    samples, updates = isinstance(algorithm, Algorithm), algorithm.epochs * algorithm.minibatches
    old_logp = samples and updates > 1 and function_and_knobs(algorithm.old_logp)[0] is from_trainer
    card = plan_blocks(how, None, config=checked.config, deterministic=settings.compute.deterministic)
    matrices = [w for w in memory_estimate.weights(model, 1, 1) if w.matrix and w.block is not None]
    step = DeviceStep(
        mesh=mesh,
        blocks=len({w.block for w in matrices}),
        block_weights=sum(w.whole for w in matrices),
        trained=checked.trained,
        head=memory_estimate.head_dimensions(checked.config),
        kv_bytes=kv_bytes_per_token(checked.config, checked.dtype.itemsize),
        width=checked.dtype.itemsize,
        adapted=settings.lora is not None,
        compiled=is_compiled(card.parallelism),
        recomputed=function_and_knobs(how.activation_checkpointing)[0] is blocks.full_checkpointing,
        sampled_groups=-(-algorithm.prompts // (replicate * shard * tensor)) if samples else 0,
        trained_groups=-(-algorithm.prompts // (replicate * shard)),
        group_size=algorithm.group_size,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=longest_completion(settings),
        max_rows=settings.sampling.max_rows,
        frozen_passes=checked.reference + old_logp,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        micro_batches=0,
    )
    parts = -(-step.tokens() // (algorithm.minibatches * settings.policy.micro_tokens))
    parts = algorithm.minibatches * max(parts, settings.policy.min_micro_batches)
    return replace(step, micro_batches=parts), memory_estimate.weights(model, shard, tensor)


def sampling_seconds(step: DeviceStep) -> float:
    """A decoding step launches kernels, reads weights, keys and values, and multiplies; a row takes one a token."""
    rows = step.sampled_groups * step.group_size
    at_once = min(rows, step.max_rows)
    vocabulary, hidden = step.head
    weights = step.block_weights + vocabulary * hidden
    columns = at_once * (step.prompt_tokens / step.group_size + step.new_tokens / 2)  # a prompt is read once a group
    launches = step.blocks * (ADAPTED_LAUNCHES if step.adapted else LAUNCHES) + OTHER_LAUNCHES
    seconds = (
        LAUNCH * launches
        + (step.width * weights + step.kv_bytes * columns) / READING
        + 2 * weights * at_once / (DECODING_SHARE * step.rate())
    )
    return AROUND * seconds * step.new_tokens * -(-rows // step.max_rows)


def training_seconds(step: DeviceStep) -> float:
    """A pass takes the time of its operations, or of its launches if blocks are as written; one back is two."""
    passes = step.epochs * (3 + step.recomputed) + step.frozen_passes
    frozen = step.epochs * step.adapted  # there is no gradient of the weights beside adapters
    by_operations = (passes - frozen) * step.operations() / (TRAINING_SHARE * step.rate())
    by_launches = passes * step.micro_batches * step.blocks * LAUNCHING
    return by_operations if step.compiled else max(by_operations, by_launches)


class Traffic(NamedTuple):
    """Bytes that one device receives in a step, and how many a second."""

    name: str
    bytes: float
    rate: float


def traffic(step: DeviceStep, weights: Sequence[Weight], how: Parallelism, *, on_host: int) -> list[Traffic]:
    """What FSDP2, tensor parallelism and the sampler's weights bring to a device; `on_host` are the ranks of a host.

    A gather or a reduction brings what the device has not, a sum over n ranks 2 (n - 1) / n of its size. A block is
    gathered for each pass, or once where it stays, the root once. Gradients are reduced in float32 in every
    micro-batch, and summed over copies of the model in every update.
    """
    replicate, shard, tensor = step.mesh
    gathers = step.epochs * (1 + how.reshard_after_forward) + step.frozen_passes
    root_gathers, updates = step.epochs + step.frozen_passes, step.epochs * step.minibatches

    def gathered(sizes: Sequence[tuple[Weight, int]]) -> int:
        return sum(size * (root_gathers if w.block is None else gathers) for w, size in sizes)

    near = [NVLINK if ranks <= on_host else NETWORK for ranks in (tensor, tensor * shard, tensor * shard * replicate)]
    trained = [w for w in weights if w.trained]
    kept, whole = sum(w.part for w in trained), sum(w.whole for w in trained)
    sums = step.epochs * (7 + 2 * step.recomputed) + 2 * step.frozen_passes  # two a block, and on the way back five
    summed = step.width * step.tokens() * step.head[1] * step.blocks * sums
    micro, back = step.micro_batches, step.epochs * step.micro_batches
    parts = [
        Traffic("weights, gathered", micro * step.width * gathered([(w, w.whole - w.part) for w in weights]), near[1]),
        Traffic("gradients, reduced", back * WIDE * (whole - kept), near[1]),
        Traffic("gradients, of other copies", updates * 2 * WIDE * kept * (replicate - 1) / replicate, near[2]),
        Traffic("sums of shared products", summed * 2 * (tensor - 1) / tensor, near[0]),
        Traffic("weights, for the sampler", bool(step.sampled_groups) * WIDE * (step.trained - kept), near[1]),
        Traffic(
            "between card and host",
            how.offload * WIDE * (micro * gathered([(w, w.part) for w in weights]) + back * kept),
            HOST_LINK,
        ),
    ]
    return [part for part in parts if part.bytes]


def step_estimate_lines(step: DeviceStep, received: Sequence[Traffic]) -> list[str]:
    """Bytes and seconds of a step, and what they are of."""
    seconds = {
        "sampling": sampling_seconds(step),
        "training": training_seconds(step),
        "links": sum(part.bytes / part.rate for part in received),
    }
    return [
        "received by each device in a step, by the mesh:" + ("" if received else " nothing"),
        *(
            f"  {part.name:<38}{format_number(part.bytes / GB, 3):>9} GB, at {part.rate / GB:.0f} GB/s (assumed)"
            for part in received
        ),
        "time of a step, a coarse estimate calibrated on one H100 80GB:",
        *(f"  {name:<38}{format_number(n, 2):>9} s" for name, n in seconds.items()),
        f"  {'one after another':<38}{format_number(sum(seconds.values()), 2):>9} s",
        f"  for prompts of {step.prompt_tokens} tokens (assumed) and completions of {step.new_tokens}; not counted: "
        "rewards, environments, evaluation, checkpoints, teachers, an optimizer on the host, compiling",
    ]
