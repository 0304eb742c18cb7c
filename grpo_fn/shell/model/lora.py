"""Low-rank adapters: put into a model, switched off for the reference policy, merged into plain weights, saved.

    h = W x + (alpha / rank) B A dropout(x),   A [rank, in], B [out, rank]

(Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685, equation 3 and section 4.1.)
W is frozen in its dtype; A and B train in float32. PEFT's layers stand in the model itself, without a wrapper, so that
it stays a Hugging Face model: names become `...q_proj.base_layer.weight`, `...q_proj.lora_A.default.weight`.
"""

import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_fn.core import prng
from grpo_fn.shell.atomic_io import flush_tree
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.model.hf import Part, is_adapter, name_without_lora, set_tensor

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # the one adapter's name in the names of its parameters
A, B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters: their size, scale and dropout, and the layers that have one."""

    rank: int  # rows of A and columns of B
    alpha: float  # B A is multiplied by alpha / rank
    dropout: float  # probability, on the input of A
    targets: Sequence[str] | str  # "all-linear", every linear layer of the blocks, or names; experts are no layers

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoRA rank: got {self.rank}, expected at least 1")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"LoRA alpha: got {self.alpha}, expected a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA dropout: got {self.dropout}, expected a probability in [0, 1)")
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise ValueError(f"LoRA targets: got {self.targets!r}, expected {ALL_LINEAR!r} or a sequence of names")
        if not self.targets:
            raise ValueError(f"LoRA targets: got none, expected {ALL_LINEAR!r} or at least one name")

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of B A."""
        return self.alpha / self.rank


def attach(model: nn.Module, how: LoRA) -> nn.Module:
    """The model itself, with adapters in its linear layers: they alone train, in float32; the rest is frozen as it is.

    B is zero, so the model computes what it did. A is drawn from torch's global generator, as PEFT draws it; `reset`
    makes it a function of a key. On the meta device the adapters are there, too, and `reset` gives them storage.

    Raises ValueError, nothing changed, for a model with adapters and for targets that are not linear layers of the
    blocks.
    """
    if _layers(model):
        raise ValueError("got a model that has LoRA adapters already, expected one without")
    targets = _targets(model, how.targets)
    config = _config(how, targets, base_name=None)
    from peft import inject_adapter_in_model  # seconds, and notes of whatever it finds installed: not for other runs

    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=any(p.is_meta for p in model.parameters()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
    for layer in _layers(model):  # new modules are in training mode, whatever the model is in
        layer.train(layer.base_layer.training)
    return model


@torch.no_grad()
def reset(model: nn.Module, *, key: Tensor, device: torch.device) -> None:
    """Initialise every adapter, on `device` where it is on the meta device yet: A uniform in +-1/sqrt(in), B zero.

    This is PEFT's distribution (kaiming_uniform with a = sqrt 5). Every number depends on `key`, the parameter's name
    in this module and its place in the whole parameter alone: a rank gets its part of what one rank alone would get.
    Parameters on the meta device are replaced, so call this before there is an optimizer.
    """
    for name, parameter in list(model.named_parameters()):
        if is_adapter(name):
            set_tensor(model, [name], partial(_initial, key, name, parameter.shape), device=device)


def _initial(key: Tensor, name: str, shape: torch.Size, where: Part) -> Tensor:
    if name.endswith(B):
        return torch.zeros(shape)[where]
    bound = shape[1] ** -0.5
    own = prng.fold_in(key.cpu(), zlib.crc32(name.encode()))
    return prng.uniform(own, shape.numel(), dtype=torch.float32, low=-bound, high=bound).reshape(shape)[where]


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes without its adapters: the reference policy, whose weights are the base's.

    For passes without gradients; a backward pass of what was computed inside has to happen inside.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError("got a model without LoRA adapters, expected one whose adapters can be switched off")
    before = [layer.disable_adapters for layer in layers]
    # PEFT's own enable_adapters also changes requires_grad, of whichever tensor (sharded or gathered) FSDP2 has in
    # place at that moment. Only the switch is needed.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The adapters' dropout modules (none when the probability is 0): to be put in training mode by themselves."""
    modules = [layer.lora_dropout[ADAPTER] for layer in _layers(model)]
    return [module for module in modules if isinstance(module, nn.Dropout)]


def merge_adapters(tensors: Mapping[str, Tensor], how: LoRA) -> Iterator[tuple[str, Tensor]]:
    """(plain name, W + alpha/rank B A) of a model with adapters, one tensor at a time, in the mapping's order.

    `tensors` maps the model's names to whole tensors. Each is looked up when its turn comes, and A and B with their W,
    so the mapping may gather them only then. The product is taken in float32 (or W's own dtype if wider), the result in
    W's dtype.

    Raises ValueError for adapters that do not fit together or to `how`.
    """
    for name in tensors:
        if is_adapter(name):
            _check_pair(name, tensors)
    for name in tensors:
        if is_adapter(name):
            continue
        layer, is_base, _ = name.rpartition(".base_layer.weight")
        if is_base and layer + A in tensors:
            yield name_without_lora(name), _sum(tensors[name], tensors[layer + A], tensors[layer + B], how, layer)
        else:
            yield name_without_lora(name), tensors[name]


def _check_pair(name: str, tensors: Mapping[str, Tensor]) -> None:
    layer = name.removesuffix(A).removesuffix(B)
    if missing := [other for other in (layer + A, layer + B, f"{layer}.base_layer.weight") if other not in tensors]:
        raise ValueError(f"got {name} without {', '.join(missing)}, expected A, B and the weight they belong to")


@torch.no_grad()
def _sum(weight: Tensor, a: Tensor, b: Tensor, how: LoRA, layer: str) -> Tensor:
    got, expected = (tuple(a.shape), tuple(b.shape)), ((how.rank, weight.shape[1]), (weight.shape[0], how.rank))
    if got != expected:
        raise ValueError(f"{layer}: got A and B of shapes {got}, expected {expected}")
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + how.scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)


def adapter_folder(tensors: Mapping[str, Tensor], how: LoRA, base_name: str, folder: Path) -> None:
    """Write the adapters as a PEFT folder: adapter_model.safetensors and adapter_config.json.

    `tensors` are as in `merge_adapters`; all but the adapters are left alone. `base_name` is the folder or hub name of
    the model that the adapters belong to. Raises ValueError when there are no adapters.
    """
    names = [name for name in tensors if is_adapter(name)]
    if not names:
        raise ValueError("got no adapters to save, expected tensors named ...lora_A.default.weight")
    leaves = {name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in names}
    targets = sorted(leaves) if how.targets == ALL_LINEAR else sorted(how.targets)
    settings = _config(how, targets, base_name=base_name).to_dict()
    plain_json = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(plain_json, indent=2, sort_keys=True))
    plain = {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in names}
    saved = {plain[name]: tensors[name].detach().cpu().contiguous() for name in names}
    save_file(saved, folder / "adapter_model.safetensors", {"format": "pt"})
    flush_tree(folder)


def _config(how: LoRA, targets: Sequence[str], *, base_name: str | None) -> Any:
    from peft import LoraConfig, TaskType

    return LoraConfig(
        r=how.rank,
        lora_alpha=int(how.alpha) if float(how.alpha).is_integer() else how.alpha,  # other readers expect an integer
        lora_dropout=how.dropout,
        target_modules=list(targets),
        base_model_name_or_path=base_name,
        task_type=TaskType.CAUSAL_LM,
        inference_mode=base_name is not None,  # a saved adapter is there to be used
    )


# Layers of Mamba's mixers and of LongCat's routers whose weight is read where the layer is not called.
READ_ALONE = frozenset({"dt_proj", "classifier"})


def is_layer(module: nn.Module) -> bool:
    """Whether an adapter stands beside this layer; where PEFT was never asked for one, there is none."""
    tuners = sys.modules.get("peft.tuners.lora")
    return tuners is not None and isinstance(module, tuners.LoraLayer)


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_layer(module)]


def _targets(model: nn.Module, targets: Sequence[str] | str) -> list[str]:
    """The full names of the layers that are to have an adapter."""
    layers = (module for block in blocks(model) for module in block.modules() if isinstance(module, nn.Linear))
    inside = {id(module) for module in layers if _is_product(module)}
    linear = {name for name, module in model.named_modules() if id(module) in inside}
    held_back = _held_back(model, {name.rpartition(".")[2] for name in linear})
    free = {name for name in linear if name.rpartition(".")[2] not in held_back}
    if isinstance(targets, str):
        if not free:
            raise ValueError(
                f"LoRA targets: got {targets!r} for {type(model).__name__}, expected a model with blocks in which "
                "adapters can stand beside layers: it has no linear layers of that kind"
            )
        return sorted(free)
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for target in targets:
        hit = {name for name in names if name == target or name.endswith(f".{target}")}
        if not hit or hit - free:
            if not hit:
                what = "which no module has"
            elif hit - linear:
                what = f"which is also {min(hit - linear)}"
            else:
                what = held_back[min(hit - free).rpartition(".")[2]]
            leaves = sorted({name.rpartition(".")[2] for name in free})
            raise ValueError(
                f"LoRA targets: got {target!r}, {what}; expected linear layers of the blocks, among {leaves}"
            )
        chosen |= hit
    return sorted(chosen)


@torch.no_grad()
def _is_product(layer: nn.Linear) -> bool:
    """Whether the layer maps a row as a matrix does; routers return more, grouped layers take a row for each group."""
    if type(layer).forward is nn.Linear.forward:
        return True
    row = torch.zeros(1, layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    try:
        out = layer(row)
    except (RuntimeError, ValueError, IndexError):
        return False
    return isinstance(out, Tensor) and tuple(out.shape) == (1, layer.out_features)


def _held_back(model: nn.Module, leaves: Set[str]) -> dict[str, str]:
    """The reason for each of the names whose layers have no adapter."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    family = type(model).__name__
    reasons = dict.fromkeys(leaves & READ_ALONE, f"whose weight {family} reads without calling the layer")
    for leaf in leaves:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            reasons[leaf] = f"which PEFT refuses in {family}"
    experts = f"which PEFT takes for the experts of {family}, one tensor without adapters"
    return reasons | dict.fromkeys(_expert_names(model, leaves), experts)


def _expert_names(model: nn.Module, leaves: Set[str]) -> set[str]:
    """Those of the names that PEFT puts adapters on the model's experts for, whatever layers have them.

    Experts are one tensor in the model, and no layers. In a family with experts PEFT reads gate_proj, up_proj and
    down_proj as theirs, also where those of a shared expert or of an MLP without experts are meant: no PEFT folder can
    name such an adapter.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = set()
    for leaf in leaves:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one of two that are one tensor
            taken.add(leaf)
        if leaf not in config.target_modules:
            taken.add(leaf)
    return taken


def adapters_line(model: nn.Module) -> str:
    """Which layers have adapters, and which matrices of the blocks stay as they are: a line for the start of a run."""
    adapted = {name.removesuffix(A).rpartition(".")[2] for name, _ in model.named_parameters() if name.endswith(A)}
    inside = {id(p) for block in blocks(model) for p in block.parameters()}
    frozen = {
        ".".join(name.removesuffix(".weight").split(".")[-2:])
        for name, p in model.named_parameters()
        if id(p) in inside and p.ndim > 1 and not is_adapter(name) and ".base_layer." not in name
    }
    rest = f"; frozen without one: {', '.join(sorted(frozen))}" if frozen else ""
    return f"LoRA: adapters on {len(_layers(model))} layers, {', '.join(sorted(adapted))}{rest}"
