"""From a rollout to rows to learn from, and from rows to micro-batches. What comes from samplers is checked here."""

import math
from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import vmap

from grpo_fn.core.checks import FunctionMisfit
from grpo_fn.core.groups import by_group
from grpo_fn.core.types import Batch, Reward, Rollout, Totals

LEAST_LOGP = math.log(torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps)  # -103.3 nats


def check_rollout(rollout: Rollout) -> None:
    """Raise ValueError, saying got and wanted, unless the rollout's fields agree and each row sampled something.

    A sampled token is at least as likely as float32's smallest number: none below is ever drawn, so a log-prob below
    LEAST_LOGP is not of what was sampled. Its ratio would end at the largest that `importance.capped_exp` lets through,
    where the objective is huge and the gradient 0.
    """
    shape = rollout.tokens.shape
    for name in ("mask", "logp_sampled"):
        got = getattr(rollout, name).shape
        if got != shape:
            raise ValueError(f"got rollout.{name} {tuple(got)}, wanted the shape of tokens, {tuple(shape)}")
    if len(rollout.text) != shape[0] or rollout.truncated.shape != shape[:1]:
        raise ValueError(
            f"got {len(rollout.text)} texts and truncated {tuple(rollout.truncated.shape)}, wanted {shape[0]} of each"
        )
    if len(rollout.turns) not in (0, shape[0]):
        raise ValueError(f"got turns of {len(rollout.turns)} rows, wanted those of {shape[0]}, or none")
    if rollout.mask[:, 0].any():
        raise ValueError("got a row whose first token is marked as sampled, wanted a prompt token before it")
    if not rollout.mask.any(-1).all():
        empty = int((~rollout.mask.any(-1)).nonzero()[0, 0])
        raise ValueError(f"got row {empty} without a sampled token, wanted at least one (EOS counts)")
    bad = rollout.mask & ~((rollout.logp_sampled <= 0) & (rollout.logp_sampled >= LEAST_LOGP))
    if bad.any():
        b, t = bad.nonzero()[0].tolist()
        raise ValueError(
            f"got logp_sampled {float(rollout.logp_sampled[b, t])} at row {b}, token {t}; wanted a finite "
            f"log-probability <= 0 and >= {LEAST_LOGP:.1f}, of a token that can have been drawn"
        )


def check_reward_shapes(reward: Reward, problems: int, group_size: int) -> None:
    """Raise ValueError unless value, valid and every part are `[problems, group_size]`: row b = p * G + g is [p, g]."""
    wanted = (problems, group_size)
    for name, x in {"value": reward.value, "valid": reward.valid, **reward.parts}.items():
        if tuple(x.shape) != wanted:
            raise ValueError(f"got reward {name} {tuple(x.shape)}, wanted problems by samples, {wanted}")


def make_batch(
    rollout: Rollout,
    keep: Bool[Tensor, "P G"],
    adv: Float[Tensor, "..."],
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    logp_teacher: Float[Tensor, "B T"],
) -> Batch:
    """Rows b = p * G + g to learn from, with adv `[P, G, T]`, nothing selected.

    Rows not to `keep` are masked out whole: they neither learn nor count. An advantage of a token to learn from that
    is not finite is a ValueError.
    """
    batch = scored_rows(rollout, keep, adv, logp_old, logp_ref, logp_teacher)
    if not (batch.adv.isfinite() | ~batch.mask).all():
        odd = batch.adv[batch.mask & ~batch.adv.isfinite()][:3].tolist()
        raise ValueError(f"got advantages that are not finite, {odd}, wanted finite ones")
    return batch


def scored_rows(
    rollout: Rollout,
    keep: Bool[Tensor, "P G"],
    adv: Float[Tensor, "..."],
    logp_old: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    logp_teacher: Float[Tensor, "B T"],
) -> Batch:
    """The same rows before their advantages are final: whether they are finite is not looked at."""
    rows, width = rollout.tokens.shape
    if adv.shape[0] * adv.shape[1] != rows or adv.shape[2] != width:
        raise ValueError(f"got {tuple(adv.shape)} advantages for {rows} rows of {width}, wanted one a token")
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
    """Tokens between two that were sampled: what an environment wrote behind a turn, with its chat format.

    Args:
        mask: which tokens were sampled, [B, T].

    Returns:
        True for the others behind the first and before the last sampled token of their row, [B, T].
    """
    sampled = mask.int()
    before, behind = sampled.cumsum(-1) > 0, sampled.flip(-1).cumsum(-1).flip(-1) > 0
    return ~mask & before & behind


def tokens_of_group(mask: Bool[Tensor, "B T"], groups: int) -> Int[Tensor, "B T"]:
    """How many tokens of the mask a row's group has, for each of the row's tokens: known before rows are dealt out.

    Args:
        mask: which tokens are to be learned from, [B, T]; B is `groups` times the rows of one.
        groups: number of groups, P.

    Returns:
        The count, the same for all tokens of a group, [B, T].
    """
    of_groups = by_group(mask, groups)
    return of_groups.sum((1, 2), keepdim=True).expand(of_groups.shape).flatten(0, 1)


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
        raise ValueError(f"got {len(batch.tokens)} rows for {parts} minibatches, wanted a multiple")
    return [Batch(*fields) for fields in zip(*(x.chunk(parts) for x in batch), strict=True)]


def by_width(
    tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], micro_tokens: int, devices: int
) -> list[Int[Tensor, "b"]]:
    """The rows of micro-batches for `devices` devices of `micro_tokens` padded tokens each, longest rows first.

        rows <= devices * max(1, micro_tokens // width)

    Dealt out one by one, the rows of a micro-batch stay within every device's budget; a row longer than that is the
    only one of its device. Rows without a sampled token are left out. Raises ValueError for less than one device.
    """
    if devices < 1:
        raise ValueError(f"devices: got {devices}, wanted at least 1")
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
    taken = Batch(*(x[rows, :width] if x.ndim == 2 else x[rows] for x in batch))
    return taken if bool(real.all()) else taken._replace(mask=taken.mask & real[:, None])


def scatter_rows(
    into: Float[Tensor, "B T"], rows: Int[Tensor, "b"], mask: Bool[Tensor, "b W"], values: Float[Tensor, "b W"]
) -> Float[Tensor, "B T"]:
    """`into` with the values of those rows' masked tokens in their places: the way back from `trim_rows`."""
    real, out = rows >= 0, into.clone()
    there = out[rows[real], : mask.shape[1]]
    out[rows[real], : mask.shape[1]] = torch.where(mask[real], values[real].to(out.dtype), there)
    return out


def reweigh_groups(
    batch: Batch, logp: Float[Tensor, "B T"], groups: int, reweighting: Callable[[Tensor, Batch], Tensor]
) -> Batch:
    """The rows with the advantages that their groups have at an update.

    Args:
        batch: rows of whole groups, each field [B, T].
        logp: log-probs under the policy at the update, [B, T], in nats.
        groups: number of groups, P.
        reweighting: of one group, (logp, rows) -> advantage, [G, T].

    Returns:
        The rows with other advantages.
    """
    of_groups = Batch(*(by_group(x, groups) for x in batch))
    return batch._replace(adv=vmap(reweighting)(by_group(logp, groups), of_groups).flatten(0, 1))


def rows_as_rollout(batch: Batch) -> Rollout:
    """Rows to learn from as a rollout that a policy can read; nothing of it is truncated, and it has no text."""
    empty = torch.zeros_like(batch.mask[:, 0])
    return Rollout(batch.tokens, batch.mask, batch.logp_sampled, empty, ("",) * len(empty))


def check_tensor(knob: str, x: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise FunctionMisfit unless what the function of a knob returned has this shape and kind of numbers."""
    wanted = f"{'booleans' if dtype is torch.bool else 'floating-point numbers'} of shape {list(shape)}"
    if not isinstance(x, Tensor):
        raise FunctionMisfit(f"{knob}: got a {type(x).__name__}, expected {wanted}")
    if (x.dtype is torch.bool, x.is_floating_point()) != (dtype is torch.bool, dtype.is_floating_point):
        raise FunctionMisfit(f"{knob}: got {str(x.dtype).removeprefix('torch.')}, expected {wanted}")
    if tuple(x.shape) != shape:
        raise FunctionMisfit(f"{knob}: got shape {list(x.shape)}, expected {wanted}")
