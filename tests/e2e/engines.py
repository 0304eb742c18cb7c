"""A stand-in for servers: a sampler with a module of its own, which may be asked while the policy trains."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from grpo_fn.shell.sampler.interface import SamplerContext
from grpo_fn.shell.sampler.local.local_sampler import LocalSampler, local


@dataclass(frozen=True)
class Apart(LocalSampler):
    """A local sampler on a module that is not the trained one."""

    overlaps: ClassVar[bool] = True


def apart(context: SamplerContext, tokenizer: Any, **knobs: Any) -> Apart:
    """As local_sampler.local, whose knobs it takes."""
    from grpo_fn.shell.model import hf

    module = hf.load_model(context.folder, dtype=context.dtype, device=context.world.device, attention="sdpa")
    one = local(replace(context, full_model=lambda: module), tokenizer, **knobs)
    return Apart(**vars(one))
