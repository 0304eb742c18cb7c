"""On one device FSDP2 casts weights and adds gradients up without its copies, and nothing else is another."""

from collections import Counter
from dataclasses import replace
from functools import partial

import estimating_rank as rank
import pytest
import torch
from fakes import VOCABULARY
from families import FAMILIES
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_fn.core.batch import rows_as_rollout
from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.model import blocks
from grpo_fn.shell.policy import load_and_shard, optimizer
from grpo_fn.shell.policy.fsdp import FSDPPolicy, full_tensor
from grpo_fn.shell.world import alone

WORLD = alone(torch.device("cpu"))
SHARDS = ("fsdp::", "c10d::", "_c10d_functional::")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    FAMILIES["qwen2_tied"](VOCABULARY + 1).save_pretrained(path)
    return path


def policy_in(folder, dtype: torch.dtype, checkpointing=blocks.no_checkpointing, *, reference: bool = False):
    spec = rank.placing(folder, "full", None, dtype)
    spec = replace(spec, parallelism=replace(spec.parallelism, activation_checkpointing=checkpointing))
    placed = load_and_shard.load_and_shard(WORLD, spec, reference=reference, teachers={})
    return FSDPPolicy(
        placed.logprob_model,
        **{"world": WORLD, "data": placed.data, "reference_model": placed.reference_model, "dropout_modules": []},
        **{"seed": 0, "micro_tokens": 64, "min_micro_batches": 1, "optimizer": rank.ADAMW, "max_grad_norm": 1.0},
        **{"schedule": partial(optimizer.constant, warmup=0), "loss_scale": None, "initial_scale": 1.0},
    )


def groups() -> Batch:
    """Eight groups of two: prompts of 5 tokens, completions of 11."""
    tokens = torch.zeros(16, 16, dtype=torch.long)
    tokens[:, 0] = torch.arange(8).repeat_interleave(2)
    mask = (torch.arange(16) >= 5).repeat(16, 1)
    none = torch.zeros(tokens.shape)
    return Batch(tokens, mask, none, none, none, none, none, torch.zeros_like(mask), torch.full(tokens.shape, 22))


class Operators(TorchDispatchMode):
    """Within it, how often each operator writes numbers, by name and dtype of the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, Tensor) else kwargs.get("out", [None])[0] if kwargs else None
        if not isinstance(made, Tensor) or made.numel():
            self.found[func._schema.name, getattr(made, "dtype", None)] += 1
        return out


def gradients(policy: FSDPPolicy, *, parts: int) -> list[dict[str, Tensor]]:
    """After each of so many micro-batches, all gradients."""
    batch = groups()
    policy.set_accumulation_steps(parts)
    found = []
    for rows in policy.split_rows(batch)[:parts]:
        micro = type(batch)(*(x[rows] for x in batch))
        _, pullback = policy.vjp(micro)
        pullback(Scores(torch.ones(micro.mask.shape), torch.ones(micro.mask.shape)))
        found.append({name: full_tensor(x.grad).clone() for name, x in policy.named_tensors().items()})
    return found


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [(torch.float16, blocks.no_checkpointing), (torch.bfloat16, blocks.full_checkpointing)],
)
def test_every_bit_is_what_it_is_with_fsdp2s_copies(folder, dtype, checkpointing, monkeypatch):
    """Gradients after each micro-batch, weights, moments, names and checksums after each of two updates."""
    results = []
    for copies in (False, True):
        if copies:
            monkeypatch.setattr(load_and_shard, "skip_copies", lambda root: None)
        policy, seen = policy_in(folder, dtype, checkpointing), []
        for _ in range(2):
            policy.note()
            seen += gradients(policy, parts=3)
            policy.update()
            seen += [{name: full_tensor(x).clone() for name, x in policy.tensors().items()}, policy.digests()]
        results.append(seen)
    mine, theirs = results
    for a, b in zip(mine, theirs, strict=True):
        assert list(a) == list(b)
        for name, x in a.items():
            assert (x == b[name]) if isinstance(x, str) else torch.equal(x, b[name]), name
    assert all(x.dtype is torch.float32 and x.any() for x in mine[0].values())
    assert not all(map(torch.equal, mine[3].values(), mine[8].values()))  # weights moved


def test_a_micro_batch_casts_each_weight_where_it_is_gathered_and_adds_each_gradient_once(folder, monkeypatch):
    """Blocks are gathered for each pass, the root once. FSDP2 by itself has more casts, copies and buffers."""
    counts = {}
    for copies in (False, True):
        if copies:
            monkeypatch.setattr(load_and_shard, "skip_copies", lambda root: None)
        policy = policy_in(folder, torch.bfloat16)
        gradients(policy, parts=2)
        with Operators() as operators:
            gradients(policy, parts=1)
        counts[copies] = operators.found
    weights = policy.named_tensors()
    inner = sum(1 for layer in blocks.blocks(policy.model) for _ in layer.parameters())
    outer = len(weights) - inner
    less = counts[True] - counts[False]
    more = counts[False] - counts[True]
    assert not any(name.startswith(SHARDS) for name, _ in counts[False])
    assert any(name.startswith(SHARDS) for name, _ in counts[True])
    assert less["aten::_to_copy", torch.bfloat16] == 2 * inner + outer  # casts that are copied, to where they compute
    groups = sum(isinstance(module, FSDPModule) for module in policy.logprob_model.modules())
    assert less["aten::div", torch.float32] == less["aten::copy_", torch.float32] == groups
    assert sum(more.values()) == 0


def test_weights_that_do_not_compute_have_no_cast(folder):
    """Behind the backward pass all bytes of the blocks' casts are given back; the kept weights are the same objects."""
    policy = policy_in(folder, torch.bfloat16)
    before = {name: x.to_local().data_ptr() for name, x in policy.named_tensors().items()}
    gradients(policy, parts=1)
    assert {name: x.to_local().data_ptr() for name, x in policy.named_tensors().items()} == before
    modules = [module for module in policy.logprob_model.modules() if isinstance(module, FSDPModule)]
    params = [x for module in modules for x in module._get_fsdp_state()._fsdp_param_group.fsdp_params]
    assert [x._unsharded_param.untyped_storage().nbytes() for x in params] == [0] * len(before)


def test_a_frozen_copy_lies_whole_in_the_dtype_of_the_computation_on_one_device(folder):
    """Nothing is gathered or cast for it, and a pass under it is one under the weights that the policy began with."""
    policy = policy_in(folder, torch.bfloat16, reference=True)
    rollout = rows_as_rollout(groups())
    with policy.reference_model() as frozen:
        assert not any(isinstance(module, FSDPModule) for module in frozen.modules())
        assert {x.dtype for x in frozen.parameters()} == {torch.bfloat16}
        assert not any(x.requires_grad for x in frozen.parameters())
    assert torch.equal(policy.reference(rollout), policy.logp(rollout))
