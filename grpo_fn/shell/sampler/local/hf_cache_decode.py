"""Decoding for models that keep more than keys and values, or attend in their own ways: in transformers' cache.

It grows with every token, and rows that have ended leave it; rows that wait come when all have.
"""

import inspect
import warnings
from collections.abc import Sequence

import torch
import transformers
from einops import rearrange
from jaxtyping import Float, Int
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_fn.shell.model.attention import REFUSALS, refusal, too_far_apart, without_dropout
from grpo_fn.shell.model.blocks import CACHES
from grpo_fn.shell.sampler.interface import never_stop
from grpo_fn.shell.sampler.local.decode_step import DecodedRows, DecodeOptions, Stops, empty_rows

TRIAL = ((3, 4, 1), (40, 2, 3), (17, 4, 4))  # tokens of a prompt, and of its two completions
SLIGHT = 0.01  # nats, in float32: more than rounding, but no other model
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
    # Mamba multiplies its states with whatever mask there is; a new token is never padding.
    if ids.shape[1] == 1 and {*(getattr(model.config, "layer_types", None) or ())} == {"linear_attention"}:
        del model_kwargs["attention_mask"]
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


# -- is a model fit for it


@torch.no_grad()
def check_decoding(model: nn.Module, device: torch.device) -> None:
    """Decode rows of unequal length, of which some end early, and compare their log-probs with those of whole rows.

    Raises ValueError for a model that keeps a cache of another kind, or that computes something else with it.
    Warns of a slight difference: in Nemotron-H transformers applies `time_step_min` to prompts and not while decoding.
    """
    name = type(model).__name__
    refused = f"{name}: got a model that cannot be decoded in slots, nor in transformers' cache"
    try:
        gap, reference = trial_gap(model, device)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        raise ValueError(f"{refused} ({refusal(error)}), {EXPECTED}") from error
    if not bool(reference.isfinite().all()):
        raise ValueError(f"{name}: got log-probs that are not finite, expected weights without NaN and inf")
    reason, nats = too_far_apart("log-probs", gap, reference), float(gap.abs().max())
    if reason is not None and (reference.dtype is not torch.float32 or not nats <= SLIGHT):
        raise ValueError(f"{refused} (log-probs are {nats:.1g} nats from those of whole rows), {EXPECTED}")
    if reason is not None:
        warnings.warn(
            f"{name} is decoded with log-probs up to {nats:.1g} nats from those of whole rows",
            RuntimeWarning,
            stacklevel=2,
        )


EXPECTED = "expected a family of docs/running/families.md that is sampled, or vLLM (vllm_sampler.colocated_sampler)"


def trial_gap(model: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Differences of log-probs of forced tokens, and those of whole rows."""
    config = model.config.get_text_config()
    new = max(max(limits) for _, *limits in TRIAL)
    most = (getattr(config, "max_position_embeddings", None) or TRIAL[1][0] + new) - new
    lengths = [max(1, min(n, most)) for n, *_ in TRIAL]
    rows = [
        [(7 * b + 3 * g * (t >= n) + t) ** 2 % config.vocab_size for t in range(n + new)]
        for b, n in enumerate(lengths)
        for g in (0, 1)
    ]

    def next_of_row(logits: Float[Tensor, "R V"], u: Float[Tensor, "R"]) -> tuple[Tensor, Tensor]:
        token = u.long()
        return token, logits.float().log_softmax(-1).gather(-1, token[:, None])[:, 0]

    options = DecodeOptions(next_of_row, (), Stops(None, (), config.vocab_size), len(rows), 0, None, never_stop)
    forced = torch.tensor([row[-new:] for row in rows], device=device, dtype=torch.float64)
    limit = torch.tensor([n for _, *limits in TRIAL for n in limits], device=device)
    with without_dropout(model):
        drawn = decode(model, [row[:n] for row, n in zip(rows[::2], lengths, strict=True)], forced, limit, options)
        whole = []
        for row in rows:
            logits = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0, -new - 1 : -1]
            whole.append(logits.float().log_softmax(-1).gather(-1, torch.tensor(row[-new:], device=device)[:, None]))
    reference = torch.stack(whole)[..., 0]
    there = torch.arange(new, device=device) < drawn.length[:, None]
    return (drawn.logp - reference)[there], reference.to(model.get_input_embeddings().weight.dtype)
