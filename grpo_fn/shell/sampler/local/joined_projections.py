"""One matrix product in the place of several that read the same states: queries, keys and values; gate and up.

`joined_model` is a second view of a model for decoding steps. It has the model's own modules but for those
projections and what holds them. The projections' weights become views of one buffer, in which the optimizer and
all else that holds the parameters go on writing: no weight is held twice, and none changes its name.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from grpo_fn.shell.model.blocks import blocks

# Of one module, in the order in which its forward asks for them.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Projections(NamedTuple):
    """Projections of one module that read the same states, by name."""

    holder: nn.Module
    names: tuple[str, ...]

    @property
    def layers(self) -> list[nn.Module]:
        return [self.holder._modules[name] for name in self.names if name in self.holder._modules]


class JoinedLinear(nn.Module):
    """Several linear layers of the same states as one product. The first part is its own; the others wait for their
    call, in `rest`.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.layers = (*layers,)  # a tuple: these stay the modules of the model alone
        self.rest: list[Tensor] = []
        self.link()

    @torch.no_grad()
    def link(self) -> None:
        """Have the layers' weights be views of one buffer, with the values that they have now."""
        weight = joined_parameters([layer.weight for layer in self.layers])
        bias = None if self.layers[0].bias is None else joined_parameters([layer.bias for layer in self.layers])
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B E"]:
        first, *rest = linear(states, self.weight, self.bias).split(self.sizes, -1)
        self.rest = rest
        return first


class JoinedPart(nn.Module):
    """A layer whose result a `JoinedLinear` has found already, in the call before."""

    def __init__(self, joined: JoinedLinear) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B E"]:
        """The next part, of the states that the first one was asked about. Raises ValueError where there is none."""
        first, *self.joined.rest = self.joined.rest
        return first


def joined_parameters(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One buffer with the parameters' rows in it, of which they are views from now on."""
    whole = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        p.data = part
    return whole


def projections(model: nn.Module) -> Iterator[tuple[Projections, str | None]]:
    """The projections of every block, with the reason why they cannot be one product; None where they can."""
    inside, own = {id(block) for block in blocks(model)}, set()
    for module in model.modules():
        if "forward" in vars(module) and id(module) not in inside:  # a block's is replaced by ours: `blocks.py`
            own.update(map(id, module.modules()) if module is not model.get_output_embeddings() else ())
    for block in blocks(model):
        for holder in block.modules():
            for names in JOINED:
                group = Projections(holder, names)
                if group.layers:
                    replaced = "got a module with its own forward around them, expected its class's"
                    yield group, replaced if id(holder) in own else unjoinable_reason(group)


def unjoinable_reason(group: Projections) -> str | None:
    """Why the projections cannot be one product; None where they can."""
    layers = group.layers
    if len(layers) < len(group.names):
        missing = [name for name in group.names if name not in group.holder._modules]
        return f"got a {type(group.holder).__name__} without {', '.join(missing)}"
    if odd := {type(layer).__name__ for layer in layers if type(layer) is not nn.Linear}:
        with_adapters = " (adapters)" if any(hasattr(layer, "lora_A") for layer in layers) else ""
        return f"got layers of {', '.join(sorted(odd))}{with_adapters}, expected torch.nn.Linear"
    if any("forward" in vars(x) or x._forward_hooks or x._forward_pre_hooks for x in layers):
        return "got layers with hooks or a forward of their own, expected plain ones"
    weights = [layer.weight for layer in layers]
    if any(type(w.data) not in (Tensor, FakeTensor) for w in weights):
        return "got weights in parts of a mesh, expected whole ones"
    if len({id(w) for w in weights}) < len(weights):
        return "got one weight twice, expected one for each"
    if len({(w.dtype, w.device, w.shape[1], layer.bias is None) for w, layer in zip(weights, layers, strict=True)}) > 1:
        return "got weights of several dtypes, devices or widths, or a bias in some, expected the same in all"
    return None


def joined_model(model: nn.Module) -> nn.Module:
    """The model for decoding steps: what can be one product is one; the model itself where nothing can."""
    parts = {
        (id(group.holder), name): module
        for group, reason in projections(model)
        if reason is None
        for name, module in zip(group.names, joined_modules(group.layers), strict=True)
    }
    inside = {id(block) for block in blocks(model)}

    def view(module: nn.Module) -> nn.Module:
        children = {
            name: parts.get((id(module), name)) or (child and view(child)) for name, child in module._modules.items()
        }
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        copied = copy(module)
        copied._modules = children
        if id(module) in inside:
            vars(copied).pop("forward", None)  # compiled or recomputed in training: bound to the block itself
        return copied

    return view(model)


def joined_modules(layers: Sequence[nn.Linear]) -> list[nn.Module]:
    """What stands in the layers' places."""
    first = JoinedLinear(layers)
    return [first, *(JoinedPart(first) for _ in layers[1:])]


def relink(model: nn.Module) -> None:
    """Join the weights anew where they have moved since."""
    for module in model.modules():
        if isinstance(module, JoinedLinear):
            module.link()


def joining_note(model: nn.Module) -> str:
    """What decoding steps have as one product, and why not the rest: a line."""
    reasons: dict[str, dict[str | None, int]] = {}
    for group, reason in projections(model):
        counts = reasons.setdefault(" + ".join(group.names), {})
        counts[reason] = counts.get(reason, 0) + 1
    if not reasons:
        return "no projections that could be one product"
    texts = []
    for names, counts in reasons.items():
        every = sum(counts.values())
        for reason, n in counts.items():
            which = names if n == every else f"{names} of {n} in {every} layers"
            texts.append(f"{which} in one product" if reason is None else f"{which} apart ({reason})")
    return ", ".join(texts)
