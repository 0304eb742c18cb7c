"""One rank of test_estimate: trains one step in every way there is, and says what it allocated."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from grpo_fn.core import prng
from grpo_fn.shell.model import blocks, lora
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard
from grpo_fn.shell.policy.memory_estimate import tensor_bytes
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.world import World

ADAMW = partial(optimizer.adamw, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
HOW = lora.LoRA(rank=3, alpha=6.0, dropout=0.0, targets="all-linear")
STRATEGIES = {"full": (1, "rest", True), "grad_op": (1, "rest", False), "none": ("rest", 1, False)}
WAYS = [
    *(("full", None, torch.bfloat16), ("full", HOW, torch.float32), ("grad_op", None, torch.float32)),
    *(("none", HOW, torch.bfloat16), ("none", None, torch.float32)),
]
TEACHER_WAYS = [("full", torch.bfloat16), ("none", torch.float32)]  # a teacher has no adapters


@dataclass(frozen=True)
class Allocated:
    """Bytes of storages, and of moments."""

    weights: int
    gradients: int
    moments: int


def scale(strategy: str) -> Parallelism:
    replicate, shard, reshard = STRATEGIES[strategy]
    return Parallelism(
        dp_replicate=replicate,
        dp_shard=shard,
        tp=1,
        reshard_after_forward=reshard,
        offload=False,
        offload_reference=False,
        activation_checkpointing=blocks.no_checkpointing,
        compile=blocks.eager,
        collective_timeout=60.0,
    )


def placing(folder: Path, strategy: str, adapters: lora.LoRA | None, dtype: torch.dtype) -> ModelSpec:
    return ModelSpec(
        folder=str(folder),
        config=AutoConfig.from_pretrained(folder),
        dtype=dtype,
        attention="sdpa",
        adapters=adapters,
        logprob_model=partial(LogprobModel, temperature=1.0, logits_chunk_elements=2**20),
        parallelism=scale(strategy),
        key=prng.key(0, device="cpu"),
    )


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes of what these tensors lie in, each storage once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def allocated(world: World, how: ModelSpec) -> Allocated:
    logprob_model = load_and_shard(world, how, reference=False, teachers={}).logprob_model
    made = ADAMW(p for p in logprob_model.parameters() if p.requires_grad)
    tokens, mask = torch.arange(24).reshape(2, 12), torch.arange(12).expand(2, 12) > 4
    logp, entropy = logprob_model(tokens, mask)
    (logp.sum() + entropy.sum()).backward()
    for module in logprob_model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what is gathered for the computation is another line of the estimate
    params = list(logprob_model.parameters())
    weights, gradients = storages(params), storages([p.grad for p in params if p.grad is not None])
    made.step()
    return Allocated(weights, gradients, sum(tensor_bytes(state.values()) for state in made.state.values()))


def teachers_in_every_way(world: World, folder: Path) -> list[int]:
    """Bytes of a teacher's weights, without adapters and gradients, in each of TEACHER_WAYS."""
    found = []
    for strategy, dtype in TEACHER_WAYS:
        spec = placing(folder, strategy, None, dtype)
        with load_and_shard(world, spec, reference=False, teachers={"t": spec}).teachers["t"]() as model:
            found.append(storages(list(model.parameters())))
    return found


def in_every_way(world: World, folder: Path) -> list[dict[str, int]]:
    """What is allocated in each of WAYS."""
    return [vars(allocated(world, placing(folder, *way))) for way in WAYS]
