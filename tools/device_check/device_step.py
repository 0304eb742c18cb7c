"""Whole GRPO steps on the device, and what each of their phases takes in time and memory."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from device_parts import GB, KEY, Bench, built, forget, peak, require, scale, wait
from device_runner import Figure, Setting
from device_shapes import QWEN, Work, folder, sized
from transformers import AutoConfig

from grpo_fn.algo.step import AT_THE_START
from grpo_fn.core import prng
from grpo_fn.shell.model.blocks import compiled_on_cuda, full_checkpointing
from grpo_fn.shell.model.hf import is_adapter
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.mesh import plan_blocks
from grpo_fn.shell.vllm.fingerprint import NOTHING, Fingerprint, weight_fingerprint

PHASES = ("generate", "score", "train", "sync")
CAP = 8 * GB
ADAPTERS = LoRA(rank=16, alpha=32.0, dropout=0.05, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


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
        begun = time.perf_counter()
        yield
        wait(self.device)
        self.seconds[name] += time.perf_counter() - begun
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
    seconds, tokens, phases = [], [], Phases(device)
    for step in range(1 + steps):
        if step == 1:
            phases = Phases(device)
        begun = time.perf_counter()
        experience, carried, figures = bench.step(
            sampler, carried, **numbers, key=prng.fold_in(key, step), span=phases.span
        )
        wait(device)
        seconds.append(time.perf_counter() - begun)
        tokens.append(int(experience.batch.mask.sum()))
        norm = figures.get("loss/grad_norm", 0.0)
        require(0 < norm < float("inf"), f"step {step}: got a gradient norm of {norm}, wanted a finite one above 0")
        del experience
    return Steps(seconds[1:], tokens[1:], phases, figures)


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
    execution = plan_blocks(scale(compile=compiled_on_cuda), device, config=config, deterministic=False)
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
        activation_checkpointing=full_checkpointing,
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
    raise AssertionError(f"got {(CAP + GB / 2) / GB:g} GB from the allocator, wanted a cap at {CAP / GB:g} GB")


def held(policy: FSDPPolicy, trained: bool) -> Fingerprint:
    """Of the adapters, or of what they stand beside."""
    some = (weight_fingerprint(x) for name, x in policy.named_tensors().items() if is_adapter(name) == trained)
    return sum(some, NOTHING)
