"""Storages that are alive: bytes by what they hold, now and when they were most, phase by phase.

A storage counts from the operator that makes it until Python and autograd have let go of it, and as large as it is at
the time: FSDP2 frees what it has gathered by giving a storage no bytes, and gathers into it again.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Peak(NamedTuple):
    """The most bytes alive at once on the device in a phase, what they were, and the most on the host beside them."""

    bytes: int
    holders: dict[str, int]
    on_host: int  # of the holders


class LiveStorages:
    """Bytes of the storages that are alive.

    Those of integers and flags are left out: in a rehearsal they are the host's bookkeeping.

    Args:
        on_host: holders that lie in the host's memory, which count towards `by_holder` alone.
    """

    def __init__(self, on_host: frozenset[str]) -> None:
        self.on_host = on_host
        self.by_holder: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.phase = "load"
        self._known: dict[int, tuple[weakref.ref, str, int]] = {}  # by the storage's address: itself, holder, bytes
        self._total = 0

    def add(self, tensor: Tensor, holder: str) -> None:
        """Count the tensor's storage as what `holder` says, unless it is known."""
        if not tensor.dtype.is_floating_point or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = (weakref.ref(storage, lambda _: self._forget(key)), holder, 0)
        self._resize(key, storage.nbytes())

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is counted."""
        return tensor.untyped_storage()._cdata in self._known

    def hold(self, tensor: Tensor, holder: str) -> None:
        """From here on the tensor's storage is what `holder` says."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self.add(tensor, holder)
        key = tensor.untyped_storage()._cdata
        if key in self._known:
            ref, before, size = self._known[key]
            self._known[key] = (ref, holder, size)
            self._move(before, -size)
            self._move(holder, size)

    def begin(self, phase: str) -> None:
        """What is alive from here on is alive in that phase, too."""
        self.phase = phase
        self._note()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Within it storages that are given another size are followed."""
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            done = resize(storage, size)
            if storage._cdata in self._known:
                self._resize(storage._cdata, storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = followed
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def _resize(self, key: int, size: int) -> None:
        ref, holder, before = self._known[key]
        self._known[key] = (ref, holder, size)
        self._move(holder, size - before)
        self._note()

    def _forget(self, key: int) -> None:
        _, holder, size = self._known.pop(key)
        self._move(holder, -size)

    def _move(self, holder: str, size: int) -> None:
        self.by_holder[holder] += size
        self._total += 0 if holder in self.on_host else size

    def _note(self) -> None:
        most = self.peaks.get(self.phase)
        hosted = sum(self.by_holder[name] for name in self.on_host)
        if most is None or (self._total, hosted) > (most.bytes, most.on_host):
            self.peaks[self.phase] = Peak(self._total, {name: n for name, n in self.by_holder.items() if n}, hosted)
