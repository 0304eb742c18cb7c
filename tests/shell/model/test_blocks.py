"""What is done to a block changes what it keeps and how fast it runs, never what it computes."""

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from families import FAMILIES, family
from policies import mesh_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from grpo_fn.shell.model import blocks as block_changes
from grpo_fn.shell.model import lora
from grpo_fn.shell.model.blocks import (
    COMPILE_MODES,
    Change,
    CompiledForward,
    blocks,
    compiled_on_cuda,
    full_checkpointing,
    recompilations,
    torch_compile,
)

compile_block = partial(torch_compile, mode="default")
IDS = torch.arange(22).reshape(2, 11)
ADAPTERS = lora.LoRA(rank=2, alpha=4.0, dropout=0.5, targets="all-linear")


def changed(model: nn.Module, *changes: Change) -> nn.Module:
    for block in blocks(model):
        for change in changes:
            change(block)
    return model


def forward(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def trained(model: nn.Module, ids: Tensor = IDS) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and every gradient of a nonlinear function of them; the same noise every time."""
    model.zero_grad()
    torch.manual_seed(0)
    out = forward(model, ids)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal_runs(got: tuple, expected: tuple, tolerance: float) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=tolerance, atol=tolerance, msg=name)


# -- found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_are_the_decoders_layers_in_order(name: str) -> None:
    model = lora.attach(family(name), ADAPTERS)
    assert [id(block) for block in blocks(model)] == [id(layer) for layer in model.get_decoder().layers]
    assert len(blocks(nn.ModuleDict({"model": model}))) == 2
    with pytest.raises(ValueError, match=r"got Linear without transformer blocks; expected modules of .* names none"):
        blocks(nn.Linear(2, 2))


# -- activations


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_gradients_and_noise_of_recomputed_blocks_are_those_of_plain_ones_bit_for_bit(name: str) -> None:
    plain = family(name).train()
    assert_equal_runs(trained(changed(copy.deepcopy(plain), full_checkpointing)), trained(plain), 0.0)


@pytest.mark.parametrize("change", [full_checkpointing, compile_block])
def test_no_name_changes_and_a_copy_is_another_model(change: Change) -> None:
    plain = family("qwen2_tied")
    model = changed(copy.deepcopy(plain), change)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    if change is not compile_block:  # the same there, shown without compiling twice
        assert torch.equal(forward(model), forward(plain))
        assert not forward(other).any()
    assert all(bound(block.forward).__self__ is block for block in blocks(other))


def bound(f: Callable) -> Callable:
    """The block's own method, under what was put around it."""
    while not hasattr(f, "__self__"):
        f = f.forward if isinstance(f, CompiledForward) else f.args[0]
    return f


def bytes_kept(model: nn.Module) -> int:
    """What the forward pass has allocated and not freed when it is done, its result among it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = forward(model, torch.arange(120).reshape(2, 60))
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_recomputed_activations_are_not_kept() -> None:
    assert bytes_kept(changed(family("phi3_fused"), full_checkpointing)) < bytes_kept(family("phi3_fused"))


# -- execution


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2_capped"])
def test_a_compiled_model_computes_the_same_and_is_built_once_for_all_blocks_and_sizes(name: str) -> None:
    plain, model = family(name), changed(family(name), compile_block)
    before = recompilations()
    for rows, width in ((2, 11), (3, 7), (4, 9)):
        ids = torch.arange(rows * width).reshape(rows, width)
        assert_equal_runs(trained(model, ids), trained(plain, ids), 1e-6)
    after = recompilations()
    assert after.built > before.built
    assert after.built - before.built <= 2  # Gemma's layers are of two kinds
    assert after.again - before.again == after.built - before.built - 1


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_the_mode_is_what_torch_compile_is_given(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: given.append(how) or function)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    changed(family("qwen2_tied"), partial(torch_compile, mode=mode))
    meant = {**importlib.import_module("torch._inductor").list_mode_options(mode, True), "compile_threads": 3}
    assert given == [{"dynamic": True, "options": meant}] * len(blocks(family("qwen2_tied")))


@pytest.mark.slow
def test_code_is_built_with_the_threads_of_the_environment_where_vllm_has_set_inductors_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def build(graph: object) -> None:
        seen.append(config.compile_threads)
        raise RuntimeError("seen")

    config, graph = importlib.import_module("torch._inductor.config"), importlib.import_module("torch._inductor.graph")
    monkeypatch.setattr(graph.GraphLowering, "compile_to_module", build)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    part = block_changes.CompiledPart(lambda x: x.sin() + 1.0)
    with config.patch(compile_threads=1, force_disable_caches=True):
        with pytest.warns(RuntimeWarning, match="decoding runs as written, not compiled"):
            part(torch.ones(4))
        assert config.compile_threads == 1, "an engine in the process compiles as it means to"
    assert seen == [3]


def test_a_call_with_a_cache_runs_as_written() -> None:
    plain, model = family("mistral"), changed(family("mistral"), compile_block, full_checkpointing)
    before = recompilations()
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **settings), plain.generate(IDS, **settings))
    with torch.enable_grad():
        got = model(input_ids=IDS, use_cache=True)
    assert got.past_key_values.get_seq_length() == IDS.shape[1]
    got.logits.sum().backward()
    assert got.past_key_values.get_seq_length() == IDS.shape[1]
    assert recompilations() == before


# -- under FSDP2


@pytest.mark.parametrize(
    "changes", [(full_checkpointing,), pytest.param((compile_block, full_checkpointing), marks=pytest.mark.slow)]
)
def test_hooks_of_fully_shard_stay_outside(changes: tuple[Change, ...]) -> None:
    mesh = mesh_of_one()
    plain = lora.attach(family("qwen3_untied"), ADAPTERS)
    model = changed(copy.deepcopy(plain), *changes)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert len(blocks(model)) == 2
    expected, got = trained(plain), trained(model)
    got = (got[0], {name: grad.full_tensor() for name, grad in got[1].items()})
    assert_equal_runs(got, expected, 1e-6 if compile_block in changes else 0.0)


def test_a_compiled_part_may_be_compiled_again_more_often_than_torch_lets_it() -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=8):
        block_changes.CompiledPart(lambda x: x + 1)
        assert config.recompile_limit == block_changes.RECOMPILE_LIMIT > 8


def test_sizes_that_are_equal_by_chance_are_not_taken_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all sizes, though two were equal at the first call. Other code in the process has torch's way."""
    from torch.fx.experimental import _config as shapes

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.sum(0)[:, None] * b.sum(0)).sum()

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, dynamic, options: whole(f, dynamic=dynamic, backend="eager"))
    torch._dynamo.reset()
    made, before = block_changes.CompiledPart(product), block_changes.recompilations()
    for rows in (4, 6, 7):
        made(torch.ones(4, rows), torch.ones(rows + rows % 2, 4))
        assert shapes.use_duck_shape
    assert block_changes.recompilations().built == before.built + 1


def test_by_default_blocks_of_a_cpu_are_left_alone_and_those_without_a_place_refused() -> None:
    block = block_changes.blocks(family("qwen2_tied"))[0]
    compiled_on_cuda(block)
    assert "forward" not in vars(block)
    with pytest.raises(ValueError, match="got a block on the meta device, expected one with its weights in place"):
        compiled_on_cuda(block.to("meta"))


def test_the_samplers_steps_are_compiled_of_large_blocks_and_without_deterministic_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = family("qwen2_tied")
    weights = block_changes.largest_block(model)
    assert weights == sum(p.numel() for p in block_changes.blocks(model)[0].parameters()) > 0
    assert f"{weights:,} weights" in block_changes.small_block_reason(weights)
    for least, deterministic, expected in ((0, False, True), (0, True, False), (10**6, False, False)):
        monkeypatch.setattr(block_changes, "SMALL_BLOCK", least)
        assert block_changes.compiles_decoding(model, deterministic=deterministic) == expected
