"""Families of models: how grpo_fn decodes and trains each, and how far that is from plain transformers.

A tiny model of each family (tests/helpers/families.py) samples groups from prompts of 1 to 40 tokens, of which many
rows end early; it then scores those rows and pulls random signals back. Both are compared with the same model of
transformers in float64, row by row, without padding, attention written out and a cache never used.
"""

import math
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

sys.path += [str(Path(__file__).parents[2] / name) for name in ("", "tests/helpers")]  # as a command, too

from fakes import VOCABULARY, problem, tokenizer
from families import PUBLISHED, published

from grpo_fn.core import prng
from grpo_fn.core.sampling import categorical
from grpo_fn.core.types import Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.logprob_model import LogprobModel, has_linear_head
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler

TEMPERATURE = 0.7
PROMPTS = ("a", "What is 17+25?", "Tom lost 7 of his keys, then 12 more; who found any of them?")
GROUP, NEW = 4, 24
SLOTS = 8  # two prompts at once, while rows of the third wait


class Measured(NamedTuple):
    """What became of one family. Errors are the largest: of log-probs in nats, of gradients relative to all of them."""

    model: str
    attention: str
    sampled: str  # in "slots", a "growing cache"; or "refused"
    trained: str  # "packed", "padded"
    head: str  # "linear", "whole logits"
    sampler_error: float
    trainer_error: float
    gradient_error: float


def measure(name: str) -> Measured:
    """One family, measured."""
    model, reference = published(name, VOCABULARY), published(name, VOCABULARY).double()
    attention = model.config.get_text_config()._attn_implementation
    reference.config._attn_implementation = reference.config._experts_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which say what the table says
        try:
            sampled, rows = sample(model)
        except ValueError:
            sampled, rows = "refused", made_up_rows()
        scoring = LogprobModel(model, temperature=TEMPERATURE, logits_chunk_elements=20 * VOCABULARY)
        found = scoring(rows.tokens, rows.mask)
    expected = plain_scores(reference, rows)
    drawn, trained = ((x - expected[0]).detach().abs()[rows.mask].max() for x in (rows.logp_sampled, found[0]))
    slopes, wanted = pulled_back(model, found), pulled_back(reference, expected)
    apart = sum(float((slopes[key] - slope).square().sum()) for key, slope in wanted.items())
    return Measured(
        type(model).__name__,
        attention,
        sampled,
        "packed" if scoring.packs else "padded",
        "linear" if has_linear_head(model) else "whole logits",
        math.nan if sampled == "refused" else float(drawn),
        float(trained),
        (apart / sum(float(slope.square().sum()) for slope in wanted.values())) ** 0.5,
    )


def sample(model: nn.Module) -> tuple[str, Rollout]:
    """Which way the model is decoded, and rows."""
    sampler = LocalSampler(
        tokenizer=tokenizer(),
        token_sampler=partial(categorical, temperature=TEMPERATURE),
        encode=hf.bare_prompt,
        max_new_tokens=NEW,
        stop=(),
        max_rows=SLOTS,
        model=model,
    )
    problems = [problem(uid, text) for uid, text in enumerate(PROMPTS)]
    rows = sampler.sample(problems, GROUP, key=prng.key(0, device="cpu"))
    return "growing cache" if sampler.shared.engine is None else "slots", rows


def made_up_rows() -> Rollout:
    """Rows for a model that samples none: prompts of three lengths, completions of four."""
    generator, column = torch.Generator().manual_seed(0), torch.arange(60)
    start, length = torch.tensor([1, 10, 36]).repeat_interleave(GROUP)[:, None], torch.tensor([24, 2, 17, 9]).repeat(3)
    tokens = torch.randint(0, VOCABULARY, (3 * GROUP, 60), generator=generator)
    tokens = torch.where(column < start, tokens[torch.arange(3 * GROUP) // GROUP * GROUP], tokens)
    mask = (column >= start) & (column < start + length[:, None])
    return Rollout(tokens, mask, torch.zeros(mask.shape), torch.ones(len(mask), dtype=torch.bool), ("",) * len(mask))


def plain_scores(model: nn.Module, rows: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens as transformers has them: each row alone, without padding."""
    every: list[list[Tensor]] = [[], []]
    for tokens, mask in zip(rows.tokens, rows.mask, strict=True):
        end = int(mask.nonzero().max()) + 1
        logits = model(input_ids=tokens[None, :end], use_cache=False).logits[0, :-1].double()
        logp = (logits / TEMPERATURE).log_softmax(-1)
        picked = logp.gather(-1, tokens[1:end, None])[:, 0]
        for scores, of_row in zip(every, (picked, -(logp.exp() * logp).sum(-1)), strict=True):
            scores.append(pad(of_row, (1, len(tokens) - end)) * mask)
    return torch.stack(every[0]), torch.stack(every[1])


def pulled_back(model: nn.Module, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What one random signal for log-probs, and one for entropies, gives the weights."""
    generator = torch.Generator().manual_seed(0)
    signals = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in scores]
    torch.autograd.backward(scores, signals)
    weights = model.named_parameters()
    return {key: torch.zeros_like(w).double() if w.grad is None else w.grad.double() for key, w in weights}


def row(name: str, x: Measured) -> str:
    """What the line of a family begins with; its errors are behind it."""
    return f"| `{name}` | {' | '.join(x[:5])} |"


def table(_: str) -> str:
    """A line for every family."""
    lines = [
        "| family | class | attention | sampled | trained | head | sampler | trainer | gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in PUBLISHED:
        x = measure(name)
        lines.append(f"{row(name, x)} {' | '.join('' if math.isnan(x) else f'{x:.0e}' for x in x[5:])} |")
    return "\n".join(lines)
