"""The entropy of a policy relative to a teacher, -KL(policy || teacher), over the whole vocabulary at every token.

In the place of the entropy among the scores of a token: relative to a uniform teacher it is the entropy less log V.
Its gradient is exact, where the gap of the sampled token (`distillation.teacher_gap`) is an estimate of it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_fn.shell.model.logprob_head import dense_scores, linear_scores, token_chunks


class TeacherHead(NamedTuple):
    """What a teacher says at N places before it is multiplied out: logits are `states @ weight.T`, or `states`."""

    states: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"] | None


def linear_teacher_head(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
) -> TeacherHead:
    """Of a head that is a matrix product; a copy of the matrix, which a sharded model takes back after its pass."""
    return TeacherHead(hidden, weight.clone())


def dense_teacher_head(logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float) -> TeacherHead:
    """Of any other head."""
    return TeacherHead(logits, None)


def linear_taught_scores(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "N"],
    *,
    temperature: float,
    elements: int,
    teacher: TeacherHead,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log p(target), as `linear_scores` has it, and -KL(p || q) in nats, q the teacher's; chunk by chunk.

    Both are softmax(logits / temperature), in the head's own chunks, whose logits are computed again in the backward
    pass. log p comes from `linear_scores` and not from this product, so that it is what `linear_logp` has, bit for bit.
    """

    def of_chunk(hidden: Tensor, weight: Tensor, theirs: Tensor) -> Tensor:
        return relative_entropy(hidden @ weight.T, teacher_logits(theirs, teacher.weight), temperature)

    logp, _ = linear_scores(hidden, weight, target, temperature=temperature, elements=elements)
    chunks = token_chunks(len(target), len(weight), elements)
    found = [checkpoint(of_chunk, hidden[i], weight, teacher.states[i], use_reentrant=False) for i in chunks]
    return logp, torch.cat(found)


def dense_taught_scores(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], *, temperature: float, teacher: TeacherHead
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """The same from materialised logits."""
    theirs = teacher_logits(*teacher)
    return dense_scores(logits, target, temperature=temperature)[0], relative_entropy(logits, theirs, temperature)


def teacher_logits(states: Float[Tensor, "n D"], weight: Float[Tensor, "V D"] | None) -> Float[Tensor, "n V"]:
    """A teacher's logits at some of the places."""
    return states if weight is None else states @ weight.T


def relative_entropy(
    logits: Float[Tensor, "n V"], theirs: Float[Tensor, "n W"], temperature: float
) -> Float[Tensor, "n"]:
    """-sum_v p_v (log p_v - log q_v), p and q softmax(logits / temperature); W >= V: rows that only a teacher has.

    In float32 at least, whatever the logits are in.
    """
    logp, logq = (
        (x.to(torch.promote_types(x.dtype, torch.float32)) / temperature).log_softmax(-1) for x in (logits, theirs)
    )
    return (logp.exp() * (logq[:, : logp.shape[1]] - logp)).sum(-1)
