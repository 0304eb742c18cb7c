"""One rank of `tools/bench scaling` and `checkpoint`, under torchrun: all measure, the main one writes it down."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PreTrainedTokenizerBase, Qwen2Config

from grpo_fn.algo import aggregation, kl, losses
from grpo_fn.algo.objective import policy_objective
from grpo_fn.algo.step import UNMOVED
from grpo_fn.config import load_config
from grpo_fn.core import prng, sampling
from grpo_fn.core.batch import count, make_batch, trim_rows
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.model.packed_input import pack_shared_prompts
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.sampler.interface import DataParallelSampler
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler
from grpo_fn.shell.world import World, join_world
from grpo_fn.trainer.sections import Compute

EOS = 0


class Size(NamedTuple):
    """A model with random weights, and the rows of one step."""

    vocabulary: int
    hidden: int
    layers: int
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    micro_tokens: int

    def config(self) -> Qwen2Config:
        """A Qwen2 with tied embeddings, heads of 64."""
        heads = self.hidden // 64
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=4 * self.hidden,
            tie_word_embeddings=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )


SIZES = {
    "tiny": Size(512, 64, 2, 4, 4, 8, 8, 128),
    "small": Size(32_000, 384, 8, 8, 8, 64, 64, 2048),
    "0.5b": Size(151_936, 896, 24, 32, 16, 128, 256, 16_384),
}


def as_rank(args: argparse.Namespace) -> int:
    """One of the ranks: measure; the main one writes the figures down."""
    world = join_world("auto", deadline=600.0)
    found = RANK_WORK[args.what](world, args)
    if world.main:
        args.out.write_text(json.dumps(found))
    world.leave()
    return 0


class Bench(NamedTuple):
    """A policy and a sampler in place, and the problems of a step."""

    policy: FSDPPolicy
    sampler: DataParallelSampler
    problems: list[Problem]
    key: Tensor
    size: Size

    def sample(self) -> Any:
        """The step's completions, none of which ends early."""
        return self.sampler.sample(self.problems, self.size.group_size, key=self.key)

    def learn(self, batch: Batch) -> None:
        """One optimizer step on the batch."""
        micros = [trim_rows(batch, rows) for rows in self.policy.split_rows(batch)]
        self.policy.set_accumulation_steps(len(micros))
        for micro in micros:
            scores, pullback = self.policy.vjp(micro)
            loss = partial(OBJECTIVE, batch=micro, totals=count(batch), gains=UNMOVED)
            signal, _ = torch.func.grad_and_value(loss, has_aux=True)(scores)
            pullback(signal)
        self.policy.update()


OBJECTIVE = partial(
    policy_objective,
    token_loss=partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2),
    importance_correction=None,
    kl=kl.k3,
    loss_aggregation=aggregation.token_mean,
    beta=0.0,
    entropy_bonus=0.0,
)


class Silent(PreTrainedTokenizerBase):
    """As much of a tokenizer as sampling needs: nothing is read."""

    eos_token_id = EOS

    def __init__(self) -> None: ...

    def batch_decode(self, rows: Iterable[Any], skip_special_tokens: bool) -> list[str]:
        return ["" for _ in rows]


def built(world: World, size: Size, *, model: Path, scale: str) -> Bench:
    """The model in that folder, in place as the file `scale` says."""
    of_scale = scale_sections(**load_config(["base.gin", scale], [], taker="bench_rank.scale_sections").kwargs())
    placing = ModelSpec(
        folder=str(model),
        config=AutoConfig.from_pretrained(model),
        dtype=getattr(torch, of_scale.compute.dtype),
        attention="sdpa",
        adapters=of_scale.lora,
        logprob_model=partial(
            LogprobModel, temperature=1.0, logits_chunk_elements=2**24, input_packing=pack_shared_prompts
        ),
        parallelism=of_scale.parallelism,
        key=prng.key(0, device="cpu"),
    )
    placed = load_and_shard(world, placing, reference=False, teachers={})
    policy = FSDPPolicy(
        placed.logprob_model,
        world=world,
        data=placed.data,
        reference_model=None,
        dropout_modules=placed.dropout_modules,
        seed=0,
        micro_tokens=size.micro_tokens,
        min_micro_batches=1,
        optimizer=partial(optimizer.adamw, lr=1e-6, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0),
        schedule=partial(optimizer.constant, warmup=0),
        loss_scale=None,
        initial_scale=1.0,
        max_grad_norm=1.0,
    )
    sampler = LocalSampler(
        model=placed.decoding(),
        tokenizer=Silent(),
        token_sampler=partial(sampling.categorical, temperature=1.0),
        encode=partial(random_prompt, size),
        max_new_tokens=size.new_tokens,
        stop=(),
        max_rows=size.prompts * size.group_size,
    )
    problems = [Problem(uid, str(uid), "", {}) for uid in range(size.prompts)]
    return Bench(policy, DataParallelSampler(sampler, world), problems, prng.key(1, device="cpu"), size)


class ScaleSections(NamedTuple):
    """What the bench takes of a configuration."""

    compute: Compute
    parallelism: Parallelism
    lora: LoRA | None


def scale_sections(*, compute: Compute, parallelism: Parallelism, lora: LoRA | None) -> ScaleSections:
    """The root's sections that a file of scale/ binds."""
    return ScaleSections(compute, parallelism, lora)


def random_prompt(size: Size, tokenizer: Any, prompt: str) -> list[int]:
    """Random tokens, the same for the same prompt."""
    key = prng.key(int(prompt), device="cpu")
    u = prng.uniform(key, size.prompt_tokens, low=1.0, high=size.vocabulary - 1.0, dtype=torch.float64)
    return u.long().tolist()


def as_batch(bench: Bench, rollout: Any) -> Batch:
    """The rollout with an advantage of plus or minus one for every row."""
    p, g = bench.size.prompts, bench.size.group_size
    adv = torch.where(torch.arange(p * g) % 2 == 0, 1.0, -1.0).view(p, g, 1).expand(p, g, rollout.mask.shape[1])
    keep = torch.ones(p, g, dtype=torch.bool)
    return make_batch(rollout, keep, adv.to(rollout.mask.device), *(rollout.logp_sampled,) * 3)


def scaling(world: World, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second sampled and trained on; the share of a training step in which a collective was under way."""
    bench = built(world, SIZES[args.size], model=args.model, scale=args.scale)
    batch = as_batch(bench, bench.sample())
    tokens = int(batch.mask.sum())
    sampled = [timed(world, bench.sample) for _ in range(args.steps + 1)][1:]
    trained = [timed(world, partial(bench.learn, batch)) for _ in range(args.steps + 1)][1:]
    return {
        "sampled": tokens / statistics.median(sampled),
        "trained": tokens / statistics.median(trained),
        "talking": talking(partial(bench.learn, batch)) if world.size > 1 else 0.0,
    }


def checkpoint(world: World, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a training step without a save, with one that it waits for, and with one beside it."""
    bench = built(world, SIZES[args.size], model=args.model, scale=args.scale)
    batch = as_batch(bench, bench.sample())
    learn = partial(bench.learn, batch)
    learn()
    root = world.exchange(tempfile.mkdtemp(dir=args.out.parent), what="where checkpoints go")[0]
    with AsyncSaver(Path(root), world) as saver:
        number = iter(range(10**6))

        def saving(wait: bool) -> None:
            learn()
            saver.save(next(number), tensors=bench.policy.tensors(), blobs={}, meta={})
            if wait:
                saver.wait()

        saving(wait=True)
        plain = [timed(world, learn) for _ in range(args.steps)]
        waiting = [timed(world, partial(saving, wait=True)) for _ in range(args.steps)]
        beside = []
        for _ in range(args.steps):  # one save, then a step beside which it is written
            beside.append(timed(world, partial(saving, wait=False)) + timed(world, learn))
            saver.wait()
    held = sum(x.numel() * x.element_size() for x in bench.policy.tensors().values())
    return {
        "plain": statistics.median(plain),
        "waiting": statistics.median(waiting),
        "beside": statistics.median(beside) - statistics.median(plain),
        "gigabytes": held / 1e9,
    }


def timed(world: World, f: Callable[[], Any]) -> float:
    """Seconds until all ranks are through."""
    world.exchange(None, what="starting together")
    begun = time.perf_counter()
    f()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.exchange(None, what="ending together")
    return time.perf_counter() - begun


def talking(step: Callable[[], None]) -> float:
    """The share of a step's time in which a collective was under way, waiting for slower ranks included."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as seen:
        begun = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        whole = time.perf_counter() - begun
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() if e.name.startswith(("gloo:", "nccl"))]
    return covered(spans) / 1e6 / whole


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the line the spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


RANK_WORK = {"scaling": scaling, "checkpoint": checkpoint}


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("what", choices=[*RANK_WORK])
    parser.add_argument("--scale", required=True, metavar="FILE", help="laid over base.gin")
    parser.add_argument("--size", required=True, choices=[*SIZES])
    parser.add_argument("--steps", required=True, type=int, help="measured steps")
    parser.add_argument("--model", required=True, type=Path, help="the folder")
    parser.add_argument("--out", required=True, type=Path, help="the file that the figures go to")
    return parser


if __name__ == "__main__":
    sys.exit(as_rank(flags().parse_args()))
