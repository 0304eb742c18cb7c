"""Where the dry run's estimate of memory and a rehearsal differ: both by what holds it, under the same names."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from grpo_fn.shell.policy.memory import Memory

FROZEN, GATHERED, ACTIVATIONS, OTHER = (
    "reference, teachers and average",
    "gathered weights and gradients",
    "activations and logits",
    "the rest",
)
# Of the estimate's parts and of the rehearsal's holders, by name; what begins with one of these.
GROUPS = {
    "reference": FROZEN,
    "teachers": FROZEN,
    "moving average": FROZEN,
    "frozen copies": FROZEN,
    "gathered": GATHERED,
    "gather buffers": GATHERED,
    "gradients to reduce": GATHERED,
    "gradients": "gradients",
    "weights": "weights",
    "optimizer state": "optimizer state",
    "sampler's own copy": "sampler's own copy",
    "KV cache": "KV cache",
    "activations": ACTIVATIONS,
    "logits": ACTIVATIONS,
    "blocks": ACTIVATIONS,
    "embedding": ACTIVATIONS,
}


class MemoryDifference(NamedTuple):
    """Bytes of one group on the device: in the estimate's fullest phase, and in the rehearsal's."""

    name: str
    estimate: int
    rehearsed: int


def memory_differences(estimate: Memory, holders: Mapping[str, int], on_host: frozenset[str]) -> list[MemoryDifference]:
    """All groups that either has, the largest difference first; their sums are the two peaks.

    Args:
        estimate: of the dry run.
        holders: bytes in the rehearsal's fullest phase.
        on_host: holders that lie in the host's memory.
    """
    fuller = max((estimate.training, estimate.sampling), key=lambda parts: sum(x.bytes for x in parts if not x.host))
    said, found = Counter(), Counter()
    for part in (*estimate.standing, *fuller):
        if not part.host:
            said[memory_group(part.name)] += part.bytes
    for name, size in holders.items():
        if name not in on_host:
            found[memory_group(name)] += size
    pairs = [MemoryDifference(name, said[name], found[name]) for name in {**said, **found} if said[name] or found[name]]
    return sorted(pairs, key=lambda one: -abs(one.estimate - one.rehearsed))


def memory_group(name: str) -> str:
    """The group of a part of the estimate, or of a rehearsal's holder."""
    return next((group for first, group in GROUPS.items() if name.startswith(first)), OTHER)
