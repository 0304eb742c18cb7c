"""A checksum of weights, blind to their layout: fused, split, transposed or padded with zeros, it stays the same.

It is blind to the sign of zero, too: a layout that can only be looked at through a product has lost that.

It is a sum over all elements, so engines that join q, k and v into one matrix, or give every rank a part of it, can be
compared with the trainer that does not; adding up the parts' fingerprints gives the whole one's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = 2**22  # elements; their 64-bit copies are all the memory it needs


class Fingerprint(NamedTuple):
    """With b the bits of an element as an integer: sum b and sum b^2 over all elements, modulo 2^64."""

    first: int
    second: int

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        """That of both together."""
        return Fingerprint(*((a + b + 2**63) % 2**64 - 2**63 for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        """Both numbers in hexadecimal, without a sign."""
        return "-".join(f"{x % 2**64:016x}" for x in self)


NOTHING = Fingerprint(0, 0)


@torch.no_grad()
def weight_fingerprint(tensor: Tensor) -> Fingerprint:
    """That of one tensor's elements, in whatever order. Zero counts for nothing, minus zero neither."""
    total = NOTHING
    for part in tensor.detach().reshape(-1).split(AT_ONCE):
        bits = part.contiguous().view(_BITS[part.element_size()])
        if part.is_floating_point():
            bits = bits.masked_fill(bits == torch.iinfo(bits.dtype).min, 0)  # the sign alone: minus zero
        bits = bits.long()
        total += Fingerprint(int(bits.sum()), int((bits * bits).sum()))
    return total
