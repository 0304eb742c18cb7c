"""All ranks of a mesh call the same collectives in the same order: 64 of them, each traced alone.

Torch's backend "fake" takes the place of NCCL: no other rank is there, and what a rank would get from others is what it
has itself. Numbers mean nothing here. Which collective comes when, in which group, of which shape and dtype, does:
where two ranks of a group differ in that, the run hangs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import estimating_rank as rank_of
import pytest
import torch
import torch.distributed as dist
from device_exact import rows_of
from device_runner import Setting
from device_shapes import Shape
from device_shapes import folder as model_folder
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fn.config import load_config
from grpo_fn.config.parse import GIN_FOLDER, parse_gin
from grpo_fn.core.batch import trim_rows
from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.model.blocks import eager
from grpo_fn.shell.policy import memory_estimate, optimizer
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import load_and_shard
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.world import World
from grpo_fn.trainer.plan import DeviceStep, traffic

ROOT = Path(__file__).resolve().parents[3]
RANKS, ON_HOST, VOCABULARY = 64, 8, 96
SHAPE = Shape(VOCABULARY, 64, 2, 4, 4, 96)
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")  # of the same libraries
# Besides each file by itself: three dimensions, and an optimizer that gathers matrices in the update.
TOGETHER = ["hybrid_shard+tensor_parallel", "no_shard+tensor_parallel", "hybrid_shard+offload", "hybrid_shard+muon"]


def mesh_files() -> list[str]:
    """The files of gin/scale that bind a knob of the mesh; how a block is computed changes no collective."""
    found = []
    for path in sorted((GIN_FOLDER / "scale").glob("*.gin")):
        knobs = [bound for (_, to), bound in parse_gin([f"scale/{path.name}"], []).knobs.items() if to is Parallelism]
        found += [path.stem] * any(one.keys() - {"compile"} for one in knobs)
    return found


class Call(NamedTuple):
    """A collective, the ranks of its group and what of: shapes, dtypes and devices."""

    name: str
    group: tuple[int, ...]
    of: str
    received: int  # bytes

    def kind(self) -> tuple[str, int, int]:
        """The same on every rank: its name, how many ranks its group has and how far apart they are."""
        return self.name, len(self.group), self.group[1] - self.group[0] if len(self.group) > 1 else 0


class LoneWorld(World):
    """One rank of many, the only one that is there: others say what this one says."""

    calls: list[Call]

    def group(self) -> None:
        """No gloo group could be made."""

    def exchange(self, mine: Any, *, what: str) -> list[Any]:
        self.calls.append(Call(f"objects: {what}", tuple(range(self.size)), "", 0))
        return [mine] * self.size

    def _watch(self) -> None: ...


class Tracing(TorchDispatchMode):
    """Within it every collective is appended to `calls`."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its parts comes by again
        name = func._schema.name
        given = {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        out = func(*args, **(kwargs or {}))
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(NO_COLLECTIVES):
            group = group_of(given)
            tensors = [x for x in tree_leaves(([*given.values()], out)) if isinstance(x, torch.Tensor)]
            kinds = Counter(f"{tuple(x.shape)} {x.dtype} {x.device.type}" for x in tensors)
            whole = max((x.nbytes for x in tensors), default=0) * (2 if "reduce_" in name and "all" in name else 1)
            received = whole * (len(group) - 1) // len(group)
            self.calls.append(Call(name, group, f"{dict(kinds)} {given.get('root_rank', '')}", received))
        if name == "c10d::_reduce_scatter_base_":  # the backend leaves what was in its memory
            given["output_tensor"].copy_(given["input_tensor"].view(-1, *given["output_tensor"].shape)[0])
        return out


def group_of(given: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of the group in a collective's arguments."""
    group = given["process_group"] if "process_group" in given else given["group_name"]
    group = dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
    name = group if isinstance(group, str) else group.group_name
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))


def disagreements(calls: dict[int, Sequence[Call]]) -> Iterator[str]:
    """A line for every rank that would not meet another one.

    In each group, its ranks have to call the same collectives of the same shapes in the same order. And the order over
    all groups has to be one for all ranks: else each of two may wait for the other in another group.
    """
    calls = {rank: [call for call in some if len(call.group) > 1] for rank, some in calls.items()}
    first = min(calls)
    for rank, some in calls.items():
        if [call.kind() for call in some] != [call.kind() for call in calls[first]]:
            yield f"rank {rank}, over all groups: another order than rank {first}'s"
        if any(rank not in call.group for call in some):
            yield f"rank {rank}: a call in a group without it"
    for group in {call.group for some in calls.values() for call in some}:
        members = [rank for rank in group if rank in calls]
        within = [[call[:3] for call in calls[rank] if call.group == group] for rank in members]
        for rank, some in zip(members, within, strict=True):
            if some != within[0]:
                yield f"rank {rank}, in {group}: other calls than rank {members[0]}'s"


def trace(mesh: str, rank: int, folder: str) -> list[Call]:
    """What that rank calls in an update of several micro-batches, and when the weights go to the sampler."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ON_HOST)
    bound = load_config(["run/arithmetic.gin", *(f"scale/{name}.gin" for name in mesh.split("+"))], []).kwargs()
    spec = rank_of.placing(Path(folder), "full", None, torch.bfloat16)
    spec = replace(spec, parallelism=replace(bound["parallelism"], compile=eager))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    world = LoneWorld(rank, RANKS, torch.device("cpu"), deadline=1e6)
    world.calls = []
    loaded = load_and_shard(world, spec, reference=False, teachers={})
    # These two are asked by looking at numbers, of which some are others'.
    loaded.logprob_model._linear = loaded.logprob_model.packs = True
    policy = FSDPPolicy(
        loaded.logprob_model,
        **{"world": world, "data": loaded.data, "reference_model": None, "dropout_modules": [], "seed": 0},
        **{"micro_tokens": 16, "min_micro_batches": 1, "optimizer": bound["policy"].optimizer, "max_grad_norm": 1.0},
        **{"schedule": partial(optimizer.constant, warmup=0), "loss_scale": None, "initial_scale": 1.0},
    )
    tokens, mask = rows_of(VOCABULARY, groups=RANKS // 4, size=8, prompt=6, new=10)
    none = torch.zeros(mask.shape)
    batch = Batch(tokens, mask, none, none, none, none, none + 1, torch.zeros_like(mask), mask.long())
    with Tracing(world.calls):
        parts = policy.split_rows(batch)
        assert len(parts) > 1
        policy.set_accumulation_steps(len(parts))
        for rows in parts:
            micro = trim_rows(batch, rows)
            _, pullback = policy.vjp(micro)
            pullback(Scores(torch.where(micro.mask, 1.0, 0.0), torch.zeros(micro.mask.shape)))
        policy.update()
        for _ in policy.weights(trained=False):  # as they go to the sampler
            pass
    return world.calls


def main(mesh: str, *words: str) -> None:
    """Trace these ranks of a mesh, each in its own process, forked from one that has imported everything."""
    ranks = [*map(int, words)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Setting(device="cpu", tiny=True, scratch=scratch), SHAPE)
        for rank in ranks:
            if (child := os.fork()) == 0:
                try:
                    torch.set_num_threads(1)  # makes the thread pool that the fork broke
                    Path(scratch, f"{rank}.json").write_text(json.dumps(trace(mesh, rank, folder)))
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                sys.exit(f"rank {rank}: got a process that failed, expected its calls")
        print(json.dumps({rank: json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in ranks}))


def traced(mesh: str, ranks: Iterable[int]) -> dict[int, list[Call]]:
    """What each of these ranks calls; this file is the program that traces them."""
    paths = ("", "tests", "tests/helpers", "tools/device_check")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths)}
    command = [sys.executable, __file__, mesh, *map(str, ranks)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(rank): [Call(name, tuple(group), *of) for name, group, *of in calls] for rank, calls in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", [*mesh_files(), *TOGETHER])
def test_all_ranks_of_a_mesh_call_the_same_collectives_in_the_same_order(mesh: str) -> None:
    assert not [*disagreements(traced(mesh, range(RANKS)))]


@pytest.mark.slow
def test_a_dry_run_counts_the_bytes_that_a_rank_receives() -> None:
    """Each exactly, of weights that divide evenly among the ranks; else FSDP2 has padding besides."""
    bound = load_config(["run/arithmetic.gin", "scale/hybrid_shard.gin", "scale/tensor_parallel.gin"], []).kwargs()
    how, (calls,) = bound["parallelism"], traced("hybrid_shard+tensor_parallel", [0]).values()
    model, mesh = memory_estimate.meta_model(SHAPE.config(), None, "sdpa"), how.shape(RANKS, ON_HOST)
    assert mesh == (8, 4, 2)
    received = Counter()
    for call in calls:
        received[call.name.partition("::")[2], len(call.group)] += call.received
    micro_batches, odd = divmod(sum(call.name == "c10d::_reduce_scatter_base_" for call in calls), SHAPE.layers + 1)
    assert odd == 0
    step = DeviceStep(
        **{"mesh": mesh, "blocks": SHAPE.layers, "block_weights": SHAPE.matrices(), "head": (VOCABULARY, SHAPE.hidden)},
        **{"trained": sum(p.numel() for p in model.parameters()), "kv_bytes": 0, "width": 2, "max_rows": 8},
        **{"adapted": False, "compiled": False, "recomputed": False, "sampled_groups": 1, "trained_groups": 1},
        **{"group_size": 8, "prompt_tokens": 6, "new_tokens": 10, "frozen_passes": 0, "epochs": 1, "minibatches": 1},
        micro_batches=micro_batches,
    )
    said = {one.name: one.bytes for one in traffic(step, memory_estimate.weights(model, 4, 2), how, on_host=ON_HOST)}
    summed = sum(call.kind()[:2] == ("_c10d_functional::all_reduce", 2) for call in calls)
    assert summed == 7 * SHAPE.layers * micro_batches + 1  # and one of the norm
    assert said.pop("sums of shared products")
    assert said == {
        "weights, gathered": received["_allgather_base_", 4],
        "gradients, reduced": received["_reduce_scatter_base_", 4],
        "gradients, of other copies": received["allreduce_", 8],
        "weights, for the sampler": sum(received["all_gather_into_tensor", ranks] for ranks in (4, 2)),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
