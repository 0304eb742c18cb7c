"""The Triton kernels of the head: the reductions of a chunk of logits in one read, its gradient in one read and write.

Imported by `logprob_model.choose_head_kernels` where Triton is installed. In Triton's interpreter
(TRITON_INTERPRET=1 before Triton is imported) they run on tensors of the CPU.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from grpo_fn.shell.model.logprob_model import ChunkStats, PlainKernels

BLOCK = 4096  # logits that a program has in its registers at once: 16 for each of its threads
WARPS = 8


@triton.jit
def reduce_rows(z_ptr, target_ptr, logp_ptr, entropy_ptr, top_ptr, total_ptr, columns, scale, BLOCK: tl.constexpr):
    """A program for each row. Every lane keeps maximum, sum and weighted sum of the logits it has seen (online softmax,
    Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3); the lanes are joined at the end, pairwise.
    """
    row = tl.program_id(0).to(tl.int64)
    base = z_ptr + row * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top) (z - top)
    for start in range(0, columns, BLOCK):
        real = start + lane < columns
        z = tl.load(base + start + lane, mask=real, other=float("-inf")) * scale
        new = tl.where(real, tl.maximum(top, z), top)
        fall = tl.where(top == float("-inf"), 0.0, top - new)  # nothing has been added up before the first
        keep = tl.exp(fall)
        shifted = tl.where(real, z - new, 0.0)
        p = tl.where(real, tl.exp(shifted), 0.0)
        weighted = (weighted + total * fall) * keep + p * shifted
        total = total * keep + p
        top = new
    most = tl.max(top, 0)
    fall = tl.where(top == float("-inf"), 0.0, top - most)  # lanes that have seen nothing have sums of zero
    keep = tl.exp(fall)
    every = tl.sum(total * keep, 0)
    weighted_all = tl.sum((weighted + total * fall) * keep, 0)
    logs = tl.log(every)
    chosen = tl.load(target_ptr + row)
    inside = (chosen >= 0) & (chosen < columns)
    own = tl.load(base + chosen, mask=inside, other=float("nan")) * scale
    tl.store(logp_ptr + row, own - most - logs)
    tl.store(entropy_ptr + row, logs - weighted_all / every)
    tl.store(top_ptr + row, most)
    tl.store(total_ptr + row, every)


@triton.jit
def slope_rows(
    z_ptr, out_ptr, target_ptr, dlogp_ptr, dentropy_ptr, entropy_ptr, top_ptr, total_ptr, columns, scale,
    BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    """A program for each block of a row; `out` may be `z`, as each logit is read before it is written over."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    z = tl.load(z_ptr + row * columns + column, mask=real, other=0.0) * scale - tl.load(top_ptr + row)
    total, dlogp = tl.load(total_ptr + row), tl.load(dlogp_ptr + row)
    p = tl.exp(z) / total
    if WITH_ENTROPY:
        signal = dlogp + tl.load(dentropy_ptr + row) * (z - tl.log(total) + tl.load(entropy_ptr + row))
    else:
        signal = dlogp
    slope = tl.where(column == tl.load(target_ptr + row), dlogp, 0.0) - p * signal
    tl.store(out_ptr + row * columns + column, slope, mask=real)


class TritonKernels(PlainKernels):
    """The head's kernels by Triton, for logits in float32, which `reduce` leaves as they are."""

    def spare(self, buffer: Tensor) -> Tensor:
        """Nothing is needed beside the logits."""
        return buffer[:0]

    def reduce(self, z: Tensor, target: Tensor, *, temperature: float, spare: Tensor) -> ChunkStats:
        """In one read of z."""
        n, vocabulary = z.shape
        stats = ChunkStats(*(z.new_empty(n) for _ in ChunkStats._fields))
        if n:
            reduce_rows[(n,)](
                z, target, stats.logp, stats.entropy, stats.top, stats.total, vocabulary, 1.0 / temperature,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        return stats

    def logp(self, z: Tensor, target: Tensor, *, temperature: float, spare: Tensor) -> Float[Tensor, "n"]:
        """By the same kernel as beside entropies, which cost nothing where the read of z does."""
        return self.reduce(z, target, temperature=temperature, spare=spare).logp

    def slope(
        self,
        z: Tensor,
        target: Tensor,
        dlogp: Tensor,
        dentropy: Tensor | None,
        stats: ChunkStats,
        *,
        temperature: float,
        fresh: bool,
        dtype: torch.dtype,
    ) -> Float[Tensor, "n V"]:
        """In one read and one write; in place of fresh logits where the dtype is theirs."""
        n, vocabulary = z.shape
        out = z if fresh and dtype is z.dtype else torch.empty_like(z, dtype=dtype)
        if n:
            signals = (dlogp.contiguous(), dlogp if dentropy is None else dentropy.contiguous())
            slope_rows[(n, triton.cdiv(vocabulary, BLOCK))](
                z, out, target, *signals, stats.entropy, stats.top, stats.total, vocabulary, 1.0 / temperature,
                BLOCK=BLOCK, WITH_ENTROPY=dentropy is not None, num_warps=WARPS,
            )  # fmt: skip
        return out
