"""Rows without their padding: which tokens of a row are read, and which rows read the same prompt."""

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Spans(NamedTuple):
    """What of each row goes into the model: columns `start` to `end`; what is before, row `first` reads for it.

    Of the row that is the first to read a prompt, `start` is 0. Of a row without a sampled token nothing is read.
    """

    start: Int[Tensor, "B"]
    end: Int[Tensor, "B"]
    first: Int[Tensor, "B"]


Share = Callable[[Tensor, Tensor], Spans]


def prompt_lengths(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Columns before a row's first sampled token; 0 for a row without any."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), 0)


def read_lengths(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Columns that predict anything, or are seen by one that does: those before the last sampled token."""
    column = torch.arange(mask.shape[1], device=mask.device)
    return (column * mask).amax(-1) if mask.shape[1] else mask.new_zeros(len(mask), dtype=torch.long)


def share_prompts(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Spans:
    """Every prompt is read once, by the first of the rows that begin with it.

    (Liu et al. 2025, "Prefix Grouper", arXiv:2506.05433: gradients are those of reading it in every row.)
    """
    length, seen = prompt_lengths(mask), {}
    # A row without a prompt has none like it: its own number stands for one.
    prompts = [tuple(row[:n]) or b for b, (row, n) in enumerate(zip(tokens.tolist(), length.tolist(), strict=True))]
    first = torch.tensor([seen.setdefault(prompt, b) for b, prompt in enumerate(prompts)], device=tokens.device)
    row = torch.arange(len(tokens), device=tokens.device)
    return Spans(torch.where(first == row, 0, length), read_lengths(mask), first)


def each_reads_its_prompt(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Spans:
    """Every row reads its own prompt."""
    row = torch.arange(len(tokens), device=tokens.device)
    return Spans(torch.zeros_like(row), read_lengths(mask), row)


def visible_positions(spans: Spans, width: int) -> Int[Tensor, "B T"]:
    """Where each row finds what it sees in the stream of all that is read, row after row.

    A column that is not read points to where the row's first token is: there is something, and it is the row's own.
    """
    taken = spans.end - spans.start
    begin = taken.cumsum(0) - taken
    column = torch.arange(width, device=taken.device)
    at = torch.where(
        column < spans.start[:, None], begin[spans.first][:, None] + column, (begin - spans.start)[:, None] + column
    )
    return torch.where(column < spans.end[:, None], at, begin[spans.first][:, None])


# -- micro-batches by what is read

Load = list[int]  # rows of one device in one micro-batch


class PromptPiece(NamedTuple):
    """Rows that read one prompt."""

    tokens: int  # read, the prompt once
    rows: Load


def by_reading(
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int, *, share: Share
) -> list[Int[Tensor, "b"]]:
    """The rows of micro-batches in which each of `devices` devices reads at most `micro_tokens` tokens.

    A shared prompt is read once: rows that read one stay together, unless they are more than a device's budget or its
    part of the whole. A row that is too long by itself is the only one of its device. Of each micro-batch rows
    `rank::devices` are one device's; where that makes fewer rows than another has, -1 stands for a row that reads
    nothing. Every row that has sampled something is in exactly one micro-batch. Raises ValueError for less than one
    device.
    """
    if devices < 1:
        raise ValueError(f"devices: got {devices}, wanted at least 1")
    device, tokens, mask = mask.device, tokens.cpu(), mask.cpu()  # one copy, not three waits for each row
    spans = share(tokens, mask)
    limit = min(micro_tokens, -(-int((spans.end - spans.start).sum()) // devices))
    loads = balance_pieces(prompt_pieces(mask, spans, limit), micro_tokens, devices)
    turns = [zip_longest(*loads[i : i + devices], fillvalue=-1) for i in range(0, len(loads), devices)]
    return [torch.tensor([row for turn in part for row in turn], device=device) for part in turns]


def prompt_pieces(mask: Bool[Tensor, "B T"], spans: Spans, limit: int) -> list[PromptPiece]:
    """Rows by the prompt they read, cut where they would read more than `limit` tokens together; most tokens first."""
    prompt, made = prompt_lengths(mask), {}
    for row in mask.any(-1).nonzero()[:, 0].tolist():
        parts = made.setdefault(int(spans.first[row]), [])
        begun, behind = int(prompt[row]), int(spans.end[row] - prompt[row])
        if parts and parts[-1].tokens + behind <= limit:
            parts[-1] = on_one_device(parts[-1], PromptPiece(behind, [row]))
        else:
            parts.append(PromptPiece(begun + behind, [row]))
    return sorted((piece for parts in made.values() for piece in parts), key=lambda piece: (-piece.tokens, piece.rows))


def balance_pieces(found: list[PromptPiece], capacity: int, devices: int) -> list[Load]:
    """The pieces in as many loads as first fit makes of them, and a few empty ones to give every device as many.

    Spread evenly over them where that leaves every load within the `capacity`; most tokens first.
    """
    fitted: list[PromptPiece] = []
    for piece in found:
        at = next((i for i, load in enumerate(fitted) if load.tokens + piece.tokens <= capacity), len(fitted))
        fitted[at:] = [on_one_device(fitted[at], piece), *fitted[at + 1 :]] if at < len(fitted) else [piece]
    fitted += [PromptPiece(0, [])] * (-len(fitted) % devices)
    even = [PromptPiece(0, [])] * len(fitted)
    for piece in found:
        least = min(range(len(even)), key=lambda i: even[i].tokens)
        even[least] = on_one_device(even[least], piece)
    chosen = even if all(load.tokens <= capacity or load in found for load in even) else fitted
    return [sorted(load.rows) for load in sorted(chosen, key=lambda load: -load.tokens)]


def on_one_device(a: PromptPiece, b: PromptPiece) -> PromptPiece:
    """Both on one device."""
    return PromptPiece(a.tokens + b.tokens, [*a.rows, *b.rows])
