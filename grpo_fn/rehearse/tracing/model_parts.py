"""Which part of the model an operator belongs to, on the way there and on the way back: the blocks, or the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from grpo_fn.rehearse.tracing.counting import BLOCKS, REST, CountingMode
from grpo_fn.shell.model.blocks import blocks


@contextmanager
def following_parts(mode: CountingMode, model: nn.Module) -> Iterator[None]:
    """Within it the mode knows when a block of the model computes, or its backward pass."""

    def enter(*_: Any) -> None:
        mode.part = BLOCKS

    def leave(*_: Any) -> None:
        mode.part = REST

    def notify(values: Any, then: Callable[..., None]) -> None:
        """Call `then` in the backward pass, once the gradients of these are there."""
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(then)

    def after(_: nn.Module, args: Any, out: Any) -> None:
        mode.part = REST
        notify(out, enter)

    first, handles = blocks(model)[0], []
    handles.append(
        first.register_forward_pre_hook(lambda _, args, kwargs: notify((args, kwargs), leave), with_kwargs=True)
    )
    for block in blocks(model):
        handles += [block.register_forward_pre_hook(enter, prepend=True), block.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
