"""Matrix products divided over ranks compute what one process computes: scores, gradients, steps, weights, resumes."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import test_fsdp_ranks as ranks
import torch
from crew import crew
from fakes import _filled, _sizes
from hypothesis import given, settings
from test_fsdp import (
    PRODUCT,
    V,
    adamw_step,
    assert_same,
    climb,
    clipped,
    doubled,
    identical,
    plain,
    rollout,
    shuffled_parts,
)
from test_fsdp import tokens_and_mask as drawn
from test_fsdp_ranks import (
    ADAPTERS,
    STEP,
    TEMPERATURE,
    UNSHRUNK,
    Meshed,
    alike,
    gathered_grads,
    policy_of,
    share_of_rounding,
    spec_of,
    weights_of,
)
from test_fsdp_ranks import whole_model as on_one
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from grpo_fn.core.batch import count, tokens_of_group
from grpo_fn.core.types import Batch
from grpo_fn.shell.checkpoint import store
from grpo_fn.shell.checkpoint.async_saver import AsyncSaver
from grpo_fn.shell.model import blocks, hf, lora
from grpo_fn.shell.policy import mesh
from grpo_fn.shell.policy.fsdp import FSDPPolicy, FunctionalPolicy, full_tensor
from grpo_fn.shell.policy.load_and_shard import load_and_shard
from grpo_fn.shell.policy.optimizer import adamw
from grpo_fn.shell.world import World

pytestmark = pytest.mark.xdist_group("sharded")
EXAMPLES = settings.default.max_examples


def shaped(kind: type, **traits: Any) -> PretrainedConfig:
    """A tiny model of 4 heads over 2 of keys and values."""
    return kind(**{**_sizes(V), "num_attention_heads": 4, "num_key_value_heads": 2, **traits})


# Biases of all kinds, norms of every head, products whose outputs are gathered, embeddings tied and not.
MODELS = {
    "qwen2": shaped(Qwen2Config, tie_word_embeddings=True),
    "qwen3": shaped(Qwen3Config, head_dim=8, tie_word_embeddings=False),
    "llama": shaped(LlamaConfig, attention_bias=True, mlp_bias=True),
    "mistral": shaped(MistralConfig, sliding_window=4),
    "phi3": shaped(Phi3Config),
    "gemma2": shaped(Gemma2Config, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    "gemma3": shaped(
        Gemma3TextConfig, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
}
ATTENTION = {"gemma2": "eager"}  # the one that knows of its soft cap
# The share of the largest gradient that rounding may always be; gemma2's float32 oracle is itself 6e-6 off float64's.
ROUNDING = {**dict.fromkeys(MODELS, 1e-6), "gemma2": 1e-5, "gemma3": 3e-6}
LOGP = {**dict.fromkeys(MODELS, 5e-6), "gemma2": 1e-5}  # nats; up to 7.6e-6 of 4 was seen
ACTIVATIONS = {f.__name__: f for f in (blocks.no_checkpointing, blocks.full_checkpointing)}
LAYOUTS = {2: [1], 4: [1, 2]}  # ranks -> copies; two ranks share every product, what is left shares a copy


class Case(NamedTuple):
    """A model and how it is spread."""

    model: str
    replicate: int = 1
    activations: str = "no_checkpointing"
    adapted: bool = False
    tensor: int = 2
    offload: bool = False
    dropout: float = 0.0


def scale_of(case: Case) -> Meshed:
    return Meshed(
        dp_replicate=case.replicate,
        dp_shard="rest",
        tp=case.tensor,
        reshard_after_forward=True,
        offload=case.offload,
        offload_reference=case.offload,
        activation_checkpointing=ACTIVATIONS[case.activations],
        compile=blocks.eager,
        collective_timeout=60.0,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with a folder of every model."""
    made = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        _filled(AutoModelForCausalLM.from_config(config)).save_pretrained(made / name)
    return made


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    model, replicate = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(LAYOUTS[size]))
    activations = draw(st.sampled_from(sorted(ACTIVATIONS)))
    return Case(model, replicate, activations, draw(st.booleans()), offload=draw(st.booleans()))


# -- one process


def oracle(folders: Path, case: Case) -> FunctionalPolicy:
    model = on_one(str(folders / case.model), ATTENTION.get(case.model, "sdpa"), case.adapted)
    return FunctionalPolicy(model, temperature=TEMPERATURE)


@lru_cache(maxsize=256)
def batch_of(folders: Path, name: str, seed: int, rows: int) -> Batch:
    """Rows whose old and reference policies are near the model, as they are in training."""
    tokens, mask = drawn(seed, rows)
    logp = oracle(folders, Case(name)).vjp(plain(tokens, mask))[0].logp
    g = torch.Generator().manual_seed(seed + 1)
    near = [torch.where(mask, logp + 0.3 * torch.randn(mask.shape, generator=g), torch.nan) for _ in range(4)]
    adv = torch.randn(rows, 1, generator=g).expand(mask.shape)
    return Batch(
        tokens, mask, *near, adv, mask & (torch.rand(mask.shape, generator=g) < 0.3), tokens_of_group(mask, len(mask))
    )


class Seen(NamedTuple):
    """What there is to see of one step."""

    grads: dict[str, Tensor]
    norm: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logp: Tensor


class Expected(NamedTuple):
    """A step of one process, and how it was made."""

    step: Seen
    limit: float  # the norm that gradients are cut to: half of theirs, or twice
    eps: float  # of AdamW, as large as the largest gradient: rounding stays rounding
    share: float  # of the largest gradient by which ranks may be off


@lru_cache(maxsize=256)
def expected(folders: Path, model: str, adapted: bool, which: str, seed: int, rows: int) -> Expected:
    alone, batch = oracle(folders, Case(model, adapted=adapted)), batch_of(folders, model, seed, rows)
    climb(alone, [batch], PRODUCT[which], count(batch))
    before = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
    limit = (0.5 if seed % 2 else 2.0) * clipped(alone.grads, 1.0)[1]
    cut, norm = clipped(alone.grads, limit)
    eps = max(float(g.abs().max()) for g in alone.grads.values())
    wide = doubled(batch)
    share = share_of_rounding(alone, lambda policy: climb(policy, [wide], PRODUCT[which], count(wide)))
    alone.params, _ = adamw_step(alone.params, cut, {}, 1, **STEP, eps=eps)
    logp = alone.vjp(plain(batch.tokens, batch.mask))[0].logp
    step = Seen(alone.grads, norm, before, {**before, **alone.params}, logp)
    return Expected(step, limit, eps, max(ROUNDING[model], share))


# -- what ranks do


def built(world: World, folder: str, case: Case, *, reference: bool = False, limit: float = 1e9, eps: float = 1e-8):
    """The policy, put in place as `train` does it."""
    spec = replace(
        spec_of(folder, ranks.Case(case.model, "full_shard")),
        attention=ATTENTION.get(case.model, "sdpa"),
        adapters=replace(ADAPTERS, dropout=case.dropout) if case.adapted else None,
        parallelism=scale_of(case),
    )
    placed = load_and_shard(world, spec, reference=reference, teachers={})
    return policy_of(world, placed, optimizer=partial(adamw, **STEP, eps=eps), max_grad_norm=limit)


def one_step(
    world: World, folder: str, case: Case, micros: list[Batch], f: Callable, batch: Batch, limit: float, eps: float
) -> Seen:
    policy = built(world, folder, case, limit=limit, eps=eps)
    before = weights_of(policy)
    climb(policy, micros, f, count(batch))
    grads = gathered_grads(policy)
    norm = policy.update()["loss/grad_norm"]
    return Seen(grads, norm, before, weights_of(policy), policy.logp(rollout(batch.tokens, batch.mask)))


# -- the central test


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("size", list(LAYOUTS))
@settings(max_examples=max(2, EXAMPLES // 20), phases=UNSHRUNK)
@given(st.data())
def test_a_step_is_that_of_one_process(folders, size, data):
    case, which = data.draw(cases(size)), data.draw(st.sampled_from(sorted(PRODUCT)))
    seed, rows, parts = (data.draw(st.integers(*low_high)) for low_high in ((0, 5), (3, 9), (1, 3)))
    check_step(folders, size, case, which, seed, rows, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "adapted"),
    list(zip(MODELS, cycle([(2, 1), (4, 1), (4, 2)]), cycle([True, False]), strict=False)),
)
def test_a_step_of_every_family_is_that_of_one_process(folders, model, layout, adapted):
    size, replicate = layout
    case = Case(model, replicate, adapted=adapted)
    check_step(folders, size, case, next(iter(PRODUCT)), seed=1, rows=7, parts=3)


def check_step(folders: Path, size: int, case: Case, which: str, seed: int, rows: int, parts: int) -> None:
    right, limit, eps, share = expected(folders, case.model, case.adapted, which, seed, rows)
    batch = batch_of(folders, case.model, seed, rows)
    micros = shuffled_parts(batch, parts, seed) if parts > 1 else [batch]
    asked = (str(folders / case.model), case, micros, PRODUCT[which], batch, limit, eps)
    seen = alike(crew(size).run(one_step, *asked))
    assert_same(seen.grads, right.grads, share)
    assert seen.norm == pytest.approx(right.norm, rel=1e-5)
    assert seen.before.keys() == seen.after.keys() == right.after.keys()
    for name, x in right.after.items():
        assert torch.equal(seen.before[name], right.before[name]), name
        rounding = 2e-7 * float(x.abs().max())  # of a float32 weight
        torch.testing.assert_close(seen.after[name], x, rtol=0, atol=share * STEP["lr"] + rounding)
    torch.testing.assert_close(seen.logp, right.logp, rtol=0, atol=LOGP[case.model])


# -- what every rank holds


def shares(world: World, folder: str, case: Case) -> dict[str, float]:
    """Of every parameter that is divided the share that is on this rank."""
    named = built(world, folder, case).named_tensors()
    return {name: x.to_local().numel() / x.numel() for name, x in named.items() if isinstance(x, DTensor)}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("size", "replicate"), [(2, 1), (4, 2)])
def test_every_rank_holds_its_share(folders, size, replicate):
    held = crew(size).run(shares, str(folders / "llama"), Case("llama", replicate))[0]
    copies = size // 2 // replicate
    divided = mesh.check_tensor_plan(hf.meta_causal_lm(MODELS["llama"], attention="sdpa", dtype=torch.float32), 2)
    for name, share in held.items():
        module, _, kind = name.rpartition(".")
        halved = module in divided and (kind == "weight" or divided[module] == "colwise")
        assert share == 1 / copies / (2 if halved else 1), name
    assert len(divided) == 14
    assert all(f"{module}.weight" in held for module in divided)


@pytest.mark.slow
def test_dropout_is_the_same_on_ranks_that_share_a_row(folders):
    """Otherwise the adapters' whole parts would drift apart: every rank gathers its own."""
    model = "qwen3"
    case, batch = Case(model, adapted=True, dropout=0.5), batch_of(folders, model, 1, 5)
    asked = ([batch, batch], next(iter(PRODUCT.values())), batch, 1e9, 1e-3)
    noisy = alike(crew(2).run(one_step, str(folders / model), case, *asked))
    quiet = alike(crew(2).run(one_step, str(folders / model), case._replace(dropout=0.0), *asked))
    assert any(not torch.equal(noisy.grads[name], x) for name, x in quiet.grads.items())


# -- checkpoints


def saving(world: World, folder: str, case: Case, batch: Batch, root: Path) -> list[dict[str, Tensor]]:
    """Weights and moments after a step, which are saved, and the weights after one more."""
    policy = built(world, folder, case)
    climb(policy, [batch], next(iter(PRODUCT.values())), count(batch))
    policy.update()
    with AsyncSaver(root, world) as writer:
        writer.save(1, tensors=policy.tensors(), blobs={}, meta=policy.counters())
    return onward(policy, batch)


def resuming(world: World, folder: str, case: Case, batch: Batch, root: Path) -> list[dict[str, Tensor]]:
    policy = built(world, folder, case)
    path = root / "step_1"
    policy.restore(partial(store.load_into, path, world=world), store.meta(path))
    return onward(policy, batch)


def onward(policy: FSDPPolicy, batch: Batch) -> list[dict[str, Tensor]]:
    held = {name: full_tensor(x).clone() for name, x in policy.tensors().items()}
    climb(policy, [batch], next(iter(PRODUCT.values())), count(batch))
    policy.update()
    return [held, weights_of(policy)]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_a_checkpoint_goes_on_wherever_it_is_resumed(folders, tmp_path, adapted):
    case, batch = Case("qwen3", adapted=adapted), batch_of(folders, "qwen3", 1, 6)
    asked = (batch, tmp_path)
    held, after = alike(crew(4).run(saving, str(folders / "qwen3"), case, *asked))
    assert any(name.startswith("optimizer.") for name in held)
    others = [(4, case), (2, case._replace(tensor=1))] if adapted else [(4, case._replace(replicate=2)), (2, case)]
    for size, other in others:
        there, then = alike(crew(size).run(resuming, str(folders / "qwen3"), other, *asked))
        assert identical(there, held)
        for name, x in after.items():
            if other == case and size == 4:
                assert torch.equal(then[name], x), name
            torch.testing.assert_close(then[name], x, rtol=0, atol=3e-3 * STEP["lr"])


# -- what is refused


def empty(config: PretrainedConfig, adapters: lora.LoRA | None = None):
    model = hf.meta_causal_lm(config, attention="eager", dtype=torch.float32)
    return model if adapters is None else lora.attach(model, adapters)


REFUSED = {
    "no plan": (GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=V), 2, "have no tensor-parallel plan"),
    "experts": (shaped(Qwen2MoeConfig, num_experts=2, moe_intermediate_size=8), 2, "expected styles among colwise"),
    "KV heads": (
        shaped(Qwen2Config, num_key_value_heads=1),
        2,
        "k_proj .colwise. with 1 heads, expected a multiple of 2",
    ),
    "features": (shaped(LlamaConfig, intermediate_size=25), 2, "gate_proj .colwise. with 25 features"),
    "forgotten": (shaped(PhiConfig, qk_layernorm=True), 2, "k_layernorm.* beside divided layers"),
}


@pytest.mark.parametrize(("config", "ranks", "said"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_model_that_ranks_cannot_divide_is_refused(config, ranks, said):
    model = empty(config)
    with pytest.raises(ValueError, match=f"scale: got tensor {ranks} .*{said}"):
        mesh.check_tensor_plan(model, ranks)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize(
    ("entry", "style", "said"),
    [
        ("model.layers.*.self_attn.q_proj", "diagonal", "q_proj .diagonal. in the plan of Qwen3ForCausalLM"),
        ("model.layers.*.self_attn", "rowwise", "that is a Qwen3Attention"),
        ("model.layers.*.self_attn.q_proj.weight", "colwise", "that is a parameter"),
        ("model.layers.*.input_layernorm", "replicated_with_grad_allreduce", "of shapes .*16.* expected one head's"),
        ("model.layers.*.self_attn.q_norm", None, "q_norm.weight beside divided layers"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused(entry, style, said):
    model = empty(MODELS["qwen3"])
    model._tp_plan = {**model.tp_plan, entry: style}
    with pytest.raises(ValueError, match=said):
        mesh.check_tensor_plan(model, 2)


@pytest.mark.parametrize("model", list(MODELS))
def test_embedding_and_head_and_what_is_outside_the_blocks_is_in_no_plan(model):
    plan = mesh.check_tensor_plan(empty(MODELS[model], ADAPTERS), 2)
    assert plan
    assert all(name.startswith("model.layers.") for name in plan)
    assert {name.split(".")[2] for name in plan} == {"0", "1"}
