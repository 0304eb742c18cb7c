"""What each kernel and arrangement that a card has is expected to give: a step with it, and without.

Every figure is a difference of two counts of the same piece of a step at the same shapes. `Change.without` is what a
step does in place of `Change.used` where the change alone is left out.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from grpo_fn.rehearse.tracing.card_kernels import CardHeadKernels, head_kernels
from grpo_fn.rehearse.tracing.counting import CountingMode, Work
from grpo_fn.shell.model.logprob_model import PlainKernels, linear_logp, linear_scores

COMPARED = "compared"  # a phase that is not reported
HEAD, SPLIT_KV, JOINED = "fused head", "split-KV decoding", "joined projections"
BLOCKS_COMPILED, STEPS_COMPILED = "compiled blocks", "compiled decoding steps"


class Change(NamedTuple):
    """Work of a step with the change, and what stands in its place without; both by the pieces of the step."""

    name: str
    used: Counter[Work]
    without: Counter[Work]


class HeadShape(NamedTuple):
    """What the head is given in a micro-batch."""

    tokens: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    temperature: float
    elements: int  # logits in a chunk
    trained: bool  # whether its weight has a gradient
    entropy: bool  # whether the entropy has a slope


def without_it(piece: str, name: str) -> str:
    """The piece under which a piece of the step is counted once more, without the change."""
    return f"{piece}, without {name}"


def count_heads(mode: CountingMode, shape: HeadShape, pieces: Mapping[str, bool]) -> None:
    """The head alone, with Triton's kernels and with torch's operations.

    Args:
        mode: counts the pieces named by `without_it` and `with_it`.
        shape: of the head.
        pieces: of the step in which it computes, and whether it trains there.
    """
    for piece, trains in pieces.items():
        for name, kernels in ((with_it(piece), CardHeadKernels()), (without_it(piece, HEAD), PlainKernels())):
            with head_kernels(kernels):
                count_head(mode, name, shape, trains=trains)


def with_it(piece: str) -> str:
    """The piece under which the fused head of a piece is counted by itself."""
    return f"{piece}, {HEAD} alone"


def count_head(mode: CountingMode, piece: str, shape: HeadShape, *, trains: bool) -> None:
    """One pass of the head, and its backward pass where it trains."""
    mode.begin(piece, phase=COMPARED)
    with mode.pause():
        hidden, weight = (torch.empty(n, shape.width, dtype=shape.dtype) for n in (shape.tokens, shape.vocabulary))
        target = torch.zeros(shape.tokens, dtype=torch.long)
    knobs = {"temperature": shape.temperature, "elements": shape.elements}
    if not trains:
        linear_logp(hidden, weight, target, **knobs)
        return
    inputs = [hidden.requires_grad_(True), *([weight.requires_grad_(True)] if shape.trained else [])]
    scores = linear_scores(hidden, weight, target, **knobs)
    scores = scores if shape.entropy else scores[:1]
    with mode.pause():
        slopes = [torch.ones_like(x) for x in scores]
    torch.autograd.grad(scores, inputs, slopes)


def work_of(work: Mapping[Work, int], piece: str, *, named: str) -> Counter[Work]:
    """The work of one piece, under another's name."""
    return Counter({one._replace(piece=named): n for one, n in work.items() if one.piece == piece})


def work_as_compiled(mode: CountingMode, compiled: frozenset[str]) -> Counter[Work]:
    """All that was counted; in the pieces that are compiled the blocks' elementwise chains are one kernel each."""
    found = Counter(mode.work)
    found.subtract({one: n for one, n in mode.fusable.items() if one.piece in compiled})
    found.update({one: n for one, n in mode.chains.items() if one.piece in compiled})
    return Counter({one: n for one, n in found.items() if n})


def changes(
    mode: CountingMode, compiled: frozenset[str], decoding: str, repeats: Mapping[str, int]
) -> Iterator[Change]:
    """The changes that this run has on its card.

    Args:
        mode: has counted the pieces with and without them.
        compiled: pieces whose blocks are compiled, those without a change among them.
        decoding: the piece that is a token for all rows.
        repeats: the pieces of a step.
    """
    work = work_as_compiled(mode, compiled)
    counted = {one.piece for one in work}
    heads = [piece for piece in repeats if with_it(piece) in counted]
    if heads:
        used, without = Counter(), Counter()
        for piece in heads:
            used += work_of(work, with_it(piece), named=piece)
            without += work_of(work, without_it(piece, HEAD), named=piece)
        yield Change(HEAD, used, without)
    for name in (SPLIT_KV, JOINED):
        if without_it(decoding, name) in counted:
            used, without = (work_of(work, piece, named=decoding) for piece in (decoding, without_it(decoding, name)))
            both = used & without  # operators that are the same in both steps
            yield Change(name, used - both, without - both)
    for name, pieces in (
        (BLOCKS_COMPILED, [piece for piece in repeats if piece in compiled and piece != decoding]),
        (STEPS_COMPILED, [piece for piece in repeats if piece in compiled and piece == decoding]),
    ):
        if pieces:
            yield Change(
                name, *(Counter({o: n for o, n in x.items() if o.piece in pieces}) for x in (mode.chains, mode.fusable))
            )
