"""vLLM in the process that trains: pushes, fingerprints, the probe, sleep and waking with real memory."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from device_parts import GB, KEY, built, options, require
from device_runner import Figure, LeftOut, Setting
from device_shapes import QWEN, Work, folder, sized

from grpo_fn.algo.step import AT_THE_START
from grpo_fn.core import prng
from grpo_fn.shell.sampler.interface import DataParallelSampler
from grpo_fn.shell.sampler.probe import Probe
from grpo_fn.shell.vllm import vllm_sampler
from grpo_fn.shell.vllm.engine import check_installed

SMALL = Work(8, 8, 160, 32)  # the prompt longer than a block of cached prefixes
SHARE = 0.3  # of the card


def colocated(setting: Setting) -> list[Figure]:
    """A half-B engine beside a half-B policy: pushed, probed, asleep, awake, a whole step, probed again."""
    try:
        check_installed("vllm")  # a folder of that name is none
    except ValueError as error:
        raise LeftOut("vllm is not here") from error
    shape = sized(setting, QWEN["0.5b"])
    bench = built(setting, folder(setting, shape), torch.bfloat16, lr=1e-4)
    place, positions, key = bench.context(), SMALL.prompt + 2 * SMALL.new, prng.key(KEY, device="cpu")
    sampler = vllm_sampler.colocated_sampler(
        place,
        options(place, SMALL),
        max_model_len=positions,
        tensor_parallel=1,
        gpu_memory_utilization=SHARE,
        kv_cache_bytes=2**26,
        enforce_eager=False,
        generate_timeout=60.0,
    )
    spread = DataParallelSampler(sampler, bench.world)
    probe = partial(Probe(max_gap=0.1), spread, bench.policy, key=key, max_positions=positions, dtype=torch.bfloat16)
    try:
        spread.load(bench.policy)  # raises StaleEngine where the fingerprints differ
        first = probe()
        verified = spread.figures()["engine/verified"]
        engine, before = sampler.engine, sampler.engine._held()
        shallow = freed(lambda: engine.llm.sleep(level=1))
        require(shallow > 0, "sleep level 1: got no memory back")
        engine.llm.wake_up()
        require(engine._held() == before, "sleep level 1: got other weights on waking")
        deep = freed(spread.rest)
        spread.load(bench.policy)
        bench.step(spread, AT_THE_START, prompts=4, group_size=SMALL.size, key=key, span=lambda _: nullcontext())
        second = probe()
    finally:
        spread.close()
    require(deep > 0, "sleep: got no memory back")
    return [
        Figure("fingerprints compared after a push", "yes" if verified else "its layout hides them"),
        Figure("probe after the first push, mean", first["engine/probe_gap_mean"], "nats", at_most=0.02),
        Figure("probe after a whole step, mean", second["engine/probe_gap_mean"], "nats", at_most=0.02),
        Figure("sleep level 1 gives back", shallow, "GB"),
        Figure("rest (sleep level 2) gives back", deep, "GB"),
    ]


def freed(f: Callable[[], object]) -> float:
    """Gigabytes of the card that are free after it and were not before."""
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    f()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    return (after - before) / GB
