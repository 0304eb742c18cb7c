"""What a run keeps in memory on each device: sums over the model's weights, made before anything is allocated."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GB = 1e9
WIDE = 4  # bytes of what trains, of its gradients, and of what is reduced over ranks: float32
# Of a chunk of logits, in float32, on the way back with an entropy bonus: the last chunk's, kept, this one's, and the
# probabilities of one of them. On the way there it is two.
LOGITS_WIDE = 3
# With an entropy relative to a teacher: the last chunk's, kept, and of this one the policy's log-probabilities, its
# probabilities, and two gradients, in float32; beside them the teacher's log-probabilities. Both have their products in
# the dtype that is computed in, too.
TAUGHT_WIDE, TEACHER_WIDE = 5, 1


class Weight(NamedTuple):
    """One weight of the model, in numbers, as its devices have it."""

    part: int  # kept by the device that keeps most of it
    whole: int  # of it while its module computes, gathered
    trained: bool
    block: int | None  # which block gathers it; None: the root, with embedding, last norm and head


class Arrangement(NamedTuple):
    """How a device handles weights."""

    width: int  # bytes of a number in the dtype that is computed in
    gathers: bool  # weights are gathered to compute: FSDP2; else they lie whole, in that dtype, where they train
    reshard_after_forward: bool
    prefetch: int
    offload: bool
    offload_reference: bool
    reference: bool  # there is a second, frozen copy
    teachers: int = 0  # bytes of frozen teachers on the device that has most of them
    teacher_roots: int = 0  # bytes of what of them stays gathered
    offload_teachers: bool = False
    average: bool = False  # there is a moving average of what trains
    local_sampler: bool = True  # which needs whole weights in this process; an engine has its own
    alone: bool = False  # one device: weights that lie there are cast and gradients added up in place


class Passing(NamedTuple):
    """Bytes that live within a step only."""

    activations: int  # of one micro-batch, at their most
    logits: int
    cache: int


class Part(NamedTuple):
    """So many bytes of one kind."""

    name: str
    bytes: int
    host: bool = False


class Memory(NamedTuple):
    """What one device holds: all the time, while it trains, while it samples."""

    standing: tuple[Part, ...]
    training: tuple[Part, ...]
    sampling: tuple[Part, ...]

    def peak(self) -> int:
        """Bytes on the device at the fuller of the two times."""
        standing, training, sampling = (sum(part.bytes for part in phase if not part.host) for phase in self)
        return standing + max(training, sampling)

    def host(self) -> int:
        """Bytes in the host's memory for each of its devices."""
        return sum(part.bytes for phase in self for part in phase if part.host)

    def lines(self) -> list[str]:
        """One line for each part, and the sums."""
        phases = (("", self.standing), (", training", self.training), (", sampling", self.sampling))
        shown = [
            f"  {part.name + when:<38}{part.bytes / GB:9.3f} GB" + (" on the host" if part.host else "")
            for when, phase in phases
            for part in phase
            if part.bytes
        ]
        host = f", and {self.host() / GB:.3f} GB on the host" if self.host() else ""
        return [
            *shown,
            f"  {'at most at once':<38}{self.peak() / GB:9.3f} GB{host}",
            "  not counted: prompts in the KV cache, buffers of gathers and reductions, the allocator's gaps, kernels; "
            "on the host a checkpoint's copy of what trains and its moments",
        ]


def per_device(weights: Sequence[Weight], moments: int, passing: Passing, how: Arrangement) -> Memory:
    """The parts that add up, for the device that holds most.

    Kept: weights that train in float32, frozen ones in the dtype of the computation, each device its part; of what
    trains the gradients in float32 and the `moments`, in bytes as the optimizer has them. Gathered: the root, which
    stays, and the blocks: all of them unless they are given back after the forward pass, else the largest and
    `prefetch` more like it. Gathered gradients are those of a block or the root, also in float32; on one device those
    of one weight, which are added up where they arise. A local sampler beside gathered weights has a whole copy of its
    own.
    """
    trained = sum(w.part for w in weights if w.trained)
    frozen = sum(w.part for w in weights if not w.trained)
    root, whole = sizes_by_block(weights)[None], sum(w.whole for w in weights)
    gathers_frozen = how.gathers and (how.offload_reference or not how.alone)
    largest_trained = max(sizes_by_block(w for w in weights if w.trained).values(), default=0)
    at_once = (how.width + WIDE) * largest_trained
    if how.alone and not how.offload:
        at_once = how.width * max((w.whole for w in weights if w.trained), default=0)
    standing = (
        Part("weights", WIDE * trained + how.width * frozen, how.offload),
        Part("optimizer state", moments, how.offload),
        Part("reference copy", how.reference * how.width * (trained + frozen), how.offload_reference),
        Part("reference, gathered root", how.reference * gathers_frozen * how.width * root),
        Part("teachers", how.teachers, how.offload_teachers),
        Part("teachers, gathered roots", how.teacher_roots),
        Part("moving average", how.average * WIDE * trained, how.offload),
        Part("sampler's own copy", how.local_sampler * how.gathers * how.width * whole),
    )
    training = (
        Part("gradients", WIDE * trained, how.offload),
        Part("gathered weights", how.gathers * how.width * peak_gathered(weights, how)),
        Part("gathered gradients", how.gathers * at_once),
        Part("activations", passing.activations),
        Part("logits", passing.logits),
    )
    return Memory(standing, training, (Part("KV cache", passing.cache),))


def peak_gathered(weights: Sequence[Weight], how: Arrangement) -> int:
    """Numbers that lie gathered at once, at their most."""
    blocks = sizes_by_block(weights)
    root = blocks.pop(None, 0)
    at_once = 1 + how.prefetch if how.reshard_after_forward else len(blocks)
    return root + sum(sorted(blocks.values(), reverse=True)[:at_once])


def sizes_by_block(weights: Iterable[Weight]) -> Counter[int | None]:
    """Numbers that each block gathers; the root under None."""
    sizes: Counter[int | None] = Counter()
    for weight in weights:
        sizes[weight.block] += weight.whole
    return sizes


def logit_bytes(
    elements: int,
    vocabulary: int,
    hidden: int,
    tokens: int,
    width: int,
    *,
    trained: bool,
    teacher: tuple[int, int] | None,
) -> int:
    """Of the head's backward pass: a chunk of logits several times over, and the gradient of a head that trains."""
    rows = min(max(1, elements // vocabulary), tokens)
    gradient = trained * vocabulary * hidden * (WIDE + width)
    if teacher is None:
        return rows * vocabulary * (width + LOGITS_WIDE * WIDE) + gradient
    theirs, columns = teacher
    chunk = vocabulary * (width + TAUGHT_WIDE * WIDE) + theirs * (width + TEACHER_WIDE * WIDE)
    return rows * chunk + gradient + width * columns * (theirs + tokens)
