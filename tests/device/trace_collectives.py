"""The collectives that one rank of many calls in a training step, in their order, on the fake device.

    python tests/device/trace_collectives.py MESH RANK        # an object: its micro-batches and calls

NCCL's place is taken by torch's backend "fake": no other rank is there, and what a rank would get from others it finds
in its own memory. So numbers mean nothing here; which collective comes when, of which shape and dtype, does: where two
ranks of a group differ in that, the run hangs.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/device_check"), str(Path(__file__).parent)]

import fake_cuda  # noqa: E402, F401 before torch

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from device_exact import rows_of  # noqa: E402
from device_parts import KEY, scale  # noqa: E402
from device_runner import Setting  # noqa: E402
from device_shapes import Shape, folder  # noqa: E402
from meshes import MESHES, ON_HOST  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from grpo_fn.algo import controllers  # noqa: E402
from grpo_fn.core import prng  # noqa: E402
from grpo_fn.core.batch import trim_rows  # noqa: E402
from grpo_fn.core.types import Batch, Scores  # noqa: E402
from grpo_fn.shell.model.logprob_model import LogprobModel  # noqa: E402
from grpo_fn.shell.model.packed_input import pack_shared_prompts  # noqa: E402
from grpo_fn.shell.policy import optimizer  # noqa: E402
from grpo_fn.shell.policy.fsdp import FSDPPolicy  # noqa: E402
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard  # noqa: E402
from grpo_fn.shell.world import World  # noqa: E402

SHAPE = Shape(96, 64, 2, 4, 4, 96)
Call = tuple[str, str]  # the collective, and of what


class LoneWorld(World):
    """One rank of many, the only one that is there: others say what this one says."""

    calls: list[Call] = []  # noqa: RUF012 one list for all that is traced

    def group(self) -> None:
        """No gloo group could be made."""

    def exchange(self, mine: Any, *, what: str) -> list[Any]:
        self.calls.append(("objects", what))
        return [mine] * self.size

    def _watch(self) -> None: ...


class CollectiveTrace(TorchDispatchMode):
    """Notes every collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its parts comes by again
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait_tensor" not in name:
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            kinds = Counter(f"{tuple(x.shape)} {x.dtype} {x.device.type}" for x in tensors)
            of = "; ".join(f"{n} x {kind}" for kind, n in kinds.items())
            LoneWorld.calls.append((name, of))
        return func(*args, **(kwargs or {}))


def lone_policy(rank: int, size: int, model: str, changed: dict[str, Any]) -> FSDPPolicy:
    """The policy of that rank."""
    os.environ.update(LOCAL_WORLD_SIZE=str(ON_HOST), WORLD_SIZE=str(size), RANK=str(rank))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    world = LoneWorld(rank, size, torch.device("cuda", 0), deadline=1e6)
    spec = ModelSpec(
        folder=model,
        config=AutoConfig.from_pretrained(model),
        dtype=torch.bfloat16,
        attention="sdpa",
        adapters=None,
        logprob_model=partial(
            LogprobModel, temperature=1.0, logits_chunk_elements=2**20, input_packing=pack_shared_prompts
        ),
        parallelism=scale(**changed),
        key=prng.key(KEY, device="cpu"),
    )
    loaded = load_and_shard(world, spec, reference=False, teachers={})
    # These two are asked by looking at numbers, of which some are others'.
    loaded.logprob_model._linear = loaded.logprob_model.input_packing.fit = True
    return FSDPPolicy(
        loaded.logprob_model,
        world=world,
        data=loaded.data,
        reference_model=None,
        dropout_modules=[],
        seed=0,
        micro_tokens=16,
        min_micro_batches=1,
        optimizer=partial(optimizer.adamw, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0),
        schedule=partial(optimizer.constant, warmup=0),
        loss_scale=controllers.constant_loss_scale,
        initial_scale=1.0,
        max_grad_norm=1.0,
    )


def trace(rank: int, size: int, model: str, changed: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches and calls of one update."""
    policy = lone_policy(rank, size, model, changed)
    tokens, mask = (x.to("cuda") for x in rows_of(SHAPE.vocabulary, groups=size // 4, size=8, prompt=6, new=10))
    none = torch.zeros(mask.shape, device="cuda")
    batch = Batch(tokens, mask, none, none, none, none, none + 1, torch.zeros_like(mask), mask.long())
    LoneWorld.calls.clear()
    with CollectiveTrace():
        parts = policy.split_rows(batch)
        policy.set_accumulation_steps(len(parts))
        for rows in parts:
            micro = trim_rows(batch, rows)
            _, pullback = policy.vjp(micro)
            pullback(Scores(torch.where(micro.mask, 1.0, 0.0), torch.zeros(micro.mask.shape, device="cuda")))
        LoneWorld.calls.append(("the update", ""))
        try:
            policy.update()
        except FloatingPointError:
            LoneWorld.calls.append(("a norm of sums that were not made", ""))
    return {"micro_batches": len(parts), "calls": LoneWorld.calls.copy()}


def main(mesh: str, rank: int) -> None:
    """Trace that rank."""
    torch.set_num_threads(1)
    size, changed = MESHES[mesh]
    with tempfile.TemporaryDirectory() as scratch:
        model = folder(Setting(device="cuda", tiny=True, scratch=scratch), SHAPE)
        found = trace(rank, size, model, changed)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)
