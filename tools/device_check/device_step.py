"""Whole GRPO steps on the device, and what each of their phases takes in time and memory."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from device_parts import KEY, Bench, built, forget, peak, require, scale, wait
from device_runner import Figure, Setting
from device_shapes import QWEN_HALF, folder, sized
from transformers import AutoConfig

from grpo_fn.algo.step import AT_THE_START
from grpo_fn.core import prng
from grpo_fn.shell.model.blocks import compiled_on_cuda
from grpo_fn.trainer.plan import plan_blocks

PHASES = ("generate", "score", "train", "sync")
NOTE = "step.json"  # in the scratch folder: what `trl` compares itself with


class Work(NamedTuple):
    """One step."""

    prompts: int
    size: int
    prompt: int
    new: int
    steps: int  # measured, after one to warm up


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


def taken(bench: Bench, work: Work, device: str) -> Steps:
    """So many steps after one to warm up; raises AssertionError where one learned nothing."""
    sampler = bench.sampler(prompt_tokens=work.prompt, new_tokens=work.new, max_rows=work.prompts * work.size)
    numbers, key = {"prompts": work.prompts, "group_size": work.size}, prng.key(KEY, device="cpu")
    carried = AT_THE_START
    seconds, tokens, phases = [], [], Phases(device)
    for step in range(1 + work.steps):
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


def parts(steps: Steps, unit: str = "s") -> list[Figure]:
    """Each phase's seconds a step, what is left of the step, and each phase's memory."""
    count = len(steps.seconds)
    each = {name: steps.phases.seconds[name] / count for name in PHASES}
    left = sum(steps.seconds) / count - sum(each.values())
    held = [Figure(f"{name}, peak memory", most, "GB") for name, most in steps.phases.peak.items() if most]
    return [*(Figure(name, value, unit) for name, value in each.items()), Figure("the rest", left, unit), *held]


def grpo(setting: Setting) -> list[Figure]:
    """0.5B in bfloat16 with float32 weights and moments; blocks as a run has them, compiled on a card."""
    work = Work(2, 3, 4, 6, 1) if setting.tiny else Work(32, 16, 128, 512, 2)
    model = folder(setting, sized(setting, QWEN_HALF))
    device, config = torch.device(setting.device), AutoConfig.from_pretrained(model)
    execution = plan_blocks(scale(compile=compiled_on_cuda), device, config=config, deterministic=False)
    bench = built(setting, model, torch.bfloat16, micro_tokens=32_768, compile=execution.parallelism.compile)
    steps = taken(bench, work, setting.device)
    took = statistics.median(steps.seconds)
    note = {"seconds": took, "model": model, "work": work._asdict()}
    (Path(setting.scratch) / NOTE).write_text(json.dumps(note))
    return [
        Figure("end to end", statistics.mean(steps.tokens) / took, "tokens/s", at_least=20_000.0),
        Figure("a step", took, "s"),
        *parts(steps),
        Figure("sampler from trainer, mean", steps.figures["loss/logprob_diff_mean"], "nats", at_most=0.02),
        Figure("sampler from trainer, most", steps.figures["loss/logprob_diff_max"], "nats"),
    ]
