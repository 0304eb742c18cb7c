"""The policy's weights as an inference engine takes them: the names of the model folder, whole, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.policy.fsdp import FSDPPolicy, full_tensor
from grpo_fn.shell.sampler.interface import SamplerContext
from grpo_fn.shell.world import World

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class PolicyWeights(Mapping[str, Tensor]):
    """Tensors that may be spread over the ranks, gathered when they are looked up; every rank has to do so alike."""

    named: Mapping[str, Tensor]
    world: World

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor."""
        with self.world.talking(f"gathering {name}"):
            return full_tensor(self.named[name])

    def __iter__(self) -> Iterator[str]:
        """The names, in the model's order."""
        return iter(self.named)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.named)


class FixedWeights(NamedTuple):
    """A model that does not train, for a sampler to take its weights from."""

    model: nn.Module
    world: World

    def named_tensors(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer once, under the model's own names."""
        return hf.named_tensors(self.model)


def export_weights(policy: FSDPPolicy | FixedWeights, context: SamplerContext) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the whole model, in the dtype it is computed in; adapters are merged into their layers.

    Never more than one weight (with adapters: one and its A and B) is gathered at a time. A tied embedding comes a
    second time as the head: an engine that has copied it into another layout would go on with the old one. Every rank
    has to go through all of it.
    """
    tensors = PolicyWeights(policy.named_tensors(), policy.world)
    tied = context.config.get_text_config().tie_word_embeddings
    for name, tensor in tensors.items() if context.adapters is None else lora.merge_adapters(tensors, context.adapters):
        weight = tensor.to(context.dtype) if tensor.is_floating_point() else tensor
        yield name, weight
        if tied and name.endswith("embed_tokens.weight"):
            yield HEAD, weight
