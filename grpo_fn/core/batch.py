"""Groups of samples, the rows to learn from that they become, and the micro-batches of those rows.

Groups are joined and taken apart whatever the widths of their rows; rows are packed without their padding, with a
prompt that several of them share read once. The rollouts of samplers and the results of functions are checked.
"""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from grpo_fn.core import prng
from grpo_fn.core.partials import FunctionMisfit
from grpo_fn.core.problem import Problem, Turn
from grpo_fn.core.types import Batch, Groups, Reward, Rollout, Totals, Undeclared

# -- putting groups together and taking them apart: P prompts with G samples each, whatever the widths of their rows


def concat_groups(parts: Sequence[Groups]) -> Groups:
    """All groups in the order of the parts, padded on the right to the widest rows, where the last part's tensors are.

    Wants at least one part.
    """
    device = parts[-1].rollout.tokens.device
    parts = [tree_map_only(torch.Tensor, lambda x: x.to(device), part) for part in parts]
    return Groups(
        tuple(problem for part in parts for problem in part.problems),
        concat_rollouts([part.rollout for part in parts]),
        concat_rewards([part.reward for part in parts]),
    )


def concat_rewards(rewards: Sequence[Reward]) -> Reward:
    """The groups of all rewards in their order, padded to the most turns. Wants at least one reward."""
    most = max(r.turns.shape[-1] for r in rewards)
    return Reward(
        torch.cat([r.value for r in rewards]),
        torch.cat([r.valid for r in rewards]),
        {name: torch.cat([r.parts[name] for r in rewards]) for name in rewards[0].parts},
        torch.cat([pad(r.turns, (0, most - r.turns.shape[-1])) for r in rewards]),
        torch.cat([pad(r.states, (0, most - r.states.shape[-1]), value=-1) for r in rewards]),
    )


def unpack_reward(fields: Sequence[Any]) -> Reward:
    """The reward of its fields, one after the other; also of those that were stored when there were no turns."""
    return Reward(*fields) if len(fields) > 3 else outcome_reward(*fields)


def outcome_reward(
    value: Float[Tensor, "P G"], valid: Bool[Tensor, "P G"], parts: dict[str, Float[Tensor, "P G"]]
) -> Reward:
    """The reward of samples without turns: each is one turn, worth its value, and a prompt's all begin in one state."""
    states = repeat(torch.arange(len(value), device=value.device), "p -> p g 1", g=value.shape[1])
    return Reward(value, valid, parts, rearrange(value, "p g -> p g 1"), states)


def concat_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """The rows of all parts in their order, padded on the right to the widest. Wants at least one part."""
    width = max(part.tokens.shape[1] for part in parts)
    rollouts = [pad_rollout(part, width) for part in parts]
    return Rollout(
        *(torch.cat(field) for field in zip(*(r[:4] for r in rollouts), strict=True)),
        tuple(text for r in rollouts for text in r.text),
        tuple(turns for r in rollouts for turns in r.turns),
    )


def select_groups(groups: Groups, chosen: Sequence[int]) -> Groups:
    """The groups with these numbers, in this order."""
    rollout, reward = groups.rollout, groups.reward
    size = len(rollout.text) // len(groups.problems)
    rows = [p * size + g for p in chosen for g in range(size)]
    return Groups(
        tuple(groups.problems[p] for p in chosen),
        select_rows(rollout, rows),
        tree_map_only(torch.Tensor, lambda x: x[list(chosen)], reward),
    )


def select_rows(rollout: Rollout, rows: Sequence[int]) -> Rollout:
    """The rows with these numbers, in this order."""
    text, turns = (tuple(column[b] for b in rows if column) for column in (rollout.text, rollout.turns))
    return Rollout(*(field[list(rows)] for field in rollout[:4]), text, turns)


def pack_rollout(rollout: Rollout) -> list[Any]:
    """The rollout as containers of numbers, strings and tensors, for a checkpoint."""
    return [*rollout[:4], list(rollout.text), [[list(turn) for turn in turns] for turns in rollout.turns]]


def unpack_rollout(fields: Sequence[Any]) -> Rollout:
    """The inverse of `pack_rollout`; also of rollouts that were packed when there were no turns."""
    turns = fields[5] if len(fields) > 5 else ()
    return Rollout(*fields[:4], tuple(fields[4]), tuple(tuple(Turn(*turn) for turn in row) for row in turns))


def with_signal(reward: Reward) -> Bool[Tensor, "P"]:
    """The groups with two valid samples of different reward; the others have nothing to compare."""
    highest = torch.where(reward.valid, reward.value, -torch.inf).amax(-1)
    lowest = torch.where(reward.valid, reward.value, torch.inf).amin(-1)
    return highest > lowest


def by_group(rows: Shaped[Tensor, "B T"], groups: int) -> Shaped[Tensor, "P G T"]:
    """Row b = p * G + g to [p, g]."""
    return rearrange(rows, "(p g) t -> p g t", p=groups)


def pad_rollout(rollout: Rollout, width: int) -> Rollout:
    """The rollout with padding on the right up to `width` columns."""
    extra = (0, width - rollout.tokens.shape[1])
    tokens, mask, logp = (pad(field, extra) for field in rollout[:3])
    return rollout._replace(tokens=tokens, mask=mask, logp_sampled=logp)


def row_keys(groups: Groups, key: Tensor) -> Tensor:
    """fold_in(key, uid, g) of every row, whatever batch the row is in."""
    return sample_keys(key, groups.problems, groups.reward.value.shape[1]).to(groups.rollout.tokens.device)


# -- rows without their padding: which tokens of a row are read, and which rows read the same prompt


class Spans(NamedTuple):
    """The model's part of each row: columns `start` to `end`; what is before, row `first` reads for it.

    Of the row that is the first to read a prompt, `start` is 0. Of a row without a sampled token nothing is read.
    """

    start: Int[Tensor, "B"]
    end: Int[Tensor, "B"]
    first: Int[Tensor, "B"]


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
    length, first_row = prompt_lengths(mask), {}
    # A row without a prompt has none like it: its own number stands for one.
    prompts = [tuple(row[:n]) or b for b, (row, n) in enumerate(zip(tokens.tolist(), length.tolist(), strict=True))]
    first = torch.tensor([first_row.setdefault(prompt, b) for b, prompt in enumerate(prompts)], device=tokens.device)
    row = torch.arange(len(tokens), device=tokens.device)
    return Spans(torch.where(first == row, 0, length), read_lengths(mask), first)


def visible_positions(spans: Spans, width: int) -> Int[Tensor, "B T"]:
    """The visible columns of each row in the stream of all rows, row after row.

    A column that is not read points to where the row's first token is: there is something, and it is the row's own.
    """
    width_read = spans.end - spans.start
    begin = width_read.cumsum(0) - width_read
    column = torch.arange(width, device=width_read.device)
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
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int
) -> list[Int[Tensor, "b"]]:
    """The rows of micro-batches in which each of `devices` devices reads at most `micro_tokens` tokens.

    A shared prompt is read once: rows that read one stay together, unless they are more than a device's budget or its
    part of the whole. A row that is too long by itself is the only one of its device. Of each micro-batch rows
    `rank::devices` are one device's; where that makes fewer rows than another has, -1 stands for a row that reads
    nothing. Every row that has sampled something is in exactly one micro-batch. Raises ValueError for less than one
    device.
    """
    if devices < 1:
        raise ValueError(f"devices: got {devices}, expected at least 1")
    device, tokens, mask = mask.device, tokens.cpu(), mask.cpu()  # one copy, not three waits for each row
    spans = share_prompts(tokens, mask)
    limit = min(micro_tokens, -(-int((spans.end - spans.start).sum()) // devices))
    loads = balance_pieces(prompt_pieces(mask, spans, limit), micro_tokens, devices)
    turns = [zip_longest(*loads[i : i + devices], fillvalue=-1) for i in range(0, len(loads), devices)]
    return [torch.tensor([row for turn in part for row in turn], device=device) for part in turns]


def prompt_pieces(mask: Bool[Tensor, "B T"], spans: Spans, limit: int) -> list[PromptPiece]:
    """Rows by the prompt they read, cut where they would read more than `limit` tokens together; most tokens first."""
    prompt, by_prompt = prompt_lengths(mask), {}
    for row in mask.any(-1).nonzero()[:, 0].tolist():
        parts = by_prompt.setdefault(int(spans.first[row]), [])
        begun, behind = int(prompt[row]), int(spans.end[row] - prompt[row])
        if parts and parts[-1].tokens + behind <= limit:
            parts[-1] = on_one_device(parts[-1], PromptPiece(behind, [row]))
        else:
            parts.append(PromptPiece(begun + behind, [row]))
    cut = [piece for parts in by_prompt.values() for piece in parts]
    return sorted(cut, key=lambda piece: (-piece.tokens, piece.rows))


def balance_pieces(pieces: list[PromptPiece], capacity: int, devices: int) -> list[Load]:
    """The pieces in as many loads as first fit makes of them, and a few empty ones to give every device as many.

    Spread evenly over them where that leaves every load within the `capacity`; most tokens first.
    """
    fitted: list[PromptPiece] = []
    for piece in pieces:
        at = next((i for i, load in enumerate(fitted) if load.tokens + piece.tokens <= capacity), len(fitted))
        fitted[at:] = [on_one_device(fitted[at], piece), *fitted[at + 1 :]] if at < len(fitted) else [piece]
    fitted += [PromptPiece(0, [])] * (-len(fitted) % devices)
    even = [PromptPiece(0, [])] * len(fitted)
    for piece in pieces:
        least = min(range(len(even)), key=lambda i: even[i].tokens)
        even[least] = on_one_device(even[least], piece)
    chosen = even if all(load.tokens <= capacity or load in pieces for load in even) else fitted
    return [sorted(load.rows) for load in sorted(chosen, key=lambda load: -load.tokens)]


def on_one_device(a: PromptPiece, b: PromptPiece) -> PromptPiece:
    """Both on one device."""
    return PromptPiece(a.tokens + b.tokens, [*a.rows, *b.rows])


LEAST_LOGP = math.log(torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps)  # -103.3 nats


def check_rollout(rollout: Rollout) -> None:
    """Raise ValueError, saying got and expected, unless the rollout's fields agree and each row sampled something.

    A sampled token is at least as likely as float32's smallest number: none below is ever drawn, so a log-prob below
    LEAST_LOGP is not of what was sampled. Its ratio would end at the largest that `losses.capped_exp` lets through,
    where the objective is huge and the gradient 0.
    """
    shape = rollout.tokens.shape
    for name in ("mask", "logp_sampled"):
        got = getattr(rollout, name).shape
        if got != shape:
            raise ValueError(f"got rollout.{name} {tuple(got)}, expected the shape of tokens, {tuple(shape)}")
    if len(rollout.text) != shape[0] or rollout.truncated.shape != shape[:1]:
        raise ValueError(
            f"got {len(rollout.text)} texts and truncated {tuple(rollout.truncated.shape)}, expected {shape[0]} of each"
        )
    if len(rollout.turns) not in (0, shape[0]):
        raise ValueError(f"got turns of {len(rollout.turns)} rows, expected those of {shape[0]}, or none")
    if rollout.mask[:, 0].any():
        raise ValueError("got a row whose first token is marked as sampled, expected a prompt token before it")
    if not rollout.mask.any(-1).all():
        empty = int((~rollout.mask.any(-1)).nonzero()[0, 0])
        raise ValueError(f"got row {empty} without a sampled token, expected at least one (EOS counts)")
    bad = rollout.mask & ~((rollout.logp_sampled <= 0) & (rollout.logp_sampled >= LEAST_LOGP))
    if bad.any():
        b, t = bad.nonzero()[0].tolist()
        raise ValueError(
            f"got logp_sampled {float(rollout.logp_sampled[b, t])} at row {b}, token {t}; expected a finite "
            f"log-probability <= 0 and >= {LEAST_LOGP:.1f}, of a token that can have been drawn"
        )


def check_reward_shapes(reward: Reward, problems: int, group_size: int) -> None:
    """Raise ValueError unless value, valid and every part are `[problems, group_size]`: row b = p * G + g is [p, g]."""
    expected = (problems, group_size)
    for name, x in {"value": reward.value, "valid": reward.valid, **reward.parts}.items():
        if tuple(x.shape) != expected:
            raise ValueError(f"got reward {name} {tuple(x.shape)}, expected problems by samples, {expected}")


def make_batch(
    rollout: Rollout,
    keep: Bool[Tensor, "P G"],
    adv: Float[Tensor, "..."],
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"] | Undeclared,
    logp_teacher: Float[Tensor, "B T"] | Undeclared,
) -> Batch:
    """Rows b = p * G + g to learn from, with adv `[P, G, T]`, nothing selected.

    Rows not to `keep` are masked out whole: they neither learn nor count. An advantage of a token to learn from that
    is not finite is a ValueError.
    """
    batch = scored_rows(rollout, keep, adv, logp_old, logp_ref, logp_teacher)
    if not (batch.adv.isfinite() | ~batch.mask).all():
        odd = batch.adv[batch.mask & ~batch.adv.isfinite()][:3].tolist()
        raise ValueError(f"got advantages that are not finite, {odd}, expected finite ones")
    return batch


def scored_rows(
    rollout: Rollout,
    keep: Bool[Tensor, "P G"],
    adv: Float[Tensor, "..."],
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"] | Undeclared,
    logp_teacher: Float[Tensor, "B T"] | Undeclared,
) -> Batch:
    """The same rows before their advantages are final: whether they are finite is not looked at."""
    rows, width = rollout.tokens.shape
    if adv.shape[0] * adv.shape[1] != rows or adv.shape[2] != width:
        raise ValueError(f"got {tuple(adv.shape)} advantages for {rows} rows of {width}, expected one a token")
    device = rollout.tokens.device
    mask = rollout.mask & rearrange(keep, "p g -> (p g) 1").to(device)
    return Batch(
        tokens=rollout.tokens,
        mask=mask,
        logp_sampled=rollout.logp_sampled,
        logp_old=logp_old,
        logp_ref=logp_ref,
        logp_teacher=logp_teacher,
        adv=rearrange(adv, "p g t -> (p g) t").to(device, rollout.logp_sampled.dtype),
        selected=torch.zeros_like(mask),
        group_tokens=tokens_of_group(mask, len(keep)),
    )


def given_batch(given: Rollout) -> Batch:
    """Rows of given tokens to learn from, each of advantage 1; what was not sampled has no log-prob to compare with."""
    nothing = torch.zeros_like(given.logp_sampled)
    logps = dict.fromkeys(("logp_sampled", "logp_old", "logp_ref", "logp_teacher"), nothing)
    return Batch(
        tokens=given.tokens,
        mask=given.mask,
        **logps,
        adv=torch.ones_like(nothing),
        selected=torch.zeros_like(given.mask),
        group_tokens=tokens_of_group(given.mask, len(given.mask)),
    )


def observed_tokens(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Tokens between two that were sampled: what an environment wrote behind a turn, with its chat format."""
    sampled = mask.int()
    before, behind = sampled.cumsum(-1) > 0, sampled.flip(-1).cumsum(-1).flip(-1) > 0
    return ~mask & before & behind


def tokens_of_group(mask: Bool[Tensor, "B T"], groups: int) -> Int[Tensor, "B T"]:
    """The number of masked-in tokens of a row's group, for each of the row's tokens: known before rows are split."""
    tokens = reduce(by_group(mask, groups).long(), "p g t -> p", "sum")
    return repeat(tokens, "p -> (p g) t", g=len(mask) // groups, t=mask.shape[1])


def count(batch: Batch) -> Totals:
    """The denominators this batch contributes: sampled tokens, rows that have any, all rows, and groups that have any.

    In float32 at least: float16 ends at 65,504 and bfloat16 counts exactly up to 256. Above 2^24 tokens a float32
    count is rounded, by less than one part in ten million.
    """
    dtype = torch.promote_types(batch.logp_sampled.dtype, torch.float32)
    samples = torch.tensor(len(batch.mask), dtype=dtype, device=batch.mask.device)
    # Every token is one part of its group, and the parts of a group add up to 1 but for rounding, hence float64.
    groups = (batch.mask / batch.group_tokens.clamp(min=1).double()).sum().round().to(dtype)
    return Totals(batch.mask.sum().to(dtype), batch.mask.any(-1).sum().to(dtype), samples, groups)


def lengths(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Columns each row needs: up to and including its last sampled token; 0 for a row without any."""
    column = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (column * mask).amax(-1)


def minibatches(batch: Batch, parts: int) -> list[Batch]:
    """`parts` equal runs of rows in prompt order, one optimizer step each: whole groups if `parts` divides the prompts.

    Raises ValueError when it does not divide the rows.
    """
    if len(batch.tokens) % parts:
        raise ValueError(f"got {len(batch.tokens)} rows for {parts} minibatches, expected a multiple")
    rows = len(batch.tokens) // parts
    return [tree_map_only(Tensor, lambda x, first=i * rows: x[first : first + rows], batch) for i in range(parts)]


def by_width(
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int
) -> list[Int[Tensor, "b"]]:
    """The rows of micro-batches for `devices` devices of `micro_tokens` padded tokens each, longest rows first.

        rows <= devices * max(1, micro_tokens // width)

    Dealt out one by one, the rows of a micro-batch stay within every device's budget; a row longer than that is the
    only one of its device. Rows without a sampled token are left out. Raises ValueError for less than one device.
    """
    if devices < 1:
        raise ValueError(f"devices: got {devices}, expected at least 1")
    length = lengths(mask)
    order = length.argsort(descending=True, stable=True)
    order = order[length[order] > 0]
    parts, start, sizes = [], 0, length[order].tolist()
    while start < len(order):
        parts.append(order[start : start + devices * max(1, micro_tokens // sizes[start])])
        start += len(parts[-1])
    return parts


def trim_rows(batch: Batch, rows: Int[Tensor, "b"]) -> Batch:
    """These rows, as wide as the longest; -1 is a row that has sampled nothing.

    As every weight is a global one, the sum over the parts of a batch is the whole, whatever they are.
    """
    real, rows = rows >= 0, rows.clamp(min=0)
    width = int((lengths(batch.mask[rows]) * real).amax()) if len(rows) else 0
    part = tree_map_only(Tensor, lambda x: x[rows, :width], batch)
    return part if bool(real.all()) else part._replace(mask=part.mask & real[:, None])


def scatter_rows(
    into: Float[Tensor, "B T"], rows: Int[Tensor, "b"], mask: Bool[Tensor, "b W"], values: Float[Tensor, "b W"]
) -> Float[Tensor, "B T"]:
    """`into` with the values of those rows' masked tokens in their places: the way back from `trim_rows`."""
    real, out = rows >= 0, into.clone()
    there = out[rows[real], : mask.shape[1]]
    out[rows[real], : mask.shape[1]] = torch.where(mask[real], values[real].to(out.dtype), there)
    return out


def reweigh_groups(
    batch: Batch, logp: Float[Tensor, "B T"], group_size: int, reweighting: Callable[[Tensor, Batch], Tensor]
) -> Batch:
    """Rows of whole groups with the advantages that `reweighting`, (logp now, rows) -> [G T] of a group, gives them."""
    groups = len(batch.mask) // group_size
    of_groups = tree_map_only(Tensor, lambda x: by_group(x, groups), batch)
    return batch._replace(adv=rearrange(vmap(reweighting)(by_group(logp, groups), of_groups), "p g t -> (p g) t"))


def rows_as_rollout(batch: Batch) -> Rollout:
    """Rows to learn from as a rollout that a policy can read; nothing of it is truncated, and it has no text."""
    empty = torch.zeros_like(batch.mask[:, 0])
    return Rollout(batch.tokens, batch.mask, batch.logp_sampled, empty, ("",) * len(empty))


def check_tensor(knob: str, x: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise FunctionMisfit unless what the function of a knob returned has this shape and kind of numbers."""
    expected = f"{'booleans' if dtype is torch.bool else 'floating-point numbers'} of shape {list(shape)}"
    if not isinstance(x, Tensor):
        raise FunctionMisfit(f"{knob}: got a {type(x).__name__}, expected {expected}")
    if (x.dtype is torch.bool, x.is_floating_point()) != (dtype is torch.bool, dtype.is_floating_point):
        raise FunctionMisfit(f"{knob}: got {str(x.dtype).removeprefix('torch.')}, expected {expected}")
    if tuple(x.shape) != shape:
        raise FunctionMisfit(f"{knob}: got shape {list(x.shape)}, expected {expected}")


def sample_keys(key: Tensor, problems: Sequence[Problem], group_size: int) -> Tensor:
    """fold_in(key, uid, g) of every row, `[B, 2]`."""
    uid = repeat(torch.tensor([p.uid for p in problems], device=key.device), "p -> (p g)", g=group_size)
    return prng.fold_in(key, uid, repeat(torch.arange(group_size, device=key.device), "g -> (p g)", p=len(problems)))


# -- the same sampled tokens behind other prompts


def change_prompts(rollout: Rollout, prompts: Sequence[Sequence[int]]) -> Rollout:
    """Rows of other prompts and the same tokens from the first sampled one to the last, ids and mask alike."""
    device = rollout.tokens.device
    begin, end = sampled_span(rollout)
    size = torch.tensor([len(ids) for ids in prompts], device=device)
    column = torch.arange(int((size + end - begin).max()), device=device)
    source = column - size[:, None] + begin[:, None]
    inside = (column >= size[:, None]) & (source < end[:, None])
    before = pad_sequence([torch.tensor(ids, device=device) for ids in prompts], batch_first=True)
    at = column.clamp(max=before.shape[1] - 1).expand(len(prompts), -1)
    tokens = torch.where(column < size[:, None], before.gather(1, at), 0)
    return rollout._replace(
        tokens=torch.where(inside, take(rollout.tokens, source), tokens),
        mask=inside & take(rollout.mask, source),
        logp_sampled=torch.where(inside, take(rollout.logp_sampled, source), 0.0),
    )


def restore_places(
    values: Float[Tensor, "B S"], prompts: Sequence[Sequence[int]], rollout: Rollout
) -> Float[Tensor, "B T"]:
    """Values of the rows that `change_prompts` made, where these tokens are in the rows it was given; 0 elsewhere."""
    begin, _ = sampled_span(rollout)
    size = torch.tensor([len(ids) for ids in prompts], device=values.device)
    column = torch.arange(rollout.tokens.shape[1], device=values.device)
    moved = take(values, column - begin[:, None] + size[:, None])
    return torch.where(rollout.mask, moved, torch.zeros_like(moved))


def sampled_span(rollout: Rollout) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
    """Columns of each row's first sampled token and of what comes behind its last one."""
    return rollout.mask.long().argmax(-1), lengths(rollout.mask)


def take(rows: Shaped[Tensor, "B T"], at: Int[Tensor, "B S"]) -> Shaped[Tensor, "B S"]:
    """The value of each row at these columns; any value for a column that it has not."""
    return rows.gather(1, at.clamp(0, rows.shape[1] - 1))
