"""What a run would be, worked out and checked before anything expensive starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_fn.batch import count
from grpo_fn.credit import Credit
from grpo_fn.memory import GB, WIDE, Memory
from grpo_fn.types import Batch, Gains, Reward, Scores


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
    trained: int  # of them
    kv_bytes_per_token: int
    max_rows: int
    ranks: int
    arrangement: str  # how the ranks share the model, in words
    memory: Memory | None  # of one device; None where nobody asked

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
            f"parameters            {self.parameters:,}" + self._of_which(),
            f"disk, one checkpoint  {self.checkpoint_bytes() / GB:.3f} GB",
            *self.memory_lines(),
        ]

    def _of_which(self) -> str:
        return f", of which {self.trained:,} train" if self.trained != self.parameters else ""

    def memory_lines(self) -> list[str]:
        """What one device holds, where that has been estimated."""
        if self.memory is None:
            return []
        return [f"memory, each of {self.ranks:<6} {self.arrangement}; estimated:", *self.memory.lines()]

    def kv_bytes(self) -> int:
        """Keys and values of the completions that one rank decodes at once, `max_rows` rows at most."""
        rows = -(-self.prompts // self.ranks) * self.group_size
        return min(rows, self.max_rows) * self.max_new_tokens * self.kv_bytes_per_token

    def checkpoint_bytes(self) -> int:
        """What trains and both of its moments on disk, in float32."""
        return 3 * self.trained * WIDE

    def need_bytes(self) -> int:
        """Free disk space to start with: the newest checkpoint, the one being written, and the exported model."""
        return 2 * self.checkpoint_bytes() + self.parameters * WIDE + 2**24


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


def check_shared(prompts: int, ranks: int) -> None:
    """Raise ValueError unless every rank has a problem to sample for."""
    if prompts < ranks:
        raise ValueError(f"prompts: got {prompts} a step for {ranks} ranks, wanted at least one for each of them")


def check_credit(credit: Credit, group_size: int, parts: Sequence[str]) -> None:
    """Raise ValueError when groups of one can carry no signal: normalised advantages compare within a group.

    `parts` are the names of the reward's parts; a credit that asks for others says so here.
    """
    signal = credit(*small_step(torch.zeros(2, 1, 1), parts)).any()
    if group_size == 1 and not signal:
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), wanted 2 or more"
        )


def check_signal(min_signal: int, prompts: int) -> None:
    """Raise ValueError unless a step can have as many groups with signal as it needs."""
    if not 0 <= min_signal <= prompts:
        raise ValueError(f"min_signal: got {min_signal}, wanted 0 to prompts, {prompts}")


def small_step(drift: Tensor, parts: Sequence[str]) -> tuple[Reward, Tensor, Tensor]:
    """A step to ask a credit about: drift `[P, G, T]`, every token sampled, every sample rewarded differently."""
    value = torch.arange(drift.shape[0] * drift.shape[1], dtype=drift.dtype).reshape(drift.shape[:2])
    everything = torch.ones_like(drift, dtype=torch.bool)
    return Reward(value, everything[..., 0], dict.fromkeys(parts, value)), drift, everything


def uses_reference(
    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]], credit: Credit, parts: Sequence[str]
) -> bool:
    """Whether objective or credit look at logp_ref, found by asking them: then a frozen reference has to be kept."""
    mask = torch.tensor([[False, True, True], [False, True, True]])
    logp = torch.full((2, 3), -1.0, dtype=torch.float64)  # a small beta must not drown in rounding
    adv = torch.tensor([[1.0], [-1.0]]).expand(2, 3).to(logp)

    def value(logp_ref: Tensor) -> Tensor:
        batch = Batch(mask.long(), mask, logp, logp, logp_ref, adv, mask)
        entropy = torch.ones_like(logp)
        loss = partial(objective, batch=batch, totals=count(batch), gains=Gains(1.0, 1.0))
        return loss(Scores(logp, entropy))[0]

    drift = torch.tensor([[[0.3], [0.1]], [[0.2], [0.7]]], dtype=torch.float64)
    with_drift, without = (credit(*small_step(x, parts)) for x in (drift, 0 * drift))
    return bool(value(logp - 1) != value(logp)) or not torch.equal(with_drift, without)


def kv_bytes_per_token(config: object, bytes_per_value: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes."""
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv * head * bytes_per_value
