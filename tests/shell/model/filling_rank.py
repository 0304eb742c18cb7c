"""One rank of test_load: divides an empty model, fills it, and says what it read and holds."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig

from grpo_fn.core import prng
from grpo_fn.shell.model import hf, lora
from grpo_fn.shell.model.blocks import blocks
from grpo_fn.shell.world import World

CPU = torch.device("cpu")
HOW = lora.LoRA(rank=3, alpha=6.0, dropout=0.0, targets="all-linear")


class Root(nn.Module):
    """As the policy's: the model inside, embedding, norm and head in the root's group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


class Counting:
    """safe_open that counts what slices hand out and has nothing else to read tensors with."""

    read = 0

    def __init__(self, file: Path, **settings: str) -> None:
        self.opened = SAFE_OPEN(file, **settings)

    def __enter__(self) -> "Counting":
        self.opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)

    def keys(self) -> list[str]:
        return self.opened.keys()

    def get_slice(self, name: str) -> "Counted":
        return Counted(self.opened.get_slice(name))


class Counted:
    def __init__(self, part: object) -> None:
        self.part = part

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        tensor = self.part[where]
        Counting.read += tensor.numel()
        return tensor

    def __getattr__(self, name: str) -> object:
        return getattr(self.part, name)


SAFE_OPEN = hf.safe_open


def divided(folder: Path, size: int, adapters: bool) -> Root:
    model = hf.meta_causal_lm(AutoConfig.from_pretrained(folder), attention="eager", dtype=torch.float32)
    root = Root(lora.attach(model, HOW) if adapters else model)
    mesh = init_device_mesh("cpu", (size,))
    for block in blocks(root):
        fully_shard(block, mesh=mesh)
    return fully_shard(root, mesh=mesh)


def filled(folder: Path, size: int) -> dict[str, object]:
    root = divided(folder, size, adapters=False)
    Counting.read, hf.safe_open = 0, Counting
    hf.load_shards(root.model, folder, device=CPU)
    hf.safe_open = SAFE_OPEN
    held = sum(p.to_local().numel() for p in root.parameters())
    full = {name: p.full_tensor() for name, p in root.named_parameters()}
    with torch.no_grad():
        logits = root(torch.arange(14).reshape(2, 7))
    return {"read": Counting.read, "held": held, "full": full, "logits": logits}


def with_adapters(folder: Path, size: int) -> dict[str, object]:
    """The adapters of a divided model, gathered, and those of a whole one."""
    key = prng.key(3, device=CPU)
    root = divided(folder, size, adapters=True)
    hf.load_shards(root.model, folder, device=CPU)
    lora.reset(root, key=key, device=CPU)
    alone = Root(
        lora.attach(hf.meta_causal_lm(AutoConfig.from_pretrained(folder), attention="eager", dtype=torch.float32), HOW)
    )
    hf.load_shards(alone.model, folder, device=CPU)
    lora.reset(alone, key=key, device=CPU)
    ids = torch.arange(14).reshape(2, 7)
    for one in (root, alone):  # the gradients, too: a frozen base and adapters in one group
        one(ids).square().mean().backward()
    trained = {name: p for name, p in root.named_parameters() if p.requires_grad}
    whole = {name: p for name, p in alone.named_parameters() if p.requires_grad}
    assert trained.keys() == whole.keys()
    assert all(hf.is_adapter(name) for name in trained)
    for name, p in trained.items():
        torch.testing.assert_close(p.grad.full_tensor(), whole[name].grad, rtol=1e-4, atol=1e-7)
    assert all(p.grad is None for p in root.parameters() if not p.requires_grad)
    gathered = {name: p.full_tensor().detach() for name, p in trained.items()}
    return {"gathered": gathered, "whole": {name: p.detach() for name, p in whole.items()}}


def seen_of_all(world: World, models: list[Path]) -> list[dict[str, object]]:
    """What it saw of every model."""
    return [{"adapters": with_adapters(x, world.size), **filled(x, world.size)} for x in models]
