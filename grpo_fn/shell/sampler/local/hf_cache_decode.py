"""Decoding for models that keep more than keys and values, or attend in their own ways: in transformers' cache.

It grows with every token, and rows that have ended leave it; rows that wait come when all have.
"""

import inspect
from collections.abc import Sequence

import torch
import transformers
from einops import rearrange
from jaxtyping import Float, Int
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_fn.shell.model.blocks import CACHES
from grpo_fn.shell.sampler.local.decode_step import DecodedRows, DecodeOptions, Stops, empty_rows

RENAMED = Version("5.24")  # of transformers: from here on the second of CACHES


def decode(
    model: nn.Module,
    prompts: Sequence[list[int]],
    u: Float[Tensor, "R N"],
    limit: Int[Tensor, "R"],
    options: DecodeOptions,
) -> DecodedRows:
    """Completions of every prompt. Whole groups share one prefill; a group that does not fit alone comes in pieces."""
    by_group = rearrange(u, "(p g) n -> p g n", p=len(prompts))
    limits = rearrange(limit, "(p g) -> p g", p=len(prompts))
    group = by_group.shape[1]
    at_once, width = max(1, options.slots // group), min(group, options.slots)
    parts = []
    for i in range(0, len(prompts), at_once):
        for j in range(0, group, width):
            piece = [x[i : i + at_once, j : j + width] for x in (by_group, limits)]
            parts.append(batch(model, list(prompts[i : i + at_once]), *piece, options))
            if options.on_ended is not None:
                tokens = [row[:n] for row, n in zip(parts[-1].tokens.tolist(), parts[-1].length.tolist(), strict=True)]
                options.on_ended(range(i * group + j, i * group + j + len(tokens)), tokens, parts[-1].stopped.tolist())
    return DecodedRows(*(torch.cat(field) for field in zip(*parts, strict=True)))


def batch(
    model: nn.Module,
    prompts: list[list[int]],
    u: Float[Tensor, "P G N"],
    limit: Int[Tensor, "P G"],
    options: DecodeOptions,
) -> DecodedRows:
    """Rows that begin together, padded on the left."""
    device, (group, new) = u.device, u.shape[1:]
    u, limit = rearrange(u, "p g n -> (p g) n"), limit.flatten()
    stop = torch.tensor(options.end_tokens, device=device)
    width = max(map(len, prompts))  # padded on the left: the last column holds every prompt's last token
    ids = torch.tensor([[options.pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    attend = torch.arange(width, device=device) >= width - lengths[:, None]
    cache = DynamicCache(config=model.config)
    logits = forward(model, ids, attend, (attend.long().cumsum(-1) - 1).clamp(min=0), cache)
    # Not `batch_repeat_interleave`: layers of recurrent and convolution states lack it, or leave those states out.
    cache.reorder_cache(torch.arange(len(prompts), device=device).repeat_interleave(group))
    logits, attend, position = (x.repeat_interleave(group, 0) for x in (logits, attend, lengths))
    out = empty_rows(u, options.pad)
    row = torch.arange(len(u), device=device)  # which output row each live row writes to
    for t in range(new):
        options.check()
        token, logp = options.token_sampler(logits, u[row, t])
        out.tokens[row, t], out.logp[row, t], out.length[row] = token, logp, t + 1
        out.stopped[row] = torch.isin(token, stop) | ends_with_stop(out.tokens[row, : t + 1], options.stops)
        live = (~out.stopped[row] & (t + 1 < limit[row])).nonzero()[:, 0]
        if not len(live) or t + 1 == new:
            break
        if len(live) < len(row):
            cache.reorder_cache(live)
            row, token, attend, position = row[live], token[live], attend[live], position[live]
        attend = torch.cat([attend, attend.new_ones(len(attend), 1)], 1)
        logits = forward(model, token[:, None], attend, position[:, None], cache)
        position = position + 1
    return out


def forward(model: nn.Module, ids: Tensor, attend: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
    """Logits after the last column, `[R, V]`."""
    model_kwargs = {"attention_mask": attend.long(), "position_ids": position, cache_keyword(model): cache}
    return model(input_ids=ids, **model_kwargs, use_cache=True, logits_to_keep=1).logits[:, -1]


def cache_keyword(model: nn.Module) -> str:
    """What the model's forward calls its cache; of one that takes anything, what this transformers calls it."""
    parameters = inspect.signature(model.forward).parameters
    by_version = CACHES[Version(transformers.__version__) >= RENAMED]
    return next((name for name in CACHES if name in parameters), by_version)


def ends_with_stop(tokens: Tensor, stops: Stops) -> Tensor:
    """Rows whose last token completes a stop string."""
    lengths = stops.stop_lengths(tokens.tolist(), [1] * len(tokens)) if stops.stop else [0] * len(tokens)
    return torch.tensor(lengths, device=tokens.device) > 0
