"""The split-KV kernel in Triton: parts of a step's attention side by side, then one softmax out of all parts.

Flash-Decoding (Dao, Haziza, Massa and Sizov 2023) with a prompt's keys and values read once for all rows of its group,
as in Hydragen (Juravsky et al. 2024, arXiv:2402.05099, section 3.1). Each program takes some queries and at most SPLIT
columns, and leaves its unnormalised sum, the largest score and the sum of weights (Milakov and Gimelshein 2018,
arXiv:1805.02867, algorithm 3); a second kernel merges them. How a row's numbers are rounded depends on its own columns
alone, not on the rows beside it: block sizes are constants, and a block that a row does not see changes nothing.

Importing this needs Triton, and makes it the operator's kernel on CUDA.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fn.shell.sampler.local.cuda_steps import OPERATOR, SPLIT

TILE = 64  # queries of a prompt's rows in a program
LEAST = 16  # of each side of a product
WARPS, STAGES = 4, 2
INTERPRETED = triton.knobs.runtime.interpret  # products of bfloat16 would be those of the bits: they are of float32
UNSPECIALIZED = ("wide", "tiles", "prompt_parts", "drawn_parts", "prompt_programs", "window")  # one code for all values


@triton.jit
def one_part(
    query, key, value, column_k, column_v, first, last, lower, upper, scale, cap,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of M queries, over the columns first to last: sum of weighted values, largest score, sum of weights.

    A query sees the columns from `lower` on, `upper` not among them.
    """
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    summed = tl.zeros([M, BE], tl.float32)
    for begin in range(first, last, N):
        column = begin + tl.arange(0, N)
        there = column < last
        k = tl.load(key + column[None, :] * column_k + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(value + column[:, None] * column_v + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
        scores = tl.dot(query, k.to(tl.float32) if WIDEN else k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))  # tanh
        seen = there[None, :] & (column[None, :] >= lower[:, None]) & (column[None, :] < upper[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # of a query that has seen nothing yet
        kept, weights = tl.exp(peak - base), tl.exp(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        rounded = weights.to(v.dtype)
        if WIDEN:
            summed = summed * kept[:, None] + tl.dot(rounded.to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            summed = summed * kept[:, None] + tl.dot(rounded, v, input_precision="ieee")
        peak = now
    return summed, peak, total


@triton.jit
def keep_part(summed, peak, total, sums, peaks, totals, at, there, E: tl.constexpr, BE: tl.constexpr):
    """A part's results at its places; the sum of one that has seen nothing is left out."""
    e = tl.arange(0, BE)
    tl.store(peaks + at, peak, mask=there)
    tl.store(totals + at, total, mask=there)
    some = there & (total > 0.0)
    tl.store(sums + at[:, None] * E + e[None, :], summed, mask=some[:, None] & (e < E)[None, :])


@triton.jit
def queries_of_prompt(
    program, query, prompt_key, prompt_value, row, lane, start, length, sums, peaks, totals,
    slot_k, head_k, column_k, slot_v, head_v, column_v, heads, wide, tiles, prompt_parts, parts, window, scale, cap,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SIZE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """M of the queries that all rows of a prompt have in one head of keys, and at most SIZE columns of the prompt."""
    part, rest = program % prompt_parts, program // prompt_parts
    tile, rest = rest % tiles, rest // tiles
    head, prompt = rest % heads, (rest // heads).to(tl.int64)
    m, d = tile * M + tl.arange(0, M), tl.arange(0, BD)
    slot = prompt * wide + m // R
    there = m < wide * R
    b = tl.load(row + slot, mask=there, other=0)
    there = there & (tl.load(lane + b, mask=there, other=-1) == slot)  # a free lane names any row
    upper = tl.load(start + b, mask=there, other=0)
    first, last = part.to(tl.int64) * SIZE, tl.minimum(part.to(tl.int64) * SIZE + SIZE, tl.max(upper, 0))
    lower = tl.zeros([M], tl.int64)
    if WINDOWED:
        lower = tl.load(length + b, mask=there, other=2**30) - window + 1
        first = tl.maximum(first, tl.min(lower, 0) // N * N)
    number = (b * heads + head) * R + m % R
    q = tl.load(query + number[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    summed, peak, total = one_part(
        q.to(tl.float32) if WIDEN else q, prompt_key + prompt * slot_k + head * head_k,
        prompt_value + prompt * slot_v + head * head_v, column_k, column_v, first, last, lower, upper, scale, cap,
        D, E, BD, BE, M, N, CAPPED, WIDEN,
    )  # fmt: skip
    keep_part(summed, peak, total, sums, peaks, totals, number * parts + part, there, E, BE)


@triton.jit
def queries_of_row(
    program, query, key, value, start, length, sums, peaks, totals,
    slot_k, head_k, column_k, slot_v, head_v, column_v, heads, prompt_parts, drawn_parts, parts, window, scale, cap,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SIZE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The queries that one row has in one head of keys, and at most SIZE columns of what it has drawn."""
    part, rest = program % drawn_parts, program // drawn_parts
    head, own = rest % heads, (rest // heads).to(tl.int64)
    m, d = tl.arange(0, M), tl.arange(0, BD)
    there = m < R
    drawn = tl.load(length + own) - tl.load(start + own)  # before this step
    first, last = part.to(tl.int64) * SIZE, tl.minimum(part.to(tl.int64) * SIZE + SIZE, drawn + 1)
    lower, upper = tl.zeros([M], tl.int64), tl.zeros([M], tl.int64) + (drawn + 1)
    if WINDOWED:
        lower += drawn - window + 1
        first = tl.maximum(first, (drawn - window + 1) // N * N)
    number = (own * heads + head) * R + m
    q = tl.load(query + number[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    summed, peak, total = one_part(
        q.to(tl.float32) if WIDEN else q, key + own * slot_k + head * head_k, value + own * slot_v + head * head_v,
        column_k, column_v, first, last, lower, upper, scale, cap, D, E, BD, BE, M, N, CAPPED, WIDEN,
    )  # fmt: skip
    keep_part(summed, peak, total, sums, peaks, totals, number * parts + prompt_parts + part, there, E, BE)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def parts_kernel(
    query, prompt_key, prompt_value, key, value, row, lane, start, length, sums, peaks, totals,
    slot_pk, head_pk, column_pk, slot_pv, head_pv, column_pv, slot_k, head_k, column_k, slot_v, head_v, column_v,
    heads, wide, tiles, prompt_parts, drawn_parts, prompt_programs, window, scale, cap,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, M: tl.constexpr,
    MINE: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The first programs take queries of a prompt's rows, the others those of one row."""
    program, parts = tl.program_id(0), prompt_parts + drawn_parts
    if program < prompt_programs:
        queries_of_prompt(
            program, query, prompt_key, prompt_value, row, lane, start, length, sums, peaks, totals,
            slot_pk, head_pk, column_pk, slot_pv, head_pv, column_pv, heads, wide, tiles, prompt_parts, parts, window,
            scale, cap, R, D, E, BD, BE, M, N, SIZE, CAPPED, WINDOWED, WIDEN,
        )  # fmt: skip
    else:
        queries_of_row(
            program - prompt_programs, query, key, value, start, length, sums, peaks, totals,
            slot_k, head_k, column_k, slot_v, head_v, column_v, heads, prompt_parts, drawn_parts, parts, window,
            scale, cap, R, D, E, BD, BE, MINE, N, SIZE, CAPPED, WINDOWED, WIDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["wide", "prompt_parts", "parts"])
def merge_kernel(
    sums, peaks, totals, row, lane, out, heads, prompt_parts, parts, E: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """One query head of one row: its parts, in order. A slot without a row has no part of a prompt."""
    number, e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    b = number // heads
    first = tl.where(tl.load(row + tl.load(lane + b)) == b, 0, prompt_parts)
    peak, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    summed = tl.zeros([BE], tl.float32)
    for part in range(first, parts):
        at = number * parts + part + tl.zeros([1], tl.int64)
        its_total, its_peak = tl.load(totals + at), tl.load(peaks + at)
        now = tl.maximum(peak, its_peak)
        base = tl.where(now == float("-inf"), 0.0, now)
        kept, added = tl.exp(peak - base), tl.exp(its_peak - base)
        total = total * kept + its_total * added
        part_sum = tl.load(sums + at * E + e, mask=(e < E) & (its_total > 0.0), other=0.0)
        summed = summed * kept + part_sum * added
        peak = now
    tl.store(out + number * E + e, (summed / total).to(out.dtype.element_ty), mask=e < E)


def split_kv_launch(
    query: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    lane: Tensor,
    start: Tensor,
    length: Tensor,
    wide: int,
    scale: float,
    cap: float | None,
    window: int | None,
) -> Tensor:
    """As the operator is described in `cuda_steps.py`: both kernels, one behind the other."""
    (n, heads, columns, d), (prompts, _, reach, _), e = key.shape, prompt_key.shape, value.shape[3]
    r = query.shape[1] // heads
    prompt_parts, drawn_parts = (triton.cdiv(x, SPLIT) for x in (reach, columns))
    parts, tiles = prompt_parts + drawn_parts, triton.cdiv(wide * r, TILE)
    sums, peaks, totals = (
        torch.empty(n * heads * r * parts * x, dtype=torch.float32, device=query.device) for x in (e, 1, 1)
    )
    out = value.new_empty(n, heads * r, e)
    prompt_programs = prompts * heads * tiles * prompt_parts
    strides = [x.stride(i) for x in (prompt_key, prompt_value, key, value) for i in range(3)]
    parts_kernel[(prompt_programs + n * heads * drawn_parts,)](
        query.contiguous(), prompt_key, prompt_value, key, value, row, lane, start, length, sums, peaks, totals,
        *strides, heads, wide, tiles, prompt_parts, drawn_parts, prompt_programs, window or 0, scale, cap or 1.0,
        **constants(r, d, e, key.dtype), CAPPED=cap is not None, WINDOWED=window is not None,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    merge_kernel[(n * heads * r,)](
        sums, peaks, totals, row, lane, out, heads * r, prompt_parts, parts, E=e, BE=block(e), num_warps=1
    )
    return out


def constants(r: int, d: int, e: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the first kernel is compiled for: query heads that share a head of keys, sizes of heads, and their dtype."""
    return {
        **{"R": r, "D": d, "E": e, "BD": block(d), "BE": block(e), "M": TILE, "MINE": block(r), "SIZE": SPLIT},
        "N": 64 if max(block(d), block(e)) * dtype.itemsize <= 256 else 32,  # columns of a block in shared memory
        "WIDEN": INTERPRETED,
    }


def block(n: int) -> int:
    """The power of two that holds n, as large as a product's side at least."""
    return max(LEAST, triton.next_power_of_2(n))


torch.library.impl(OPERATOR, "cuda", split_kv_launch)
