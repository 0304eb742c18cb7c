"""The reductions of a chunk of logits and its gradient by torch's operations: on any device, in any dtype."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


class ChunkStats(NamedTuple):
    """Of every row of logits, divided by the temperature: with `top` their largest, `total` = sum exp(z - top)."""

    logp: Float[Tensor, "n"]  # of the row's target
    entropy: Float[Tensor, "n"]
    top: Float[Tensor, "n"]
    total: Float[Tensor, "n"]

    def rows(self, part: slice) -> "ChunkStats":
        """Those of some rows."""
        return ChunkStats(*(x[part] for x in self))


@runtime_checkable
class ChunkKernels(Protocol):
    """What the head does with a chunk of logits. What `reduce` leaves in z is what `slope` takes where not fresh."""

    def spare(self, buffer: Float[Tensor, "n V"]) -> Float[Tensor, "m V"]:
        """Memory that `reduce` and `logp` write over, for chunks of at most that buffer's size."""

    def reduce(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> ChunkStats:
        """Statistics of softmax(z / temperature)."""

    def logp(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> Float[Tensor, "n"]:
        """The log-probabilities of `reduce`, bit for bit."""

    def slope(
        self,
        z: Float[Tensor, "n V"],
        target: Int[Tensor, "n"],
        dlogp: Float[Tensor, "n"],
        dentropy: Float[Tensor, "n"] | None,
        stats: ChunkStats,
        *,
        temperature: float,
        fresh: bool,
        dtype: torch.dtype,
    ) -> Float[Tensor, "n V"]:
        """d(logp dlogp + entropy dentropy) / d(z / temperature) in that dtype; fresh logits may be written over."""


class PlainKernels:
    """The head's passes as torch's operations. Between `reduce` and `slope` z holds z / temperature - top."""

    def spare(self, buffer: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """As much again."""
        return torch.empty_like(buffer)

    def reduce(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> ChunkStats:
        """In four passes over z, in place."""
        z = tempered_(z, temperature)
        top = z.amax(-1)
        p = torch.exp(z.sub_(top[:, None]), out=spare[: len(z)])
        total = p.sum(-1)  # pairwise; a CPU's log_softmax adds 150k of them up in turn and is off by 2e-5
        logs = total.log()
        logp = z.gather(-1, target[:, None])[:, 0] - logs
        return ChunkStats(logp, logs - p.mul_(z).sum(-1) / total, top, total)

    def logp(
        self, z: Float[Tensor, "n V"], target: Int[Tensor, "n"], *, temperature: float, spare: Tensor
    ) -> Float[Tensor, "n"]:
        """Without the passes that the entropy takes."""
        z = tempered_(z, temperature)
        total = torch.exp(z.sub_(z.amax(-1, keepdim=True)), out=spare[: len(z)]).sum(-1)
        return z.gather(-1, target[:, None])[:, 0] - total.log()

    def slope(
        self,
        z: Float[Tensor, "n V"],
        target: Int[Tensor, "n"],
        dlogp: Float[Tensor, "n"],
        dentropy: Float[Tensor, "n"] | None,
        stats: ChunkStats,
        *,
        temperature: float,
        fresh: bool,
        dtype: torch.dtype,
    ) -> Float[Tensor, "n V"]:
        """dlogp onehot - p (dlogp + dentropy (log p + entropy)), p = exp(z) / total; in place of a fresh z."""
        if fresh:
            z = tempered_(z, temperature).sub_(stats.top[:, None])
        dlogp, entropy, total = dlogp[:, None], stats.entropy[:, None], stats.total[:, None]
        if dentropy is None:
            slope = (z.exp_() if fresh else z.exp()).mul_(-dlogp / total)
        else:
            dentropy = dentropy[:, None]
            p = z.exp()
            slope = (z.mul_(dentropy) if fresh else z * dentropy).add_(dentropy * (entropy - total.log()) + dlogp)
            slope = p.mul_(slope).div_(-total)
        return slope.scatter_add_(-1, target[:, None], dlogp).to(dtype)


def tempered_(z: Tensor, temperature: float) -> Tensor:
    """z / temperature, in place; by 1 that would be a pass for nothing."""
    return z if temperature == 1.0 else z.div_(temperature)
