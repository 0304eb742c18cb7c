"""How the rows of a micro-batch are shown to the model: padded to one width, or end to end in one stream of tokens.

The stream holds what predicts a sampled token, or is seen by what does, and nothing else. What looks at one token at a
time never notices; attention gets the rows' layout as a `PackedAttention` that travels with the model's call.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_fn.core.batch import (
    Spans,
    by_reading,
    by_width,
    read_lengths,
    share_prompts,
    visible_positions,
)
from grpo_fn.shell.model.attention import PackedAttention, install, unusable_mask

FULL, SLIDING = "full_attention", "sliding_attention"  # as configurations name the kinds of layers
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-4}  # how far states may be apart, of their largest entry
ROUGH = 0.05  # in half precision
REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class ModelInput(NamedTuple):
    """What the model is shown, and where in it each row's tokens are."""

    tokens: Int[Tensor, "R C"]
    at: Int[Tensor, "B T"]  # into the flattened tokens
    model_kwargs: dict[str, Any]  # further arguments of the model's forward


@runtime_checkable
class InputPacking(Protocol):
    """How rows are shown to a model, and how many of them at once."""

    fit: bool | None  # for being shown end to end; None before it was asked

    def __call__(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
        """The rows as the model takes them."""

    def parts(self, tokens: Tensor, mask: Tensor, micro_tokens: int, devices: int) -> list[Int[Tensor, "b"]]:
        """The rows of micro-batches of at most `micro_tokens` tokens a device; -1 is a row that reads nothing."""


def pad_rows(model: nn.Module) -> InputPacking:
    """Rows as they are, to the width of the longest.

    Args:
        model: a causal language model of Hugging Face.

    Returns:
        The layout of rows in its input.
    """
    return PaddedInput()


def pack_shared_prompts(model: nn.Module) -> InputPacking:
    """No padding, and a prompt that several rows begin with is read once.

    Args:
        model: a causal language model of Hugging Face; its attention is made to take a layout of rows.

    Returns:
        The layout of rows in its input.
    """
    return PackedInput(model)


def padded_rows(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
    """Rows `[prompt | completion | padding]`: causal attention never sees the padding."""
    return ModelInput(tokens, torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape), {})


def end_to_end(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
    """What is read of the rows, row after row; a prompt that several begin with once."""
    device, (tokens, mask) = tokens.device, (tokens.cpu(), mask.cpu())
    spans = share_prompts(tokens, mask)
    at = visible_positions(spans, tokens.shape[1])
    column = torch.arange(tokens.shape[1]).expand(tokens.shape)
    read = (column >= spans.start[:, None]) & (column < spans.end[:, None])
    if not read.any():  # a rank without rows has to take part all the same: one token that is not looked at
        read[0, 0] = True
        spans = Spans(*(x.new_tensor([n]) for x, n in zip(spans, (0, 1, 0), strict=True)))
    model_kwargs = {
        "position_ids": column[read][None].to(device),
        "attention_mask": unusable_mask(device),
        "layout": PackedAttention(spans, at, device=device),
    }
    return ModelInput(tokens[read][None].to(device), at.to(device), model_kwargs)


class PaddedInput:
    """Rows as they are."""

    fit = False
    __call__ = staticmethod(padded_rows)
    parts = staticmethod(by_width)


class PackedInput:
    """Rows end to end, if the model computes then what it computes from padded ones; padded ones if not.

    Which it is, is asked when there are rows for the first time: only then are weights that are spread over ranks
    where they are needed. A model that is not fit for it is reported once, with the reason.
    """

    def __init__(self, model: nn.Module) -> None:
        install(model)
        self.model = model
        self.fit: bool | None = None

    def __call__(self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> ModelInput:
        """The rows as the model can take them."""
        if self.fit is None:
            reason = packing_unsupported_reason(self.model, tokens.device)
            self.fit = reason is None
            if reason is not None:
                warnings.warn(
                    f"{type(self.model).__name__} is trained on padded rows, not on packed ones: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return end_to_end(tokens, mask) if self.fit else padded_rows(tokens, mask)

    def parts(self, tokens: Tensor, mask: Tensor, micro_tokens: int, devices: int) -> list[Int[Tensor, "b"]]:
        """By what is read of the rows, where they are end to end."""
        return (by_reading if self.fit else by_width)(tokens, mask, micro_tokens, devices)


@torch.no_grad()
def packing_unsupported_reason(model: nn.Module, device: torch.device) -> str | None:
    """Why the model must not be shown rows end to end; None when it may. By forward passes of short rows.

    Its layers have to attend to all of a row or to a window of it, to say which, and to pass on their arguments; and
    states have to be those of padded rows.
    """
    config = model.config.get_text_config()
    alike = SLIDING if getattr(config, "sliding_window", None) else FULL
    kinds = getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers
    if odd := {*kinds} - {FULL, SLIDING} or ({"chunked"} if getattr(config, "attention_chunk_size", None) else None):
        return f"it has layers of {', '.join(sorted(odd))}"
    tokens, mask = probe(config.vocab_size, device)
    padded = states(model, padded_rows(tokens, mask))
    stream = end_to_end(tokens, mask)
    try:
        got = states(model, stream)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        return refusal(error)
    windows = [SLIDING if window else FULL for window in stream.model_kwargs["layout"].windows]
    if windows != [*kinds]:
        return f"its layers are {', '.join(kinds)}, and ask for {', '.join(windows) or 'nothing'}"
    read = torch.arange(tokens.shape[1], device=device) < read_lengths(mask)[:, None]
    return too_far_apart("states", got[stream.at[read]] - padded.view(*read.shape, -1)[read], padded)


def refusal(error: Exception) -> str:
    """The error of a model that does not take such a call, in one line."""
    return f"{type(error).__name__}, {str(error).splitlines()[0] if str(error) else 'without a word'}"


def too_far_apart(what: str, gap: Tensor, reference: Tensor) -> str | None:
    """How large the gap to the `reference` is, relative to its largest entry; None when that is rounding."""
    apart = float(gap.abs().max() / reference.abs().max())
    # Not the other way round: NaN is not close.
    return None if apart <= CLOSE.get(reference.dtype, ROUGH) else f"its {what} are {apart:.1g} apart"


def probe(vocabulary: int, device: torch.device) -> tuple[Int[Tensor, "5 9"], Bool[Tensor, "5 9"]]:
    """Groups of three, of one, and of one that begins as the first does; with a hole, and padding behind most."""
    token = torch.arange(45, device=device).view(5, 9) ** 2 % vocabulary
    prompt, end = (torch.tensor(n, device=device)[:, None] for n in ([3, 3, 3, 1, 2], [6, 9, 4, 8, 7]))
    column = torch.arange(9, device=device)
    token = torch.where((column < prompt) & (prompt > 1), token[0], token)
    return token, (column >= prompt) & (column < end) & (column != 5)


def states(model: nn.Module, stream: ModelInput) -> Float[Tensor, "N D"]:
    """The last hidden states of all that the model is shown, without dropout."""
    with without_dropout(model):
        out = model.get_decoder()(input_ids=stream.tokens, use_cache=False, **stream.model_kwargs)
    return out.last_hidden_state.flatten(0, 1)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Without dropout; what was training is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
