"""What all samplers have in common: what may be asked of them, and how rows are put together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Rollout


def check_limits(stop: Sequence[str], **limits: int) -> None:
    """Raise ValueError for limits below 1 and for stop strings that would stop at once or letter by letter."""
    for name, limit in limits.items():
        if limit < 1:
            raise ValueError(f"{name}: got {limit}, wanted at least 1")
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"stop: got {stop!r}, wanted a tuple of strings that are not empty")


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens a row may have at most; None where the model sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_lengths(
    problems: Sequence[Problem], prompts: Sequence[Sequence[int]], *, max_new_tokens: int, limit: int | None
) -> None:
    """Raise ValueError, naming the problem, for an empty prompt and for one that leaves no room for its completion."""
    for problem, ids in zip(problems, prompts, strict=True):
        if not ids:
            raise ValueError(f"got problem {problem.uid} whose prompt has no tokens; wanted at least one")
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"got problem {problem.uid} with {len(ids)} prompt tokens and max_new_tokens "
                f"{max_new_tokens}, wanted at most {limit} positions together"
            )


def ended(tokenizer: PreTrainedTokenizerBase, completion: list[int], *, stopped: bool) -> Completion:
    """A row as a reward sees it, before there is a rollout: what `assemble` makes of it says the same."""
    (text,) = tokenizer.batch_decode([completion], skip_special_tokens=True)
    return Completion(text, len(completion), not stopped)


def assemble(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[list[int]],
    logp: Tensor,
    stopped: Tensor,
) -> Rollout:
    """Rows `[prompt | completion | padding]`, as wide as the longest, on the device of `logp`.

    The completions of a prompt follow one another, as many for each. `logp` is that of all their tokens, one
    completion's after the other's; `stopped [B]` says which ended by themselves.
    """
    rows, device = len(completions), logp.device
    of_each = [prompt for prompt in prompts for _ in range(rows // len(prompts))]
    start = torch.tensor([len(prompt) for prompt in of_each], device=device)
    end = start + torch.tensor([len(completion) for completion in completions], device=device)
    column = torch.arange(int(end.max()), device=device)
    mask = (column >= start[:, None]) & (column < end[:, None])
    ids = [token for row in zip(of_each, completions, strict=True) for part in row for token in part]
    tokens = torch.full(mask.shape, tokenizer.eos_token_id, device=device)
    tokens[column < end[:, None]] = torch.tensor(ids, device=device)
    return Rollout(
        tokens=tokens,
        mask=mask,
        logp_sampled=torch.zeros(mask.shape, device=device).masked_scatter(mask, logp),
        truncated=~stopped,
        text=tuple(tokenizer.batch_decode(list(completions), skip_special_tokens=True)),
    )
