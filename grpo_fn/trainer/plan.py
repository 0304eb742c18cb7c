"""What a run would be, worked out and checked before anything expensive starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.memory import GB, WIDE, Memory
from grpo_fn.tasks.task import Task


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
    average: bool = False  # whether a moving average of what trains is kept
    ranks: int = 1
    arrangement: str = ""  # how the ranks share the model, in words
    memory: Memory | None = None  # of one device; None where not estimated

    def lines(self) -> list[str]:
        """The plan as a person would read it."""
        rows = self.prompts * self.group_size
        drawn = self.prompts * self.steps
        trained = f", of which {self.trained:,} train" if self.trained != self.parameters else ""
        each = f"memory, each of {self.ranks:<6} {self.arrangement}; estimated:"
        return [
            f"rows a step           {self.prompts} prompts x {self.group_size} samples = {rows}",
            f"optimizer updates     {self.epochs} epochs x {self.minibatches} minibatches = "
            f"{self.epochs * self.minibatches} a step, {self.epochs * self.minibatches * self.steps} in all",
            f"problems drawn        {drawn} in {self.steps} steps = {drawn / self.train_rows:.2f} epochs "
            f"of {self.train_rows}",
            f"held-out problems     {self.test_rows}",
            f"parameters            {self.parameters:,}{trained}",
            f"disk, one checkpoint  {self.checkpoint_bytes() / GB:.3f} GB",
            *([] if self.memory is None else [each, *self.memory.lines()]),
        ]

    def kv_bytes(self) -> int:
        """Keys and values of the completions that one rank decodes at once, `max_rows` rows at most."""
        rows = -(-self.prompts // self.ranks) * self.group_size
        return min(rows, self.max_rows) * self.max_new_tokens * self.kv_bytes_per_token

    def checkpoint_bytes(self) -> int:
        """What trains, both of its moments and its average, where one is kept, on disk, in float32."""
        return (3 + self.average) * self.trained * WIDE

    def need_bytes(self) -> int:
        """Free disk space to start with: the newest checkpoint, the one being written, and the exported model."""
        return 2 * self.checkpoint_bytes() + self.parameters * WIDE + 2**24


def kv_bytes_per_token(config: object, bytes_per_value: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes; 0 of a model without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * kv * head * bytes_per_value


@dataclass(frozen=True)
class ValidatedPlan:
    """What validation found out about a run, for `build`."""

    source: hf.ModelSource
    config: PretrainedConfig
    dtype: torch.dtype  # of the computation
    task: Task
    reference: bool  # whether objective or credit declare logp_ref
    frozen: bool  # whether a frozen copy of the start model is kept, as that reference or to measure the KL to it
    teachers: Mapping[str, tuple[hf.ModelSource, PretrainedConfig]]  # those that are loaded, by key
    parts: Sequence[str]  # of the reward
    shown: Task | None  # whose demonstrations are learned from beside the sampled completions
    plan: Plan
