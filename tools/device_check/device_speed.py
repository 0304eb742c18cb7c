"""How fast the device trains, against what it can do at most, measured in the same process."""

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from device_parts import Bench, built, forget, grpo_objective, most_held, require, seconds
from device_runner import Figure, Setting
from device_shapes import QWEN, Shape, Work, folder, sized

from grpo_fn.algo.step import UNMOVED, Term, update
from grpo_fn.core.batch import rows_as_rollout
from grpo_fn.core.types import Batch
from grpo_fn.shell.model import blocks
from grpo_fn.shell.policy import memory_estimate

MATRIX = 8192


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
    work = Work(2, 3, 4, 6) if setting.tiny else Work(4, 16, 128, 1024)
    micro_tokens = 8_192 + work.prompt
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
