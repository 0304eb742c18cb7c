"""What a run is said to keep in memory is what it allocates."""

from functools import partial
from pathlib import Path

import estimating_rank as rank
import pytest
import torch
from crew import crew
from fakes import VOCABULARY
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import DEFAULTS, local
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from grpo_fn.shell.model import blocks, logprob_model, lora
from grpo_fn.shell.policy import memory_estimate, optimizer
from grpo_fn.shell.policy.memory_estimate import Arrangement, Passing, per_device
from grpo_fn.shell.policy.mesh import PREFETCH
from grpo_fn.shell.world import alone

NOTHING = Passing(0, 0, 0)
MUON = {**DEFAULTS, "momentum": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding and head two ranks cannot halve."""
    path = tmp_path_factory.mktemp("model")
    FAMILIES["qwen3_untied"](VOCABULARY + 1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def allocated(folder: Path) -> dict[int, list[list[dict[str, int]]]]:
    """Of 1 and of 2 processes: for each rank, for each of rank.WAYS, the bytes that it allocated."""
    here = rank.in_every_way(alone(torch.device("cpu")), folder)
    return {1: [here], 2: crew(2).run(rank.in_every_way, folder)}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", rank.WAYS, ids=str)
def test_weights_gradients_and_moments_are_what_is_allocated(folder, allocated, way, size):
    """Exactly, on the rank that keeps most. Of a weight whose rows the ranks cannot share evenly, FSDP2 pads weights
    and gradients to the same size on every rank; moments are not padded: together they are those of the whole."""
    strategy, adapters, dtype = way
    _, shard, _ = rank.scale(strategy).shape(size, size)
    parts = memory_estimate.weights(
        memory_estimate.meta_model(AutoConfig.from_pretrained(folder), adapters, "sdpa"), shard, 1
    )
    moments = memory_estimate.moment_bytes(rank.ADAMW, parts)
    how = Arrangement(dtype.itemsize, size > 1, True, False, False, False)
    said = per_device(parts, moments, NOTHING, how)
    standing, training = ({part.name: part.bytes for part in phase} for phase in (said.standing, said.training))
    got = [each[rank.WAYS.index(way)] for each in allocated[size]]
    assert [x["weights"] for x in got] == [standing["weights"]] * size
    assert [x["gradients"] for x in got] == [training["gradients"]] * size
    assert got[0]["moments"] == standing["optimizer state"] == max(x["moments"] for x in got)
    padding = sum(shard * w.part - w.whole for w in parts if w.trained)
    assert sum(x["moments"] for x in got) == size * moments - size // shard * 8 * padding
    assert (padding > 0) == (shard == 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", [1, 2])
def test_a_teacher_is_what_is_allocated_for_it(folder, size):
    config = AutoConfig.from_pretrained(folder)
    got = crew(size).run(rank.teachers_in_every_way, folder)
    for i, (strategy, dtype) in enumerate(rank.TEACHER_WAYS):
        teachers = standing(config, strategy, dtype, rank.scale(strategy).shape(size, size), [config])["teachers"]
        assert max(one[i] for one in got) == teachers.bytes  # the rank that keeps most
        assert teachers.host is False


def test_an_average_is_as_large_as_what_trains_in_float32(folder):
    config = AutoConfig.from_pretrained(folder)
    for adapters, dtype in ((None, torch.bfloat16), (rank.HOW, torch.float32)):
        parts, without = (
            {
                name: part.bytes
                for name, part in standing(config, "full", dtype, (1, 1, 1), [], average, adapters).items()
            }
            for average in (True, False)
        )
        assert parts["moving average"] == 4 * memory_estimate.trained_parameters(config, adapters)
        assert without == parts | {"moving average": 0}


def standing(config, strategy, dtype, mesh, teachers, average=False, adapters=None) -> dict[str, memory_estimate.Part]:
    """What is there all the time, by name."""
    found = memory_estimate.device_memory(
        *(config, adapters, rank.scale(strategy), rank.ADAMW),
        **{"mesh": mesh, "dtype": dtype, "attention": "sdpa", "reference": False, "teachers": teachers},
        **{"offload_teachers": False, "relative_to": None, "average": average, "micro_tokens": 64, "width": 8},
        **{"logits_chunk_elements": 2**20, "cache": 0, "local_sampler": True},
    )
    return {part.name: part for part in found.standing}


SHAPE = {
    **{"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "tie_word_embeddings": True},
}


def allocated_by_head(tokens: int, theirs: int, *, dtype: torch.dtype, trained: bool, elements: int) -> int:
    """Most bytes alive at once in the head's forward and backward pass beside a teacher, whose head is copied."""
    rows, columns = SHAPE["vocab_size"], SHAPE["hidden_size"]
    drawn = [torch.randn(n, columns, dtype=dtype) for n in (tokens, rows, tokens, theirs)]
    hidden, weight = drawn[0].requires_grad_(), drawn[1].requires_grad_(trained)
    target, how = torch.arange(tokens) % rows, {"temperature": 0.7, "elements": elements}
    with memory_estimate.Alive() as alive:
        teacher = logprob_model.HeadInput(drawn[2].clone(), drawn[3].clone())
        logp, _ = logprob_model.linear_scores(hidden, weight, target, **how)
        entropy = logprob_model.relative_entropies(logprob_model.HeadInput(hidden, weight), teacher, **how)
        (logp + entropy).sum().backward()
    return alive.most


@pytest.mark.parametrize(("dtype", "trained", "tokens"), [(torch.float32, True, 700), (torch.bfloat16, False, 64)])
def test_a_head_beside_a_teachers_is_what_is_allocated(dtype, trained, tokens):
    """A fiftieth less at most, which are numbers of a token, and an eighth more; far more than without a teacher."""
    elements, shape = 100 * SHAPE["vocab_size"], (SHAPE["vocab_size"], SHAPE["hidden_size"], tokens, dtype.itemsize)
    for theirs in (SHAPE["vocab_size"], SHAPE["vocab_size"] + 60):
        said = memory_estimate.logit_bytes(elements, *shape, trained=trained, teacher=(theirs, SHAPE["hidden_size"]))
        most = allocated_by_head(tokens, theirs, dtype=dtype, trained=trained, elements=elements)
        assert 0.98 * most <= said <= 9 / 8 * most
        assert said > 1.5 * memory_estimate.logit_bytes(elements, *shape, trained=trained, teacher=None)


def alive(layers: int) -> int:
    config, how = Qwen2Config(**SHAPE, num_hidden_layers=layers), {"dtype": torch.float32, "attention": "sdpa"}
    return memory_estimate.activation_bytes(config, None, blocks.no_checkpointing, **how, rows=4, width=40)


def saved(layers: int) -> int:
    """Bytes that autograd keeps of a forward pass with data, weights apart."""
    config = Qwen2Config(**SHAPE, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.get_decoder()(input_ids=torch.zeros(4, 40, dtype=torch.long), use_cache=False)
    return sum(s.nbytes() for pointer, s in kept.items() if pointer not in own)


def test_activations_are_those_that_a_pass_with_data_keeps():
    """The same for each layer more, but for keys and values repeated for 4 heads instead of 2 and a mask of 8 columns;
    besides them, what the backward pass has in hand at its fullest."""
    small, large = saved(3), saved(6)
    repeated, mask = 160 * 2 * (4 - 2) * 8 * 4, 160 * 8 * 4
    assert alive(6) - alive(3) == large - small + 3 * (repeated + mask)
    assert small <= alive(3) <= 1.25 * small


class Moment8(torch.optim.Optimizer):
    """As 8-bit ones are: a byte a number in whole blocks of 256 from 4096 numbers on, else float32; and 77 bytes."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                small = p.numel() < 4096 or p.numel() % 256 or p.ndim < 2
                self.state[p] = {
                    "moment": torch.zeros(p.numel(), dtype=torch.float32 if small else torch.uint8),
                    "scale": torch.zeros(0 if small else p.numel() // 256),
                    "fixed": torch.zeros(77, dtype=torch.uint8),
                }


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9) | st.integers(15, 5000), st.integers(1, 300)), min_size=1, max_size=5))
def test_an_optimizer_is_asked_what_it_keeps(shapes):
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    made = Moment8(params)
    made.step()
    parts = [memory_estimate.Weight(p.numel(), p.numel(), True, None, True) for p in params]
    assert memory_estimate.moment_bytes(Moment8, parts) == sum(
        memory_estimate.tensor_bytes(made.state[p].values()) for p in params
    )


def test_muon_keeps_one_moment_of_a_blocks_matrix_and_two_of_the_rest(folder):
    config, make = AutoConfig.from_pretrained(folder), partial(optimizer.muon, **MUON)
    policy = local(AutoModelForCausalLM.from_config(config), optimizer=make)
    for p in policy.model.parameters():
        p.grad = torch.zeros_like(p)
    policy.optimizer.step()
    kept = {name: policy.optimizer.state[p] for name, p in policy.model.named_parameters()}
    assert [*kept["lm_head.weight"]] == [*kept["model.norm.weight"]] == ["step", "exp_avg", "exp_avg_sq"]
    assert [*kept["model.layers.0.mlp.up_proj.weight"]] == ["momentum_buffer"]
    parts = memory_estimate.weights(memory_estimate.meta_model(config, None, "sdpa"), 1, 1)
    expected = sum(memory_estimate.tensor_bytes(state.values()) for state in kept.values())
    assert memory_estimate.moment_bytes(make, parts) == expected


@pytest.mark.parametrize("adapters", [None, rank.HOW])
def test_tensor_parallel_divides_the_blocks_products_alone(adapters: lora.LoRA | None):
    model = memory_estimate.meta_model(Qwen2Config(**SHAPE, num_hidden_layers=3), adapters, "sdpa")
    whole, halves = memory_estimate.weights(model, 1, 1), memory_estimate.weights(model, 1, 2)
    for (name, p), one, half in zip(model.named_parameters(), whole, halves, strict=True):
        rowwise = "o_proj" in name or "down_proj" in name
        free = "_proj" not in name or (rowwise and (name.endswith("bias") or ".lora_B." in name))
        free |= not rowwise and ".lora_A." in name
        assert half.part == half.whole == one.whole // (1 if free else 2), name
        assert one.matrix == (p.ndim == 2)


weight = st.builds(
    lambda part, ranks, trained, block: memory_estimate.Weight(part, part * ranks, trained, block, True),
    st.integers(1, 1000),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, 0, 1, 2]),
)


@given(st.lists(weight, min_size=1), st.integers(0, 99), st.booleans())
def test_options_that_save_memory_never_cost_any(weights, moments, reference):
    usual = Arrangement(2, True, True, False, False, reference)
    said = per_device(weights, moments, Passing(3, 5, 7), usual)
    free = per_device(weights, moments, Passing(3, 5, 7), usual._replace(offload=True, offload_reference=True))
    held = per_device(weights, moments, Passing(3, 5, 7), usual._replace(reshard_after_forward=False))
    wide = per_device(weights, moments, Passing(3, 5, 7), usual._replace(width=4))
    assert free.peak() <= said.peak() <= min(held.peak(), wide.peak())
    single = per_device(weights, moments, Passing(3, 5, 7), usual._replace(alone=True))
    assert single.peak() <= said.peak()
    known = {part.name: part.bytes for phase in single for part in phase}
    assert known["gathered gradients"] == 2 * max((w.whole for w in weights if w.trained), default=0)
    assert known["reference, gathered root"] == 0  # it lies whole, in the dtype of the computation
    assert said.host() == 0
    both = [sum(p.bytes for phase in x for p in phase) for x in (said, free)]
    assert both[0] == both[1]
    alone = per_device(weights, moments, NOTHING, usual._replace(gathers=False, reference=False))
    kept = sum(w.part * (8 if w.trained else 2) for w in weights)
    assert alone.peak() == kept + moments


@given(st.lists(weight, min_size=1))
def test_gathered_are_the_root_and_the_largest_blocks(weights):
    sizes = [sum(w.whole for w in weights if w.block == i) for i in range(3)]
    root = sum(w.whole for w in weights if w.block is None)
    how = Arrangement(2, True, True, False, False, False)
    assert memory_estimate.peak_gathered(weights, how) == root + sum(sorted(sizes)[::-1][: 1 + PREFETCH])
    assert memory_estimate.peak_gathered(weights, how._replace(reshard_after_forward=False)) == root + sum(sizes)
