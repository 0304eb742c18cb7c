"""What a run would be, worked out and checked before anything expensive starts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_fn.batch import count
from grpo_fn.types import Batch, Scores

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """The numbers of a run, and those that follow from them."""

    prompts: int
    group_size: int
    minibatches: int
    epochs: int
    steps: int
    train_rows: int
    test_rows: int
    max_new_tokens: int
    parameters: int
    kv_bytes_per_token: int
    weight_bytes: int  # per parameter
    reference: bool
    max_rows: int

    def lines(self) -> list[str]:
        """The plan as a person would read it."""
        rows = self.prompts * self.group_size
        drawn = self.prompts * self.steps
        return [
            f"rows a step           {self.prompts} prompts x {self.group_size} samples = {rows}",
            f"optimizer updates     {self.epochs} epochs x {self.minibatches} minibatches = "
            f"{self.epochs * self.minibatches} a step, {self.epochs * self.minibatches * self.steps} in all",
            f"problems drawn        {drawn} in {self.steps} steps = {drawn / self.train_rows:.2f} epochs "
            f"of {self.train_rows}",
            f"held-out problems     {self.test_rows}",
            f"parameters            {self.parameters:,}",
            f"memory, weights       {self.parameters * self.weight_bytes * (2 if self.reference else 1) / GB:.3f} GB"
            + (" (with the reference copy)" if self.reference else ""),
            f"memory, training      {self.training_bytes() / GB:.3f} GB (gradients and AdamW's two moments)",
            f"memory, KV cache      {self.kv_bytes() / GB:.3f} GB (at most {min(rows, self.max_rows)} rows of "
            f"{self.max_new_tokens} new tokens; prompts come on top)",
            f"disk, one checkpoint  {self.checkpoint_bytes() / GB:.3f} GB",
        ]

    def training_bytes(self) -> int:
        """Gradients and both moments of AdamW, in the weights' dtype as torch keeps them."""
        return 3 * self.parameters * self.weight_bytes

    def kv_bytes(self) -> int:
        """Keys and values of the completions decoded at once."""
        return min(self.prompts * self.group_size, self.max_rows) * self.max_new_tokens * self.kv_bytes_per_token

    def checkpoint_bytes(self) -> int:
        """Weights and both moments on disk."""
        return 3 * self.parameters * self.weight_bytes

    def need_bytes(self) -> int:
        """Free disk space to start with: the newest checkpoint, the one being written, and the exported model."""
        return 2 * self.checkpoint_bytes() + self.parameters * self.weight_bytes + 2**24


def check_positive(**numbers: int) -> None:
    """Raise ValueError naming the first number below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")


def check_divides(prompts: int, minibatches: int) -> None:
    """Raise ValueError, with the nearest numbers that do, unless the prompts of a step split into whole minibatches."""
    if prompts % minibatches == 0:
        return
    below, above = prompts // minibatches * minibatches, -(-prompts // minibatches) * minibatches
    nearest = " or ".join(str(n) for n in (below, above) if n > 0)
    divisors = [m for m in range(1, prompts + 1) if prompts % m == 0]
    closest = min(divisors, key=lambda m: (abs(m - minibatches), m))
    raise ValueError(
        f"prompts {prompts} do not split into {minibatches} minibatches of whole groups: wanted prompts {nearest}, or "
        f"minibatches {closest}"
    )


def check_advantage(advantage: Callable[[Tensor, Tensor], Tensor], group_size: int) -> None:
    """Raise ValueError when a group of one can carry no signal: normalised advantages compare within a group."""
    alone = advantage(torch.ones(1), torch.ones(1, dtype=torch.bool))
    if group_size == 1 and not alone.any():
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), wanted 2 or more"
        )


def uses_reference(objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> bool:
    """Whether the objective looks at logp_ref, found by asking it: then a frozen reference has to be kept."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0, dtype=torch.float64)  # a small beta must not drown in rounding

    def value(logp_ref: Tensor) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp_ref, torch.tensor([1.0, -1.0]).to(logp))
        return partial(objective, batch=batch, totals=count(batch))(Scores(logp, torch.ones_like(logp)))[0]

    return bool(value(logp - 1) != value(logp))


def kv_bytes_per_token(config: object, bytes_per_value: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes."""
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv * head * bytes_per_value
