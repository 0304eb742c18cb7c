"""Cards that a rehearsal can be about: their figures, where each is from, and how much of each is counted on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

GIB = 2**30
HALVES, SINGLE = (torch.float16, torch.bfloat16), torch.float32

# Public pages that quote NVIDIA's data sheets and white papers.
H100 = "https://glennklockwood.com/garden/processors/h100"
A100 = "https://glennklockwood.com/garden/processors/A100"
V100 = "https://github.com/avensun/deep-learning-benchmark"
GV100 = "https://www.techrival.com/nvidia-volta-tesla-v100-cards-detailed-150w-single-slot-300w-dual-slot-gv100-powered-pcie-accelerators/"
NVLINK = "https://wikimili.com/en/NVLink"
GA104 = "https://wsa.jianshu.io/p/3ea04861a710"


@dataclass(frozen=True)
class Card:
    """One card. A figure that `quoted` does not name is an assumption of ours."""

    name: str
    capability: tuple[int, int]  # compute capability
    halves: tuple[torch.dtype, ...]  # dtypes of 16 bits that it multiplies in hardware
    half: float  # floating-point operations a second of dense matrix products of those, with sums in float32
    single: float  # of float32
    bandwidth: float  # bytes a second, of its memory
    link: float  # bytes a second to another card of the host, one way
    memory: int  # bytes that the driver shows
    network: float  # bytes a second to another host, each card's share, one way
    host_link: float  # bytes a second between its memory and the host's, one way
    quoted: Mapping[str, str]  # by figure, a page that quotes NVIDIA's number for it

    @property
    def rates(self) -> dict[torch.dtype, float]:
        """Floating-point operations a second of matrix products."""
        return {**dict.fromkeys(self.halves, self.half), SINGLE: self.single}

    def texts(self) -> dict[str, str]:
        """Every figure in words, by its name here."""
        names = "/".join(str(x).removeprefix("torch.") for x in self.halves)
        return {
            "half": f"{names} {self.half / 1e12:g} TFLOP/s",
            "single": f"float32 {self.single / 1e12:g} TFLOP/s",
            "bandwidth": f"memory {self.bandwidth / 1e12:g} TB/s",
            "link": f"to a card of the same host {self.link / 1e9:g} GB/s",
            "memory": f"{self.memory / GIB:.1f} GiB as the driver shows them",
            "network": f"to another host {self.network / 1e9:g} GB/s",
            "host_link": f"to the host's memory {self.host_link / 1e9:g} GB/s",
        }


CARDS = {
    "h100": Card(
        "H100 SXM 80 GB",
        (9, 0),
        HALVES,
        half=989e12,
        single=67e12,
        bandwidth=3.35e12,
        link=450e9,  # of 900 in both directions
        memory=int(79.6 * GIB),
        network=50e9,  # a port of 400 Gb/s
        host_link=64e9,  # PCIe 5.0 x16
        quoted={"half": H100, "single": H100, "bandwidth": H100, "link": H100},
    ),
    "a100": Card(
        "A100 SXM 80 GB",
        (8, 0),
        HALVES,
        half=312e12,
        single=19.5e12,
        bandwidth=2.039e12,
        link=300e9,  # of 600
        memory=int(79.3 * GIB),
        network=25e9,  # 200 Gb/s
        host_link=32e9,  # PCIe 4.0 x16
        quoted={"half": A100, "single": A100, "bandwidth": A100, "link": A100},
    ),
    "v100": Card(
        "V100 SXM2 32 GB",
        (7, 0),
        (torch.float16,),
        half=125e12,
        single=15.7e12,
        bandwidth=0.9e12,
        link=150e9,  # of 300: six links of 25 each way
        memory=int(31.7 * GIB),
        network=12.5e9,  # 100 Gb/s
        host_link=16e9,  # PCIe 3.0 x16
        quoted={"half": V100, "single": V100, "bandwidth": GV100, "link": NVLINK},
    ),
    "8gb": Card(
        "RTX 3070 8 GB",
        (8, 6),
        HALVES,
        half=40.6e12,  # half of what sums in float16 have
        single=20.3e12,
        bandwidth=0.448e12,
        link=16e9,  # without NVLink: half of PCIe 4.0 x16
        memory=int(7.8 * GIB),
        network=1.25e9,  # 10 Gb/s
        host_link=32e9,  # PCIe 4.0 x16
        quoted={"single": GA104, "bandwidth": GA104},
    ),
}


@dataclass(frozen=True)
class Assumptions:
    """What of a card's peaks is counted on, and what else a time is made of. None of it was measured here."""

    products: float = 0.65  # of the peak, large matrix products
    attention: float = 0.35  # of the peak, attention kernels
    bandwidth: float = 0.80  # of the peak, operators that read and write
    links: float = 0.80  # of the peak, collectives, and transfers to and from the host
    launch: float = 5e-6  # seconds that the host takes for a launch
    replayed: float = 1.5e-6  # seconds that a kernel of a replayed graph takes at least
    wait: float = 20e-6  # seconds that a card idles around a value that the host waits for
    host_memory: float = 40e9  # bytes a second of the host's memory, each card's share: an optimizer on the host
    reserved: float = 1.0 * GIB  # bytes: the context, libraries, NCCL's buffers
    gaps: float = 0.03  # of what is allocated, lost between the allocator's blocks

    def lines(self, card: Card) -> list[str]:
        """Each of them, for a person to judge."""
        texts = card.texts()
        quoted, ours = (
            ", ".join(text for name, text in texts.items() if (name in card.quoted) is known) for known in (True, False)
        )
        return [
            f"{card.name}, quoted from data sheets (dense, one way): {quoted}",
            f"{card.name}, assumed, from no data sheet: {ours}",
            f"assumed to be reached of these: products {self.products:.0%}, attention {self.attention:.0%}, memory "
            f"{self.bandwidth:.0%}, links {self.links:.0%}; an optimizer on the host {self.host_memory / 1e9:g} GB/s",
            f"assumed: {self.launch * 1e6:g} us a launch, at least {self.replayed * 1e6:g} us a graph's kernel, "
            f"{self.wait * 1e6:g} us idle a wait",
            f"memory for the run: {card.memory / GIB:.1f} GiB less {self.reserved / GIB:g} GiB for context and "
            f"libraries and {self.gaps:.0%} for gaps, all assumed",
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
