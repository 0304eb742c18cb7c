"""A rehearsed update is the one that real ranks take: what they allocate, compute and send."""

from pathlib import Path

import estimating_rank as rank
import pytest
import rehearsing_rank as one
import torch
from crew import crew
from fakes import VOCABULARY
from families import FAMILIES
from transformers import AutoConfig

from grpo_fn.shell.policy import load_and_shard

WAYS = [("full", None, torch.bfloat16), ("none", rank.HOW, torch.float32), ("grad_op", None, torch.float32)]


# A thread of gloo lets go of a collective's tensors after the rank that waited for it goes on: of 3,000 all-reduces of
# 256 bytes on two idle cores 500 were still held then, for up to 18 ms. That adds to what is alive, and takes nothing.
TAKES = {1: 1, 2: 3}  # by the number of ranks: the least of so many updates is what an update needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding and head two ranks cannot halve."""
    path = tmp_path_factory.mktemp("model")
    FAMILIES["qwen3_untied"](VOCABULARY + 1).save_pretrained(path)
    return path


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_update_without_numbers_is_the_real_one(folder, way, size):
    """Bytes alive at the fullest, operations and bytes that are sent: each exactly, on ranks that compute for real."""
    takes = [crew(size).run(one.with_numbers, folder, way) for _ in range(TAKES[size])]
    real, said = takes[0], one.without_numbers(size, folder, way)
    assert said.micro_batches == real[0].micro_batches > 1
    assert said.flops == real[0].flops > 0
    assert said.sent == real[0].sent
    assert bool(said.sent) == (size == 2)
    for phase in ("train", "update"):
        of_ranks = [min(take[number].peaks[phase] for take in takes) for number in range(size)]
        assert said.peaks[phase] == max(of_ranks), phase


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_kept_is_what_the_tensors_of_real_ranks_lie_in(folder, way, size):
    """As the dry run's estimate is held against them. Moments are counted in bytes of numbers, without the counter of
    steps, which a rank has for every weight."""
    real = crew(size).run(one.allocated, folder, way)
    held = one.without_numbers(size, folder, way).held
    assert held["weights"] == max(x["weights"] for x in real)
    assert held["gradients"] == max(x["gradients"] for x in real)
    assert held["optimizer state"] == max(x["moments"] for x in real)


def test_operations_are_those_counted_by_hand(folder):
    """Per token of the stream 2 operations a weight and pass: 3 passes. Attention and the head by their own shapes."""
    config = AutoConfig.from_pretrained(folder)
    said = one.without_numbers(1, folder, ("full", None, torch.float32))
    shape, layers, heads = one.SHAPE, config.num_hidden_layers, config.num_attention_heads
    # A micro-batch: groups of 2 rows, the last token of each is read by nothing.
    rows = one.MICRO_TOKENS // (shape.prompt_tokens + 2 * (shape.new_tokens - 1)) * 2
    groups = rows // 2
    tokens = groups * shape.prompt_tokens + rows * (shape.new_tokens - 1)
    dim, kv = config.head_dim, config.num_key_value_heads
    weights = config.hidden_size * dim * (2 * heads + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    body = layers * weights * 2 * tokens * 3
    q, p = shape.new_tokens - 1, shape.prompt_tokens
    first = groups * (p + q) * (p + q + 1) // 2  # causal: reads its prompt, too
    others = groups * q * (p + q)  # with a mask, the kernel computes what is masked
    attention = layers * heads * 2 * (2 + 5) * dim * (first + others)
    sampled = rows * shape.new_tokens
    head = 2 * sampled * config.hidden_size * config.vocab_size * 3  # logits, dz W, dz^T h: all logits are kept
    assert said.flops == 2 * (body + attention + head)  # a micro-batch, and the last one


def test_collectives_are_those_counted_by_hand(folder):
    """FULL_SHARD: every block is gathered for each pass, the root once, and all gradients are reduced in float32."""
    config = AutoConfig.from_pretrained(folder)
    for size in (2, 8):
        said = one.without_numbers(size, folder, ("full", None, torch.bfloat16))
        parts = rank.memory_estimate_parts(config, size)
        block = sum(size * w.part for w in parts if w.block is not None)
        root = sum(size * w.part for w in parts if w.block is None)
        taken = min(2, said.micro_batches)
        assert said.sent["reduce_scatter"] == taken * 4 * (block + root)
        scores = said.sent["allgather"] - taken * 2 * (2 * block + root)
        assert 0 < scores < 2 * 2 * 4 * 8 * 8 * 40  # what every rank is shown of the rows' scores


def test_on_one_device_weights_are_cast_and_gradients_added_up_without_copies_on_several_they_are_not(
    folder, monkeypatch
):
    """Bytes by hand, of a number of a weight: of blocks two gathers in a micro-batch, of the root one, each a cast (6)
    and in FSDP2 by itself a copy (4); a gradient is added in float32 (6), in FSDP2 by itself put into a buffer (6),
    divided (8), copied (8) and then added (8)."""
    way = ("full", None, torch.bfloat16)
    config = AutoConfig.from_pretrained(folder)
    parts = rank.memory_estimate_parts(config, 1)
    inner, outer = (sum(w.whole for w in parts if (w.block is None) is root) for root in (False, True))
    alone, pair = (one.without_numbers(size, folder, way) for size in (1, 2))
    assert alone.sharding == 0
    assert pair.sharding > 0
    monkeypatch.setattr(load_and_shard, "skip_copies", lambda root: None)
    copied = one.without_numbers(1, folder, way)
    assert copied.sharding == 6 * (inner + outer)
    assert copied.moved - alone.moved == 4 * (2 * inner + outer) + (6 + 8 + 8 + 8 - 6) * (inner + outer)
    assert alone.peaks["train"] <= copied.peaks["train"]
    assert one.without_numbers(2, folder, way).moved == pair.moved


def test_a_thousand_ranks_take_no_longer(folder):
    said = one.without_numbers(1024, folder, ("full", None, torch.bfloat16))
    assert said.peaks["train"] > 0
