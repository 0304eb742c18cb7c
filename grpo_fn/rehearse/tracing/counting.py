"""What a piece of the program does, operator by operator: work, collectives, waits, and what is alive meanwhile.

The same mode counts real operators, of real ranks, and rehearsed ones. In a rehearsal weights and activations have no
data (FakeTensorMode, entered before this one); integers and flags have: the step looks at row lengths and at where
tokens are. So an operator between tensors with data is done, and one in which a tensor without data takes part is
shapes alone. A number without data that is asked for its value is 1: a gradient has a norm, and it is finite.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_fn.rehearse.tracing.card_kernels import COSTS
from grpo_fn.rehearse.tracing.fused_chains import UNFUSED, FusedChains
from grpo_fn.rehearse.tracing.live_storages import LiveStorages
from grpo_fn.rehearse.tracing.operators import ELEMENTWISE, Cost, all_tensors, cost, launches

BLOCKS, REST, SHARDING = "blocks", "embedding, norm, head", "gathers and reductions"  # parts; set by `model_parts`
WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"})
COLLECTIVES = ("c10d::", "_c10d_functional::")
PASSIVE = ("wait_tensor", "barrier", "monitored_barrier_")  # of these: nothing is sent
# What FSDP2 keeps in what its operators write to.
HOLDERS = {
    "fsdp::all_gather_copy_in": "gather buffers",
    "fsdp::split_with_sizes_copy": "gathered weights",
    "fsdp::chunk_cat": "gradients to reduce",
}


class Work(NamedTuple):
    """Operators of one kind, alike in cost, in one part of a piece of the step."""

    piece: str
    part: str
    cost: Cost


class Sent(NamedTuple):
    """Collectives of one kind in one group, in one piece of the step."""

    piece: str
    name: str
    group: str


class CountingMode(TorchDispatchMode):
    """Within it every operator is counted: `work` and `waits` by piece of the step, `sent` by group.

    Args:
        live: notes which storages are made.
        groups: names of the process groups, by torch's.
    """

    def __init__(self, live: LiveStorages, groups: Mapping[str, str]) -> None:
        super().__init__()
        self.live, self.groups = live, groups
        self.piece, self.part, self.holder, self.off = "load", REST, None, 0
        self.work: Counter[Work] = Counter()
        self.fusable: Counter[Work] = Counter()  # of `work`, what compiled blocks have in kernels of several operators
        self.chains: Counter[Work] = Counter()  # those kernels, if each is as large as it can be
        self.chain = FusedChains()
        self.waits: Counter[str] = Counter()  # by piece
        self.calls: Counter[Sent] = Counter()
        self.sent: Counter[Sent] = Counter()  # bytes: all that a rank has before or after, the larger of both
        self.to_card: Counter[str] = Counter()  # bytes from the host's memory, by piece
        self.to_host: Counter[str] = Counter()

    def begin(self, piece: str, *, phase: str) -> None:
        """From here on operators count towards `piece`, and storages towards `phase`."""
        self.close_chain()
        self.piece, self.part = piece, REST
        self.live.begin(phase)

    def close_chain(self) -> None:
        """What comes next is in another kernel."""
        if (found := self.chain.close()) is not None:
            self.chains[Work(self.piece, BLOCKS, found)] += 1

    def __enter__(self) -> "CountingMode":
        # DTensor finds out an operator's shape by taking it on whole tensors without data: nothing that a rank does.
        self._before = before = ShardingPropagator._propagate_tensor_meta_non_cached

        def uncounted(propagator: ShardingPropagator, asked: OpSchema) -> Any:
            with self.pause():
                return before(propagator, asked)

        ShardingPropagator._propagate_tensor_meta_non_cached = uncounted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = self._before
        super().__exit__(*error)

    def pause(self) -> "Paused":
        """While it is entered, nothing is counted."""
        return Paused(self)

    @contextmanager
    def holding(self, holder: str | None) -> Iterator[None]:
        """Within it, what is made is held as that; None: by the part of the model that makes it."""
        before, self.holder = self.holder, holder
        yield
        self.holder = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.off:
            return func(*args, **kwargs)
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its parts comes by again
        given = all_tensors((args, kwargs))
        fake = any(isinstance(x, FakeTensor) for x in given)
        if func._schema.name in WAITS and (fake or any(x.dtype.is_floating_point for x in given)):
            self.waits[self.piece] += 1
            if fake:
                return _answer(func._schema.name, given[0])
        out = _done(func, args, kwargs, given, fake)
        if fake or any(x.dtype.is_floating_point for x in (*given, *all_tensors(out))):
            self._count(func, args, kwargs, given, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], out: Any) -> None:
        name = func._schema.name
        if name.startswith(COLLECTIVES):
            self.close_chain()
            if not name.endswith(PASSIVE):
                self._sent(name, (*args, out), given)
            return
        part, made = SHARDING if name in HOLDERS else self.part, all_tensors(out)
        if launches(func) and (not made or any(x.numel() for x in made)):  # of no numbers there is no kernel
            with unset_fake_temporarily():  # row lengths are looked at
                found = COSTS[name](*args, **kwargs) if name in COSTS else cost(func, args, kwargs, out)
            self.work[Work(self.piece, part, found)] += 1
            self._fuse(Work(self.piece, part, found), name, given, out)
        known = {x.untyped_storage()._cdata for x in given}
        for x in made:
            if x.untyped_storage()._cdata not in known:
                self.live.add(x, self._holder())
        if name in HOLDERS:
            for x in all_tensors((kwargs.get("out"), out, args[1:] if name == "fsdp::all_gather_copy_in" else ())):
                self.live.hold(x, HOLDERS[name])

    def _fuse(self, work: Work, name: str, given: list[Tensor], out: Any) -> None:
        """The operator as a part of the blocks' compiled code, or as what stands between two parts."""
        if work.part != BLOCKS or work.cost.kind != ELEMENTWISE or name in UNFUSED:
            self.close_chain()
            return
        self.fusable[work] += 1
        floats = [[x for x in values if x.dtype.is_floating_point] for values in (given, all_tensors(out))]
        self.chain.add(*floats, work.cost.dtype)

    def _holder(self) -> str:
        if self.holder is not None:
            return self.holder
        if torch._C._current_graph_task_id() != -1:
            return f"{self.part}: backward pass"
        return f"{self.part}: forward pass"

    def _sent(self, name: str, args: Any, given: list[Tensor]) -> None:
        """A collective: the bytes of its larger side, that of all ranks of the group."""
        sides = [[x for x in all_tensors(arg) if isinstance(x, Tensor)] for arg in args]
        size = max((sum(x.numel() * x.itemsize for x in side) for side in sides), default=0)
        group = next((g for g in map(_group_name, args) if g is not None), "")
        key = Sent(self.piece, name.split("::")[1].strip("_").removesuffix("_base"), self.groups.get(group, group))
        self.calls[key] += 1
        self.sent[key] += size
        if "reduce_scatter" in name:
            self.live.hold(given[0], "gradients")


class Paused:
    """A context that may be entered again and again, in which a mode counts nothing."""

    def __init__(self, mode: CountingMode) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        self.mode.off += 1

    def __exit__(self, *error: object) -> None:
        self.mode.off -= 1


def _group_name(value: Any) -> str | None:
    """The name of a process group, as operators are given it."""
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value).group_name
        except (RuntimeError, TypeError):
            return None  # a reduction
    return value if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values() else None


def _answer(name: str, asked: Tensor) -> Any:
    if name == "aten::_local_scalar_dense":
        return True if asked.dtype is torch.bool else 1.0 if asked.dtype.is_floating_point else 1
    if name == "aten::equal":
        return True
    raise RuntimeError(f"got {name} of numbers that a rehearsal does not have, wanted an operator of known shape")


def _done(func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], fake: bool) -> Any:
    """The operator's result: with data where all that is given has data, and where integers or flags are made.

    What weights on the meta device become has none: they are as large as the model.
    """
    if given and not fake and not any(x.is_meta and x.dtype.is_floating_point for x in given):
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 finds no shapes for it: it takes the dtype for beta
        return kwargs["out"]
    out = func(*args, **kwargs)
    if not given and isinstance(out, FakeTensor) and not out.dtype.is_floating_point:
        with unset_fake_temporarily():
            return func(*args, **kwargs)
    return out
