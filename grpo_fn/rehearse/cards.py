"""Cards that a rehearsal can be about: what their data sheets promise, and how much of it is counted on."""

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """Data of one card. Rates are peaks for dense numbers, of NVIDIA's data sheets."""

    name: str
    memory: int  # bytes that the driver shows
    bandwidth: float  # bytes a second, of its memory
    rates: dict[torch.dtype, float]  # floating-point operations a second of matrix products
    link: float  # bytes a second to another card of the host, one way
    network: float  # bytes a second to another host, each card's share, one way


def _rates(half: float, single: float, *, bfloat16: bool) -> dict[torch.dtype, float]:
    found = {torch.float16: half, torch.float32: single}
    return found | {torch.bfloat16: half} if bfloat16 else found


CARDS = {
    "h100": Card(
        "H100 SXM 80 GB", int(79.6 * GIB), 3.35e12, _rates(989e12, 67e12, bfloat16=True), link=450e9, network=50e9
    ),
    "a100": Card(
        "A100 SXM 80 GB", int(79.3 * GIB), 2.04e12, _rates(312e12, 19.5e12, bfloat16=True), link=300e9, network=25e9
    ),
    "v100": Card(
        "V100 SXM2 32 GB", int(31.7 * GIB), 0.90e12, _rates(125e12, 15.7e12, bfloat16=False), link=150e9, network=12.5e9
    ),
    "8gb": Card(
        "RTX 3070 8 GB", int(7.8 * GIB), 0.448e12, _rates(40.6e12, 20.3e12, bfloat16=True), link=16e9, network=1.25e9
    ),
}


@dataclass(frozen=True)
class Assumptions:
    """What of a card's peaks is counted on, and what else a time is made of. None of it was measured here."""

    products: float = 0.65  # of the peak, large matrix products
    attention: float = 0.35  # of the peak, attention kernels
    bandwidth: float = 0.80  # of the peak, operators that read and write
    links: float = 0.80  # of the peak, collectives
    launch: float = 5e-6  # seconds that the host takes for a launch
    replayed: float = 1.5e-6  # seconds that a kernel of a replayed graph takes at least
    reserved: float = 1.0 * GIB  # bytes: the context, libraries, NCCL's buffers
    gaps: float = 0.03  # of what is allocated, lost between the allocator's blocks

    def lines(self, card: Card) -> list[str]:
        """Each of them, for a person to judge."""
        rates = ", ".join(f"{str(k).removeprefix('torch.')} {v / 1e12:g}" for k, v in card.rates.items())
        return [
            f"{card.name}: {rates} TFLOP/s, {card.bandwidth / 1e12:g} TB/s, links {card.link / 1e9:g} GB/s in a host, "
            f"{card.network / 1e9:g} GB/s between hosts (data sheets)",
            f"of these: products {self.products:.0%}, attention {self.attention:.0%}, memory {self.bandwidth:.0%}, "
            f"links {self.links:.0%}; {self.launch * 1e6:g} us a launch, {self.replayed * 1e6:g} us a graph's kernel",
            f"memory for the run: {card.memory / GIB:.1f} GiB less {self.reserved / GIB:g} GiB for context and "
            f"libraries and {self.gaps:.0%} for gaps",
        ]


def find_card(name: str, dtype: torch.dtype) -> Card:
    """The card of that name. Raises ValueError for one that is not listed, or that has no such numbers.

    Args:
        name: h100, a100, v100 or 8gb.
        dtype: that the run computes in.

    Returns:
        The card.
    """
    if name not in CARDS:
        raise ValueError(f"--card: got {name!r}, wanted one of {', '.join(CARDS)}")
    if dtype not in CARDS[name].rates:
        raise ValueError(
            f"--card: got {name}, which computes bfloat16 in software; wanted float16 with loss scaling "
            "(--gin_file scale/fp16.gin) or float32"
        )
    return CARDS[name]


def usable_memory(card: Card, assumed: Assumptions) -> float:
    """Bytes that the run's tensors may take."""
    return (card.memory - assumed.reserved) * (1 - assumed.gaps)
