"""Stand-ins: a sampler with its own module, which may be asked while the policy trains, and a mirror."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_fn.core import sampling
from grpo_fn.shell.sampler.interface import SamplerContext, SamplerOptions
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, local


@dataclass(frozen=True)
class Apart(LocalSampler):
    """A local sampler on a module that is not the trained one."""

    overlaps: ClassVar[bool] = True


def apart(context: SamplerContext, options: SamplerOptions) -> Apart:
    """As local_sampler.local."""
    from grpo_fn.shell.model import hf

    module = hf.load_model(context.folder, dtype=context.dtype, device=context.world.device, attention="sdpa")
    return Apart(**vars(local(replace(context, full_model=lambda: module), options)))


def cutting(context: SamplerContext, options: SamplerOptions) -> LocalSampler:
    """A local sampler with a top-k of 3 of its own, which its log-probs do not show."""
    return local(context, replace(options, token_sampler=partial(three_likeliest, options.token_sampler)))


def three_likeliest(token_sampler: Any, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draws, with the log-probs of the whole distribution at temperature 1."""
    cut = torch.where(logits < logits.topk(3).values[:, -1:], -torch.inf, logits)
    token, _ = sampling.categorical(cut, u, temperature=1.0)
    return token, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


@contextmanager
def noting(run_dir: Path) -> Iterator[None]:
    """A mirror: every opening of one leaves a line with the rank that opened it."""
    with (run_dir / "openings").open("a") as file:
        file.write(f"rank {os.environ['RANK']}\n")
    yield
