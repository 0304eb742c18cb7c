"""Gradients of all parameters together, plain or spread over ranks as DTensors."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_norm(grads: list[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, the same number on every rank; 0 of none."""
    if not grads:
        return torch.zeros(())
    by_mesh: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [whole(nn.utils.get_total_norm(part)) for part in by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def shrink_(params: list[nn.Parameter], factor: float) -> None:
    """Multiply the gradients, what clipping and the loss scale ask for at once."""
    if factor != 1.0:
        for p in params:
            (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(factor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all ranks where it is spread over them; detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
