"""One rank that takes an update with numbers, and the same update without: what each allocates, computes and sends.

Python's collector is off meanwhile: when it lets go of cycles depends on what else the process has made.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import estimating_rank as rank
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_fn.rehearse.lone_rank import lone_rank
from grpo_fn.rehearse.rehearsed_model import ModelAnswers, RehearsedSpec, answered_logprob_model
from grpo_fn.rehearse.rehearsed_rows import RowShape, rehearsed_batch, rehearsed_rollout
from grpo_fn.rehearse.step_pieces import count_training, make_moments
from grpo_fn.rehearse.tracing.counting import SHARDING, CountingMode
from grpo_fn.rehearse.tracing.live_storages import LiveStorages
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard
from grpo_fn.shell.world import World

SHAPE = RowShape(prompts=8, group=2, prompt_tokens=5, new_tokens=11)
MICRO_TOKENS = 64


@dataclass(frozen=True)
class Taken:
    """What one update came to."""

    peaks: dict[str, int]
    flops: int
    sent: dict[str, int]
    micro_batches: int
    held: dict[str, int]  # in the update, by what it is
    moved: int  # bytes that operators of the last micro-batch read and write
    sharding: int  # of these, in operators of FSDP2


def update(world: World, spec: ModelSpec, mode: CountingMode) -> Taken:
    """An update of a policy that lies as `spec` says; nothing of it is known in advance."""
    loaded = load_and_shard(world, spec, reference=False, teachers={})
    policy = FSDPPolicy(
        loaded.logprob_model,
        world=world,
        data=loaded.data,
        reference_model=None,
        dropout_modules=[],
        seed=0,
        micro_tokens=MICRO_TOKENS,
        min_micro_batches=1,
        optimizer=rank.ADAMW,
        schedule=partial(optimizer.constant, warmup=0),
        loss_scale=None,
        initial_scale=1.0,
        max_grad_norm=1.0,
    )
    # Asked before anything is counted: with numbers a model is tried out.
    rollout = rehearsed_rollout(SHAPE, spec.config.vocab_size)
    batch = rehearsed_batch(rollout, SHAPE)
    policy.split_rows(batch)
    policy.named_tensors()
    make_moments(mode, policy)
    count = count_training(mode, policy, batch, entropy=True)
    flops = sum(n * work.cost.flops for work, n in mode.work.items() if "micro-batch" in work.piece)
    sent: dict[str, int] = {}
    for key, size in mode.sent.items():
        if "micro-batch" in key.piece:
            sent[key.name] = sent.get(key.name, 0) + size
    last = [(work, n * work.cost.bytes) for work, n in mode.work.items() if work.piece == "last micro-batch"]
    return Taken(
        {name: peak.bytes for name, peak in mode.live.peaks.items()},
        flops,
        sent,
        count,
        mode.live.peaks["update"].holders,
        sum(size for _, size in last),
        sum(size for work, size in last if work.part == SHARDING),
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it no cycle is let go of, but those that there were."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_numbers(world: World, folder: Path, way: tuple) -> Taken:
    """On this rank, for real."""
    mode = CountingMode(LiveStorages(frozenset()), {})
    with uncollected(), mode.live.following(), mode:
        return update(world, rank.placing(folder, *way), mode)


def without_numbers(size: int, folder: Path, way: tuple) -> Taken:
    """Of rank 0 of so many, none of which is there."""
    mode = CountingMode(LiveStorages(frozenset()), {})
    spec = rank.placing(folder, *way)
    answers = ModelAnswers(linear_head=True, unpacked=None, grown_cache=None)
    made = partial(answered_logprob_model, made=spec.logprob_model, answers=answers, card=None)
    rehearsed = RehearsedSpec(**{**vars(spec), "logprob_model": made}, mode=mode)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if dist.is_initialized():  # by a test before: of one rank alone, which nothing uses any more
        dist.destroy_process_group()
    with uncollected(), lone_rank(size, size) as world, fake, mode.live.following(), mode:
        return update(world, rehearsed, mode)


def allocated(world: World, folder: Path, way: tuple) -> dict[str, int]:
    """Bytes of weights, gradients and moments after a step, asked of the tensors themselves."""
    return vars(rank.allocated(world, rank.placing(folder, *way)))
