"""The collectives that ranks of many call in a training step, in their order, on the fake device.

    python tests/device/trace_collectives.py MESH RANK [RANK ...]   # by rank: groups and calls of meshes.MESHES[MESH]
    python tests/device/trace_collectives.py MESH all               # all 64
    python tests/device/trace_collectives.py MESH all --own_rows    # with a mistake, planted

NCCL's place is taken by torch's backend "fake": no other rank is there, and what a rank would get from others is what
it has itself. So numbers mean nothing here; which collective comes when, in which group, of which shape and dtype,
does: where two ranks of a group differ in that, the run hangs. Each rank is a process of its own, forked from one that
has imported everything and made the model's folder.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/device_check"), str(Path(__file__).parent)]

import fake_cuda  # noqa: E402, F401 before torch

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from compare_traces import Trace  # noqa: E402
from device_exact import rows_of  # noqa: E402
from device_parts import KEY  # noqa: E402
from device_runner import Setting  # noqa: E402
from device_shapes import Shape, folder  # noqa: E402
from meshes import MESHES, ON_HOST, RANKS, Spread, spread_of  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from grpo_fn.core import prng  # noqa: E402
from grpo_fn.core.batch import trim_rows  # noqa: E402
from grpo_fn.core.types import Batch, Pullback, Scores  # noqa: E402
from grpo_fn.shell.model.logprob_model import LogprobModel  # noqa: E402
from grpo_fn.shell.model.packed_input import pack_shared_prompts  # noqa: E402
from grpo_fn.shell.policy import optimizer  # noqa: E402
from grpo_fn.shell.policy.fsdp import FSDPPolicy  # noqa: E402
from grpo_fn.shell.policy.load_and_shard import ModelSpec, load_and_shard  # noqa: E402
from grpo_fn.shell.world import World  # noqa: E402

SHAPE = Shape(96, 64, 2, 4, 4, 96)
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")  # of the same libraries


class LoneWorld(World):
    """One rank of many, the only one that is there: others say what this one says."""

    trace: Trace

    def group(self) -> None:
        """No gloo group could be made."""

    def exchange(self, mine: Any, *, what: str) -> list[Any]:
        self.trace.add(f"objects: {what}", list(range(self.size)), "")
        return [mine] * self.size

    def _watch(self) -> None: ...


class CollectiveTrace(TorchDispatchMode):
    """Notes every collective."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its parts comes by again
        name = func._schema.name
        given = {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(NO_COLLECTIVES):
            tensors = [x for x in tree_leaves(list(given.values())) if isinstance(x, torch.Tensor)]
            kinds = Counter(f"{tuple(x.shape)} {x.dtype} {x.device.type}" for x in tensors)
            how = str(given.get("root_rank", ""))  # a broadcast's
            self.trace.add(name, ranks_of(given), "; ".join([*(f"{n} x {kind}" for kind, n in kinds.items()), how]))
        found = func(*args, **(kwargs or {}))
        if name == "c10d::_reduce_scatter_base_":  # the backend leaves what was in its memory
            mine = given["output_tensor"]
            mine.copy_(given["input_tensor"].view(-1, *mine.shape)[0])
        return found


def ranks_of(given: dict[str, Any]) -> list[int]:
    """The ranks of the group in a collective's arguments."""
    group = given["process_group"] if "process_group" in given else given["group_name"]
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    name = group if isinstance(group, str) else group.group_name
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name))


def lone_policy(world: World, model: str, spread: Spread) -> FSDPPolicy:
    """The policy of that rank."""
    spec = ModelSpec(
        folder=model,
        config=AutoConfig.from_pretrained(model),
        dtype=torch.bfloat16,
        attention="sdpa",
        adapters=None,
        logprob_model=partial(
            LogprobModel, temperature=1.0, logits_chunk_elements=2**20, input_packing=pack_shared_prompts
        ),
        parallelism=spread.parallelism,
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
        optimizer=spread.optimizer,
        schedule=partial(optimizer.constant, warmup=0),
        loss_scale=None,
        initial_scale=1.0,
        max_grad_norm=1.0,
    )


def looks_at_own_rows(policy: FSDPPolicy) -> None:
    """A mistake: where this rank has no row that learns, it leaves the backward pass out."""
    right = policy.vjp

    def vjp(batch: Batch) -> tuple[Scores, Pullback]:
        scores, pullback = right(batch)
        mine = bool(policy._dealt(batch.mask).any())
        return scores, pullback if mine else lambda dscores: None

    policy.vjp = vjp  # type: ignore[method-assign]


def trace_step(rank: int, model: str, spread: Spread, mistake: Callable[[FSDPPolicy], None]) -> Trace:
    """What one rank calls in one update of several micro-batches, and when the weights go to the sampler."""
    os.environ.update(LOCAL_WORLD_SIZE=str(ON_HOST), WORLD_SIZE=str(RANKS), RANK=str(rank))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    world = LoneWorld(rank, RANKS, torch.device("cuda", 0), deadline=1e6)
    world.trace = trace = Trace()
    policy = lone_policy(world, model, spread)
    mistake(policy)
    tokens, mask = (x.to("cuda") for x in rows_of(SHAPE.vocabulary, groups=RANKS // 4, size=8, prompt=6, new=10))
    none = torch.zeros(mask.shape, device="cuda")
    batch = Batch(tokens, mask, none, none, none, none, none + 1, torch.zeros_like(mask), mask.long())
    with CollectiveTrace(trace):
        parts = policy.split_rows(batch)
        trace.micro_batches = len(parts)
        policy.set_accumulation_steps(len(parts))
        for rows in parts:
            micro = trim_rows(batch, rows)
            _, pullback = policy.vjp(micro)
            pullback(Scores(torch.where(micro.mask, 1.0, 0.0), torch.zeros(micro.mask.shape, device="cuda")))
        trace.add(Trace.UPDATE, [rank], "")
        policy.update()
        for _ in policy.weights(trained=False):  # as they go to the sampler
            pass
    return trace


def in_process(rank: int, path: Path, trace: Callable[[int], Trace]) -> None:
    """Trace the rank in a forked process, which leaves it at that path. Raises RuntimeError when that fails."""
    child = os.fork()
    if not child:
        try:
            # Makes the thread pool that the fork broke: two threads of autograd at once would each begin to, and abort.
            torch.set_num_threads(1)
            path.write_text(json.dumps(trace(rank).plain()))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"rank {rank}: got a process that ended with {os.waitstatus_to_exitcode(status)}, wanted 0")


def main() -> None:
    """Trace these ranks."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("mesh", choices=MESHES)
    parser.add_argument("ranks", nargs="+")
    parser.add_argument("--own_rows", action="store_true")
    args = parser.parse_args()
    ranks = range(RANKS) if args.ranks == ["all"] else map(int, args.ranks)
    torch.set_num_threads(1)
    spread, found = spread_of(args.mesh), {}
    mistake = looks_at_own_rows if args.own_rows else lambda policy: None
    with tempfile.TemporaryDirectory() as scratch:
        model = folder(Setting(device="cuda", tiny=True, scratch=scratch), SHAPE)
        for rank in ranks:
            path = Path(scratch) / f"rank-{rank}.json"
            in_process(rank, path, partial(trace_step, model=model, spread=spread, mistake=mistake))
            found[rank] = json.loads(path.read_text())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
