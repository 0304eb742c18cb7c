"""How fast the device trains, beside what it can do at most, and what whole GRPO steps take in time and memory."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from device_parts import GB, KEY, Bench, built, forget, grpo_objective, most_held, peak, require, scale, seconds, wait
from device_runner import Figure, Setting
from device_shapes import QWEN, Shape, Work, folder, sized
from transformers import AutoConfig

from grpo_fn.algo.step import AT_THE_START, UNMOVED, Term, update
from grpo_fn.core import prng
from grpo_fn.core.batch import rows_as_rollout
from grpo_fn.core.types import Batch
from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.hf import is_adapter
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy import memory_estimate
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.mesh import plan_blocks
from grpo_fn.shell.vllm.fingerprint import NOTHING, Fingerprint, weight_fingerprint

MATRIX = 8192
MICRO_TOKENS, TRAINED = 8_192, Work(4, 16, 128, 1024)
PHASES = ("generate", "score", "train", "sync")
CAP = 8 * GB
ADAPTERS = LoRA(rank=16, alpha=32.0, dropout=0.05, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


class Ceilings(NamedTuple):
    """What the device does at most."""

    flops: float  # a second, of matrix products in bfloat16
    bandwidth: float  # bytes a second, read and written


@lru_cache(maxsize=1)
def ceilings(setting: Setting) -> Ceilings:
    """A product of two random matrices of 8192 x 8192, and a copy of two gigabytes."""
    size, width = (64, 2**20) if setting.tiny else (MATRIX, 2**31)
    a, b = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    product = partial(torch.mm, a, b)
    source, goal = (torch.zeros(width, dtype=torch.uint8, device=setting.device) for _ in range(2))
    copy = partial(goal.copy_, source)
    for f in (product, copy):
        seconds(setting.device, f, times=3)  # to warm up
    times = 2 if setting.tiny else 20
    return Ceilings(
        2 * size**3 / seconds(setting.device, product, times=times),
        2 * width / seconds(setting.device, copy, times=times),
    )


def train(setting: Setting, *, size: str, compiled: bool = False) -> list[Figure]:
    """Whole optimizer steps on made-up rows: bfloat16 with float32 weights and moments, micro-batches of 8k tokens.

    With 16k, 1.5B and every activation kept would want 76 of an H100's 80 GB before what FSDP2 reduces in.
    """
    shape = sized(setting, QWEN[size])
    work = Work(2, 3, 4, 6) if setting.tiny else TRAINED
    micro_tokens = MICRO_TOKENS + work.prompt
    compile_blocks = partial(blocks.torch_compile, mode="default") if compiled else blocks.eager
    model = folder(setting, shape)
    bench = built(setting, model, torch.bfloat16, micro_tokens=micro_tokens, compile=compile_blocks)
    batch = made_up(setting, shape, work)
    logp = bench.policy.logp(rows_as_rollout(batch))
    batch = batch._replace(logp_old=logp, logp_ref=logp, logp_sampled=logp)
    term = Term(batch, grpo_objective(0.0, 0.0), 1.0, sampled=True)
    step = partial(update, bench.policy, [term], UNMOVED, own_pass=False)
    learned = step()  # compiles, makes the moments
    require(learned.update["loss/grad_norm"] > 0, "training: got no gradient")
    forget(setting.device)
    took = seconds(setting.device, step, times=1 if setting.tiny else 3)
    limit = ceilings(setting).flops
    return [
        Figure("tokens/s", work.tokens / took),
        Figure("MFU", 100 * work.flops(shape) / took / limit, "%", at_least=45.0 if size == "1.5b" else None),
        Figure("matmul peak", limit / 1e12, "TFLOP/s"),
        Figure("seconds an update", took),
        *most_held(setting),
        Figure("peak memory, estimated", estimated(bench, micro_tokens, work.prompt + work.new) / 1e9, "GB"),
    ]


def estimated(bench: Bench, micro_tokens: int, width: int) -> int:
    """Bytes that a dry run says such training takes at its peak, the local sampler's not counted."""
    model = bench.placing.logprob_model.keywords
    memory = memory_estimate.device_memory(
        bench.placing.config,
        bench.placing.adapters,
        bench.placing.parallelism,
        lambda params: type(bench.policy.optimizer)(params),
        mesh=(1, 1, 1),
        dtype=bench.placing.dtype,
        attention=bench.placing.attention,
        reference=False,
        teachers=[],
        offload_teachers=False,
        relative_to=None,
        average=False,
        micro_tokens=micro_tokens,
        width=width,
        logits_chunk_elements=model["logits_chunk_elements"],
        cache=0,
        local_sampler=True,
    )
    return memory.peak()


def made_up(setting: Setting, shape: Shape, work: Work) -> Batch:
    """Random tokens; half of each group's rows were better than the other half."""
    g = torch.Generator(setting.device).manual_seed(5)
    rows, width = work.rows, work.prompt + work.new
    tokens = torch.randint(1, shape.vocabulary, (rows, width), device=setting.device, generator=g)
    tokens[:, : work.prompt] = tokens[:: work.size, : work.prompt].repeat_interleave(work.size, 0)
    mask = (torch.arange(width, device=setting.device) >= work.prompt).repeat(rows, 1)
    nothing = torch.zeros(rows, width, device=setting.device)
    adv = torch.where(torch.arange(rows, device=setting.device) % 2 == 0, 1.0, -1.0)[:, None].expand(rows, width)
    return Batch(tokens, mask, nothing, nothing, nothing, nothing, adv, torch.zeros_like(mask), mask.long())


# -- whole steps


class Phases:
    """Seconds and peak gigabytes of each phase; the device is waited for where one ends."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside counts towards `name`."""
        wait(self.device)
        forget(self.device)
        began = time.perf_counter()
        yield
        wait(self.device)
        self.seconds[name] += time.perf_counter() - began
        self.peak[name] = max(self.peak[name], peak(self.device))


class Steps(NamedTuple):
    """What some steps took."""

    seconds: list[float]
    tokens: list[int]  # sampled
    phases: Phases
    figures: dict[str, float]  # of the last one


def taken(bench: Bench, work: Work, device: str, *, steps: int) -> Steps:
    """So many steps of that work after one to warm up; raises AssertionError where one learned nothing."""
    sampler = bench.sampler(work)
    numbers, key = {"prompts": work.prompts, "group_size": work.size}, prng.key(KEY, device="cpu")
    carried = AT_THE_START
    durations, tokens, phases = [], [], Phases(device)
    for step in range(1 + steps):
        if step == 1:
            phases = Phases(device)
        began = time.perf_counter()
        experience, carried, figures = bench.step(
            sampler, carried, **numbers, key=prng.fold_in(key, step), span=phases.span
        )
        wait(device)
        durations.append(time.perf_counter() - began)
        tokens.append(int(experience.batch.mask.sum()))
        norm = figures.get("loss/grad_norm", 0.0)
        require(0 < norm < float("inf"), f"step {step}: got a gradient norm of {norm}, expected a finite one above 0")
        del experience
    return Steps(durations[1:], tokens[1:], phases, figures)


def parts(steps: Steps) -> list[Figure]:
    """Each phase's seconds a step, what is left of the step, and each phase's memory."""
    count = len(steps.seconds)
    each = {name: steps.phases.seconds[name] / count for name in PHASES}
    left = sum(steps.seconds) / count - sum(each.values())
    held = [Figure(f"{name}, peak memory", most, "GB") for name, most in steps.phases.peak.items() if most]
    return [*(Figure(name, value, "s") for name, value in each.items()), Figure("the rest", left, "s"), *held]


def grpo(setting: Setting) -> list[Figure]:
    """0.5B in bfloat16 with float32 weights and moments; blocks as a run has them, compiled on a card."""
    work = Work(2, 3, 4, 6) if setting.tiny else Work(32, 16, 128, 512)
    model = folder(setting, sized(setting, QWEN["0.5b"]))
    device, config = torch.device(setting.device), AutoConfig.from_pretrained(model)
    execution = plan_blocks(scale(compile=blocks.compiled_on_cuda), device, config=config, deterministic=False)
    bench = built(setting, model, torch.bfloat16, micro_tokens=32_768, compile=execution.parallelism.compile)
    steps = taken(bench, work, setting.device, steps=1 if setting.tiny else 2)
    took = statistics.median(steps.seconds)
    return [
        Figure("end to end", statistics.mean(steps.tokens) / took, "tokens/s", at_least=20_000.0),
        Figure("a step", took, "s"),
        *parts(steps),
        Figure("sampler from trainer, mean", steps.figures["loss/logprob_diff_mean"], "nats", at_most=0.02),
        Figure("sampler from trainer, most", steps.figures["loss/logprob_diff_max"], "nats"),
    ]


def capped(setting: Setting) -> list[Figure]:
    """A 1.5B model with adapters inside a hard cap of 8 GB, as the launcher of experiments/gsm8k_lora_8gb starts it.

    The cap is on what tensors and their gaps take; CUDA's own context (some 0.5 GB) stands beside it, as on a card that
    has so much more.
    """
    on_cuda = setting.device == "cuda"
    if on_cuda:
        cap()
    work = Work(1, 4, 4, 6) if setting.tiny else Work(4, 8, 128, 256)
    bench = built(
        setting,
        folder(setting, sized(setting, QWEN["1.5b"])),
        torch.bfloat16,
        adapters=ADAPTERS,
        micro_tokens=2048,
        logits_chunk_elements=2**22,
        lr=5e-5,
        activation_checkpointing=blocks.full_checkpointing,
    )
    before = {trained: held(bench.policy, trained) for trained in (True, False)}
    steps = taken(bench, work, setting.device, steps=1 if setting.tiny else 3)
    require(held(bench.policy, True) != before[True], "got the same adapters after training")
    require(held(bench.policy, False) == before[False], "got another base after training the adapters")
    reserved = [torch.cuda.max_memory_reserved() / GB] if on_cuda else []
    return [
        *(Figure("reserved at most", most, "GB", at_most=CAP / GB) for most in reserved),
        Figure("steps completed", float(1 + len(steps.seconds))),
        Figure("a step", sum(steps.seconds) / len(steps.seconds), "s"),
        *parts(steps),
    ]


def cap() -> None:
    """Set it, and see that it holds: half a gigabyte more than all of it is refused."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP / total))
    try:
        torch.empty(int(CAP + GB / 2), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise AssertionError(f"got {(CAP + GB / 2) / GB:g} GB from the allocator, expected a cap at {CAP / GB:g} GB")


def held(policy: FSDPPolicy, trained: bool) -> Fingerprint:
    """Of the adapters, or of what they stand beside."""
    some = (weight_fingerprint(x) for name, x in policy.named_tensors().items() if is_adapter(name) == trained)
    return sum(some, NOTHING)
