"""How much each token counts: the loss is sum(weight * token loss). Rows of all micro-batches and ranks share `totals`.

The denominators are those of the whole optimizer step, so micro-batches and ranks add up to the same loss and gradient
however the rows are dealt out. Nothing to learn from weighs nothing: an empty batch gives zeros, never nan.
"""

from jaxtyping import Float
from torch import Tensor

from grpo_fn.core.types import Batch, Totals

EXAMPLES = {"max_length": (1, 7)}  # knobs as tests try them


def token_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / N, N sampled tokens in the step: every token counts the same, long rows count more.

    DAPO's token-level loss (arXiv:2503.14476, eq. 12).

    Use it when: every token should count alike; long rows then count more.
    Peers: verl `token-mean`, TRL `dapo`.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled is read.
        totals: sampled tokens and rows of the whole optimizer step.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    return batch.mask / totals.tokens.clamp(min=1)


def sequence_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (R |o_i|), R rows in the step, |o_i| sampled tokens of the row: every row counts the same.

    GRPO as published (arXiv:2402.03300, eq. 3). A token of a long row weighs less, so long wrong answers are punished
    less than short ones: the length bias that arXiv:2503.20783 describes.

    Use it when: every row should count alike; long wrong rows are then punished less per token.
    Peers: verl `seq-mean-token-mean`, TRL `grpo`.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled is read.
        totals: sampled tokens and rows of the whole optimizer step.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.mask / (totals.rows.clamp(min=1) * length)


def sequence_mean_over_samples(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (S |o_i|), S samples of the step, with those of which nothing is left to learn from.

    As `sequence_mean`, but a step of which filters leave half is half as large, not made of louder rows.

    Use it when: filters or missing scores should make a step smaller.
    Peers: TRL `grpo` and `sapo`, with `mask_truncated_completions` or rewards of None.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled is read.
        totals: sampled tokens, rows and samples of the whole optimizer step.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.mask / (totals.samples.clamp(min=1) * length)


def constant_length_over_samples(batch: Batch, totals: Totals, *, max_length: int) -> Float[Tensor, "B T"]:
    """w = mask / (S L), S samples of the step, with those of which nothing is left to learn from; L = `max_length`.

    As `constant_length`, in the way of `sequence_mean_over_samples`.

    Use it when: filters or missing scores should make a step smaller.
    Peers: TRL `dr_grpo` and `luspo`, with `mask_truncated_completions` or rewards of None.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled is read.
        totals: sampled tokens, rows and samples of the whole optimizer step.
        max_length: L, in tokens: the longest completion allowed, or 1.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    return batch.mask / (totals.samples.clamp(min=1) * max_length)


def constant_length(batch: Batch, totals: Totals, *, max_length: int) -> Float[Tensor, "B T"]:
    """w = mask / (R L), L = `max_length` the same for every row: the policy gradient up to the constant L.

    Dr. GRPO (arXiv:2503.20783) takes the longest completion allowed; 1 gives the plain sum over a row's tokens, the
    sequence-level REINFORCE of RLOO (arXiv:2402.14740).

    Use it when: you want the policy gradient without a length bias.
    Peers: verl `seq-mean-token-sum-norm`, TRL `dr_grpo`.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled is read.
        totals: sampled tokens and rows of the whole optimizer step.
        max_length: L, in tokens: the longest completion allowed, or 1.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    return batch.mask / (totals.rows.clamp(min=1) * max_length)


def prompt_mean(batch: Batch, totals: Totals) -> Float[Tensor, "B T"]:
    """w = mask / (P N_p), P prompts in the step, N_p sampled tokens of all samples of the prompt.

    A mean over the tokens of a prompt's group, then over prompts (from SkyRL's code). Within a group tokens count the
    same, as in `token_mean`, but a prompt whose answers are long does not count more than another. P counts prompts of
    which a token is left to learn from; SkyRL counts all.

    Use it when: lengths differ from prompt to prompt more than within one: mixtures, long tasks beside short ones.
    Peers: SkyRL `prompt_mean`, which scales advantages and so leaves the KL out.

    Args:
        batch: rows of the step, each field [B, T]; which tokens were sampled and how many their group has are read.
        totals: sampled tokens, rows and groups of the whole optimizer step.

    Returns:
        The weight of each token, [B, T]; 0 where ~mask.
    """
    return batch.mask / (totals.groups.clamp(min=1) * batch.group_tokens.clamp(min=1))
