"""What a rehearsal counts of the kernels that only a card has, held against counts by hand at tiny shapes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fakes import tokenizer
from families import family
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from grpo_fn.core import sampling
from grpo_fn.core.batch import share_prompts
from grpo_fn.rehearse.changes import HEAD, HeadShape, count_heads, with_it, without_it
from grpo_fn.rehearse.lone_rank import lone_rank
from grpo_fn.rehearse.rehearsed_model import CardAttention
from grpo_fn.rehearse.step_pieces import Decoding
from grpo_fn.rehearse.tracing.card_kernels import CardHeadKernels, head_kernels, products_of_a_card, split_kv_cost
from grpo_fn.rehearse.tracing.counting import BLOCKS, CountingMode
from grpo_fn.rehearse.tracing.host_transfers import following_shards
from grpo_fn.rehearse.tracing.live_storages import LiveStorages
from grpo_fn.rehearse.tracing.operators import ATTENTION, ELEMENTWISE, PRODUCTS
from grpo_fn.shell.model.attention import AttentionSpec, install
from grpo_fn.shell.model.packed_input import end_to_end
from grpo_fn.shell.sampler.local.continuous_batching import ContinuousBatching, Ends
from grpo_fn.shell.sampler.local.decode_step import WRITTEN, DecodeEngine, Eager, Stops, captured_sizes
from grpo_fn.shell.sampler.local.kv_cache import row_slots
from grpo_fn.shell.sampler.local.split_kv import SPLIT

N, D, V = 6, 8, 100  # of a head: tokens, width, vocabulary


def counting() -> CountingMode:
    return CountingMode(LiveStorages(frozenset()), {})


def moved(mode: CountingMode, piece: str, kind: str) -> tuple[int, int]:
    """Bytes and launches of one kind in a piece."""
    found = [(one.cost, n) for one, n in mode.work.items() if (one.piece, one.cost.kind) == (piece, kind)]
    return sum(cost.bytes * n for cost, n in found), sum(cost.launches * n for cost, n in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_head_reads_logits_once_and_reads_and_writes_them_once(dtype):
    """Of one chunk, in float32: two products of the forward and three of the backward pass stand beside these."""
    mode = counting()
    shape = HeadShape(N, D, V, dtype, 0.7, N * V, trained=True, entropy=True)
    with products_of_a_card(), FakeTensorMode(allow_non_fake_inputs=True), mode:
        count_heads(mode, shape, {"micro-batch": True})
    logits, rows = 4 * N * V, 4 * N
    by_cost = {one.cost.bytes for one in mode.work if one.piece == with_it("micro-batch")}
    assert logits + 2 * rows + 4 * rows in by_cost  # targets of eight bytes, four numbers a row
    assert logits + dtype.itemsize * N * V + 2 * rows + 5 * rows in by_cost
    fused, plain = (moved(mode, x, ELEMENTWISE) for x in (with_it("micro-batch"), without_it("micro-batch", HEAD)))
    products = [moved(mode, x, PRODUCTS) for x in (with_it("micro-batch"), without_it("micro-batch", HEAD))]
    assert products[0] == products[1]
    assert products[0][1] == 3  # logits, dz W, dz^T h: the only chunk's logits are kept
    # Torch's divide, subtract, exponentiate and multiply, each a read and a write.
    assert plain[0] - fused[0] > 8 * logits
    assert plain[1] - fused[1] >= 10


def test_logits_of_halves_come_in_float32_without_a_cast():
    mode = counting()
    shape = HeadShape(N, D, V, torch.bfloat16, 1.0, N * V, trained=True, entropy=False)
    with products_of_a_card(), FakeTensorMode(allow_non_fake_inputs=True), mode:
        count_heads(mode, shape, {"log-probs": False})
    bytes_, launches = moved(mode, with_it("log-probs"), PRODUCTS)
    assert (bytes_, launches) == (2 * (N + V) * D + 4 * N * V, 1)
    assert not any(one.cost.bytes == 6 * N * V for one in mode.work if one.piece == with_it("log-probs"))  # a copy


def test_an_entry_that_is_put_in_its_place_costs_itself_not_the_buffer():
    """Two rows of four numbers into a buffer of a hundred: read, and written there; read there, too, where they add."""
    mode, at = counting(), torch.tensor([3, 5])
    with FakeTensorMode(allow_non_fake_inputs=True), mode:
        buffer, rows = torch.empty(100, 4), torch.empty(2, 4)
        mode.begin("piece", phase="train")
        buffer.index_copy_(0, at, rows)
        buffer.index_put_((at,), rows)
        buffer.index_add_(0, at, rows)
    assert [one.cost.bytes for one in mode.work if one.piece == "piece" for _ in range(mode.work[one])] == [64, 64, 96]


def test_a_groups_prompt_is_read_once_by_the_split_kv_kernel():
    """Three rows of one prompt and one of another, two heads of keys of 16 with two query heads each, in halves."""
    heads, grouped, dim, rows, columns, reach = 2, 2, 16, 4, 512, 1024
    home = torch.tensor([0, 0, 0, 1])
    slots = row_slots(home, home >= 0, 2, 3)
    start, length = torch.tensor([600, 600, 600, 10]), torch.tensor([604, 604, 604, 14])
    key, prompt = (torch.empty(n, heads, c, dim, dtype=torch.bfloat16) for n, c in ((rows, columns), (2, reach)))
    query = torch.empty(rows, heads * grouped, dim, dtype=torch.bfloat16)
    given = (query, prompt, prompt, key, key, slots.row, slots.lane, start, length, slots.wide, 1.0, None)
    found = split_kv_cost(*given, None)
    entry = heads * 2 * dim * 2  # of one column: key and value
    parts = reach // SPLIT + columns // SPLIT
    between = rows * heads * grouped * parts * (dim + 2) * 4
    assert found.bytes == entry * (600 + 10) + entry * 4 * 5 + query.nbytes + 2 * between + query.nbytes
    assert found.flops == 2 * heads * grouped * 2 * dim * (3 * 600 + 10 + 4 * 5)
    assert found.launches == 2
    windowed = split_kv_cost(*given, 8)  # five of its own, three of the prompt's
    assert found.bytes - windowed.bytes == entry * (600 + 10 - 2 * 3)
    assert windowed.flops == 2 * heads * grouped * 2 * dim * 4 * 8


def test_a_chain_reads_what_it_did_not_make_and_writes_what_is_still_there():
    """(x + 1) * y, then its square beside it, then a product: a kernel that reads x and y and writes two results."""
    mode = counting()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, y = torch.empty(4, 4), torch.empty(4, 4)
        with mode:
            mode.begin("piece", phase="train")
            mode.part = BLOCKS
            kept = (x + 1) * y
            square = kept.square().relu()
            out = square @ x
            tail = out.exp().sum(-1)
            mode.close_chain()
    chains = sorted(one.cost.bytes for one in mode.chains.elements())
    assert chains == [64 + 16, 64 + 64 + 64 + 64]
    written = sorted(one.cost.bytes for one in mode.fusable.elements())
    assert written == [64 + 16, 128, 128, 128, 128, 192]
    assert tail.shape == (4,)


def test_steps_and_looks_are_those_of_the_sampler(monkeypatch):
    """With the sizes of a card, on a CPU, two lots of rows in the slots."""
    torch.manual_seed(0)
    model = family("qwen2_tied").eval()
    install(model)
    new, prompts, group, slots = 38, 2, 3, 3
    looked, stepped = [], []
    look, advance = ContinuousBatching.look, DecodeEngine.advance
    monkeypatch.setattr(ContinuousBatching, "look", lambda self: (looked.append(1), look(self)))
    monkeypatch.setattr(
        DecodeEngine,
        "advance",
        lambda self, *args, steps, **how: (stepped.append(steps), advance(self, *args, steps=steps, **how)),
    )
    engine = DecodeEngine(model, sizes=captured_sizes(split_kv=False), run=Eager(), code=WRITTEN)
    ContinuousBatching(
        engine,
        [[1, 2, 3], [4, 5, 6]],
        torch.rand(prompts * group, new, dtype=torch.float64),
        torch.full((prompts * group,), new),
        token_sampler=partial(sampling.categorical, temperature=1.0),
        ends=Ends((), Stops(tokenizer(), (), model.config.vocab_size)),
        slots=slots,
        pad=0,
        ended=None,
        check=lambda: None,
    ).run()
    call = Decoding(prompts * group, prompts, group, 3, new, slots)
    assert sum(stepped) == call.repeats()["decode a token"]
    assert len(looked) == call.looks


def test_the_heads_kernels_are_given_back():
    from grpo_fn.shell.model import logprob_model

    before = logprob_model.kernels_for
    with head_kernels(CardHeadKernels()):
        assert isinstance(logprob_model.kernels_for(torch.empty(1)), CardHeadKernels)
        assert not isinstance(logprob_model.kernels_for(torch.empty(1, dtype=torch.float64)), CardHeadKernels)
    assert logprob_model.kernels_for is before


@pytest.mark.parametrize(("offloads", "size"), [(True, 1), (True, 2), (False, 2)])
def test_an_offloaded_shard_goes_to_the_card_whenever_it_is_gathered(offloads, size):
    """Of a layer of 6 x 4 and a bias of 6, in float32: once for the forward pass, once for the backward pass."""
    if dist.is_initialized():  # by a test before: of one rank alone, which nothing uses any more
        dist.destroy_process_group()
    mode = counting()
    offload = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    with lone_rank(size, size), following_shards(mode), FakeTensorMode(allow_non_fake_inputs=True), mode:
        layer = nn.Linear(4, 6)
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)), offload_policy=offload, reshard_after_forward=True)
        mode.begin("micro-batch", phase="train")
        layer(torch.empty(3, 4)).sum().backward()
        mode.close_chain()
    assert mode.to_card["micro-batch"] == 2 * 4 * (6 * 4 + 6) // size * offloads


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn"])
def test_padded_kernels_of_a_card_cost_what_their_buckets_do(name):
    """A prompt of 6 tokens and two rows of 4 behind it, 4 query heads to 2 of keys, of 16 numbers, in bfloat16.

    Buckets: the first row with its prompt, 10 queries and keys, causal without a mask; the other, 4 queries, 10 keys.
    """
    heads, dim, half = 4, 16, 2
    tokens = torch.arange(14).expand(2, 14).clone()
    tokens[:, :6] = 7
    mask = torch.arange(14).expand(2, 14) >= 6
    mask[:, 10:] = False
    made = end_to_end(tokens, mask, share=share_prompts).model_kwargs["layout"]
    card = CardAttention(made.spans, made.at, device=made.device)
    card.name = name
    n = int((made.spans.end - made.spans.start).clamp(min=0).sum())
    mode, how = counting(), AttentionSpec(None, 0.25, 0.0, None, "sdpa")
    with FakeTensorMode(allow_non_fake_inputs=True), mode:
        query, key = (torch.empty(1, h, n, dim, dtype=torch.bfloat16, requires_grad=True) for h in (heads, heads // 2))
        mode.begin("piece", phase="train")
        out = card.attend(nn.Module(), query, key, key, how)
        mode.begin("back", phase="train")
        out.sum().backward()
        mode.close_chain()
    sizes = [(x.query.shape[1], x.key.shape[1]) for x in card.buckets]
    masked = [card.mask(i, None, torch.bfloat16) is not None for i in range(len(sizes))]
    pairs = sum(q * k if m else q * (q + 1) // 2 for (q, k), m in zip(sizes, masked, strict=True))
    assert sizes
    for piece, products in (("piece", 2), ("back", 5)):
        costs = [one.cost for one in mode.work.elements() if one.piece == piece and one.cost.kind == ATTENTION]
        assert len(costs) == len(sizes)
        assert sum(cost.flops for cost in costs) == 2 * products * dim * heads * pairs
    lse = {"sdpa_efficient": lambda q: -(-q // 32) * 32, "sdpa_cudnn": lambda q: q}[name]
    moved = sum(
        half * heads * dim * (2 * q + 2 * k) + 4 * heads * lse(q) + m * half * q * k
        for (q, k), m in zip(sizes, masked, strict=True)
    )
    found = [one.cost for one in mode.work.elements() if one.piece == "piece" and one.cost.kind == ATTENTION]
    assert sum(cost.bytes for cost in found) - moved in (0, 16 * len(sizes))  # the state of a generator
