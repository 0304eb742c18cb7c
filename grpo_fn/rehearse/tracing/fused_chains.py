"""What compiled blocks move at most, if everything between two products or attentions is one kernel.

A chain is a run of elementwise operators and reductions that nothing else interrupts. As one kernel it reads what it
did not make, each once, and writes what is still alive behind it: what a later operator or the backward pass takes. A
compiler may need several kernels for a chain, and may save less for the backward pass by computing it again.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fn.rehearse.tracing.operators import ELEMENTWISE, Cost, shown_bytes

# Gathers and scatters of attention and of the KV cache, in front of which compiled code stops.
UNFUSED = frozenset(
    {
        *("aten::embedding", "aten::index_select", "aten::index", "aten::gather", "aten::scatter", "aten::index_copy_"),
        *("aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::index_add_", "aten::index_add"),
        *("aten::new_zeros", "aten::zeros_like", "aten::zero_"),
    }
)


class FusedChains:
    """The chain that is being built."""

    def __init__(self) -> None:
        self.read: dict[int, int] = {}  # bytes by storage
        self.made: dict[int, tuple[weakref.ref, int]] = {}
        self.dtype: torch.dtype | None = None

    def add(self, given: Sequence[Tensor], made: Sequence[Tensor], dtype: torch.dtype) -> None:
        """One more operator."""
        self.dtype = self.dtype or dtype
        for x in given:
            key = x.untyped_storage()._cdata
            if not self._mine(key):
                self.read[key] = max(self.read.get(key, 0), shown_bytes(x))
        for x in made:
            storage = x.untyped_storage()
            size = max(shown_bytes(x), self.made[storage._cdata][1] if self._mine(storage._cdata) else 0)
            self.made[storage._cdata] = weakref.ref(storage), size

    def close(self) -> Cost | None:
        """The chain as one kernel; None where there is none."""
        if not self.made:
            return None
        written = sum(size for ref, size in self.made.values() if ref() is not None)
        found = Cost(ELEMENTWISE, 0, sum(self.read.values()) + written, self.dtype or torch.float32)
        self.read, self.made, self.dtype = {}, {}, None
        return found

    def _mine(self, key: int) -> bool:
        """Whether the storage was made in the chain: an address may have been another's before."""
        return key in self.made and self.made[key][0]() is not None
