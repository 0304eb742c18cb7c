"""Rows end to end, a prompt read once or in every row, are scored and pulled back as padded rows are."""

import sys
from contextlib import nullcontext
from copy import deepcopy
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from test_fsdp import V, assert_same
from torch import Tensor, nn

from grpo_fn.core import prng
from grpo_fn.shell.model import attention, blocks, lora
from grpo_fn.shell.model.attention import (
    AttentionSpec,
    PackedAttention,
)
from grpo_fn.shell.model.logprob_model import LogprobModel

FLOAT32 = torch.finfo(torch.float32)
EXAMPLES = settings.default.max_examples
WAYS = {"padded": False, "packed": True}
ADAPTERS = lora.LoRA(rank=2, alpha=4.0, dropout=0.0, targets="all-linear")


# -- rows


class Drawn(NamedTuple):
    """A micro-batch; `prompts` says which rows were given the same prompt."""

    tokens: Tensor
    mask: Tensor
    prompts: list[int]


@st.composite
def drawn(draw: Any) -> Drawn:
    """Groups of any size in any order, prompts and completions of any length, holes, rows that are masked out whole."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    prompts = draw(st.permutations([p for p, n in enumerate(sizes) for _ in range(n)]))
    lengths = [draw(st.integers(1, 7)) for _ in sizes]
    completions = [draw(st.integers(0, 9)) for _ in prompts]
    width = max(lengths[p] + n for p, n in zip(prompts, completions, strict=True)) + draw(st.integers(0, 3))
    return made(prompts, lengths, completions, width, seed=draw(st.integers(0, 999)), holes=draw(st.booleans()))


def made(
    prompts: list[int], lengths: list[int], completions: list[int], width: int, *, seed: int, holes: bool
) -> Drawn:
    g = torch.Generator().manual_seed(seed)
    start, column = torch.tensor([lengths[p] for p in prompts])[:, None], torch.arange(width)
    texts = torch.randint(0, V, (len(lengths), width), generator=g)[prompts]
    tokens = torch.where(column < start, texts, torch.randint(0, V, texts.shape, generator=g))
    mask = (column >= start) & (column < start + torch.tensor(completions)[:, None])
    if holes:
        mask &= torch.rand(mask.shape, generator=g) < 0.7
    return Drawn(tokens, mask, list(prompts))


GROUPS = made([0, 0, 1, 0, 2, 2, 1], [5, 1, 3], [4, 9, 3, 6, 1, 8, 2], 16, seed=3, holes=False)


# -- what a scorer makes of them


def logprob_model(model: nn.Module, packed: bool, temperature: float = 0.7) -> LogprobModel:
    return LogprobModel(model, temperature=temperature, logits_chunk_elements=5 * V, packed=packed)


class Found(NamedTuple):
    logp: Tensor
    entropy: Tensor
    grads: dict[str, Tensor]


def found(scoring: LogprobModel, tokens: Tensor, mask: Tensor, seed: int = 0) -> Found:
    """Scores, and what random signals for both pull back."""
    scoring.zero_grad()
    logp, entropy = scoring(tokens, mask)
    g = torch.Generator().manual_seed(seed)
    signal = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in (logp, entropy)]
    torch.autograd.backward([logp, entropy], signal)
    grads = {n: p.grad.clone() for n, p in scoring.model.named_parameters() if p.requires_grad}
    return Found(logp.detach(), entropy.detach(), grads)


@lru_cache(maxsize=64)
def family(name: str, way: str, dtype: torch.dtype) -> LogprobModel:
    return logprob_model(FAMILIES[name](V).to(dtype), WAYS[way])


def assert_alike(got: Found, expected: Found, tolerance: float) -> None:
    """To `tolerance` of the largest entry: of each score, and of all gradients together."""
    for x, y in zip(got[:2], expected[:2], strict=True):
        assert float((x - y).abs().max()) <= tolerance * max(1.0, float(y.abs().max()))
    if any(bool(x.any()) for x in expected.grads.values()):
        assert_same(got.grads, expected.grads, tolerance)
    else:
        assert not any(bool(x.any()) for x in got.grads.values())


def rounding(single: Found, double: Found) -> float:
    """How far float32 is from float64 with padded rows, of the largest gradient."""
    largest = max(float(x.abs().max()) for x in double.grads.values())
    apart = max(float((single.grads[n] - x).abs().max()) for n, x in double.grads.items())
    return apart / largest if largest else 0.0


# -- the central property


@settings(max_examples=max(15, EXAMPLES))
@given(st.sampled_from(sorted(FAMILIES)), drawn())
def test_scores_and_gradients_are_those_of_padded_rows(name, some):
    # Both layouts round, each its own way: float32 is held against float64, not against the other's rounding. (In 1,300
    # draws the largest error of packed rows was 1.5e-6; what float64 says to the last digits is the next test.)
    expected = found(family(name, "padded", torch.float64), *some[:2])
    padded = rounding(found(family(name, "padded", torch.float32), *some[:2]), expected)
    assert_alike(found(family(name, "packed", torch.float32), *some[:2]), expected, 16 * FLOAT32.eps + padded)
    assert family(name, "packed", torch.float32).packs


class Norm(nn.Module):
    """A root-mean-square norm that stays in the dtype it is given, as the models' own do not."""

    def __init__(self, weight: Tensor, plus: float) -> None:
        super().__init__()
        self.weight, self.plus = weight, plus

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (self.weight + self.plus)


def precise(model: nn.Module) -> nn.Module:
    """In float64, norms included."""
    plus = float("gemma" in type(model).__name__.lower())
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Norm(module.weight, plus))
    return model.double()


@lru_cache(maxsize=64)
def precise_family(name: str, way: str) -> LogprobModel:
    return logprob_model(precise(FAMILIES[name](V)), WAYS[way])


# Gemma's softmax and soft cap are computed in float32 by its own eager attention.
@settings(max_examples=max(10, EXAMPLES // 2))
@given(st.sampled_from(sorted(FAMILIES.keys() - {"gemma2_capped"})), drawn())
def test_packed_rows_agree_to_the_last_digits_of_a_float64_model(name, some):
    expected, got = (found(precise_family(name, which), *some[:2]) for which in WAYS)
    assert_alike(got, expected, 1e-13)


@settings(max_examples=max(5, EXAMPLES // 5))
@given(drawn(), st.sampled_from(sorted(FAMILIES)))
def test_tokens_behind_the_last_sampled_one_change_nothing(some, name):
    tokens, mask, _ = some
    last = (torch.arange(tokens.shape[1]) * mask).amax(-1, keepdim=True)
    garbage = torch.where(torch.arange(tokens.shape[1]) > last, -(2**40), tokens)  # no token at all
    tried = family(name, "packed", torch.float32)
    if mask.any():
        mended = torch.where(mask.any(-1, keepdim=True), garbage, tokens)
        got, expected = found(tried, mended, mask), found(tried, tokens, mask)
        assert torch.equal(got.logp, expected.logp)
        assert torch.equal(got.entropy, expected.entropy)
        assert all(torch.equal(got.grads[n], x) for n, x in expected.grads.items())


@settings(max_examples=max(5, EXAMPLES // 5))
@given(drawn(), st.data())
def test_a_broken_prompt_breaks_its_own_rows_alone(some, data):
    tokens, mask, prompts = some
    odd = data.draw(st.sampled_from(prompts))
    mine = torch.tensor([p == odd for p in prompts])
    tokens = torch.where((tokens == 0) & ~mine[:, None], 1, tokens)
    tokens[mine, 0] = 0
    sound, broken = (logprob_model(FAMILIES["qwen3_untied"](V), True) for _ in range(2))
    broken.packs = True  # asked of a broken model, it would be found unfit
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[0] = torch.nan
        got, expected = (scoring(tokens, mask)[0] for scoring in (broken, sound))
    assert got[mine][mask[mine]].isnan().all()
    torch.testing.assert_close(got[~mine], expected[~mine], rtol=0, atol=1e-5)


# -- what is read


@given(drawn())
def test_the_stream_is_every_prompt_once_and_every_completion_but_its_last_token(some):
    tokens, mask, _ = some
    rows = [b for b in range(len(mask)) if mask[b].any()]
    start, last = mask.int().argmax(-1).tolist(), (torch.arange(mask.shape[1]) * mask).amax(-1).tolist()
    begun = {tuple(tokens[b, : start[b]].tolist()) for b in rows}
    stream = attention.end_to_end(tokens, mask)
    assert stream.tokens.shape == (1, max(1, sum(map(len, begun)) + sum(last[b] - start[b] for b in rows)))
    for b in rows:
        at = stream.at[b, : last[b]]
        assert torch.equal(stream.tokens[0, at], tokens[b, : len(at)])
        assert torch.equal(stream.model_kwargs["position_ids"][0, at], torch.arange(len(at)))


@given(drawn(), st.sampled_from([None, 1, 3, 100]))
def test_every_query_of_the_stream_is_in_one_bucket_and_sees_its_row_up_to_itself(some, window):
    layout: PackedAttention = attention.end_to_end(*some[:2]).model_kwargs["layout"]
    sights: dict[int, set[int]] = {}
    for number, one in enumerate(layout.buckets):
        mask = layout.mask(number, window, torch.float32)
        if mask is None:
            mask = torch.full((one.query.shape[1],) * 2, -torch.inf).triu(1).expand(len(one.query), 1, -1, -1)
        assert (mask == 0).any(-1).all()
        for b, q in one.real.nonzero().tolist():
            sights[int(one.query[b, q])] = {int(k) for k, x in zip(one.key[b], mask[b, 0, q], strict=True) if x == 0}
    n = int((layout.spans.end - layout.spans.start).sum())
    assert sorted(sights) == list(range(n))
    assert sum(int(one.real.sum()) for one in layout.buckets) == n
    for b, t in product(range(len(layout.spans.end)), range(layout.at.shape[1])):
        if layout.spans.start[b] <= t < layout.spans.end[b]:
            first = 0 if window is None else max(0, t + 1 - window)
            assert sights[int(layout.at[b, t])] == {*layout.at[b, first : t + 1].tolist()}
    stream = torch.arange(n)[:, None, None].float()
    assert torch.equal(layout.stream_order([stream[one.query] for one in layout.buckets]), stream)


# -- what is done to blocks, and beside them


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_capped"])
def test_recomputed_blocks_and_adapters_make_no_difference(name):
    model = FAMILIES[name](V)
    lora.reset(lora.attach(model, ADAPTERS), key=prng.key(1, device="cpu"), device=torch.device("cpu"))
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith(lora.B):  # zero in the beginning: no gradient would reach A
                p.copy_(0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))))
    expected, plain = (found(logprob_model(deepcopy(model), way), *GROUPS[:2]) for way in (False, True))
    for block in blocks.blocks(model):
        blocks.full_checkpointing(block)
    tried = logprob_model(model, True)
    got = found(tried, *GROUPS[:2])
    assert tried.packs
    assert_alike(got, expected, 2e-6)
    assert_alike(got, plain, 0.0)


COMPILE = partial(blocks.torch_compile, mode="default")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(COMPILE,), (COMPILE, blocks.full_checkpointing)])
def test_compiled_blocks_compute_the_same_and_rows_of_other_lengths_are_not_compiled_anew(changes):
    torch.compiler.reset()
    plain, model = family("qwen2_tied", "padded", torch.float32), FAMILIES["qwen2_tied"](V)
    for block, change in product(blocks.blocks(model), changes):
        change(block)
    tried, built = logprob_model(model, True), []
    for seed in range(5):
        some = made(
            [0, 0, 1, 1][: 3 + seed % 2], [3 + seed, 4], [5, 6 + seed, 7, 2][: 3 + seed % 2], 16, seed=seed, holes=False
        )
        assert_alike(found(tried, *some[:2]), found(plain, *some[:2]), 2e-6)
        built.append(blocks.recompilations().built)
    assert tried.packs
    assert built[0] == built[-1], "the first micro-batch, and the questions before it, compile all there is"


# -- models that are not fit for it


def neighbourly() -> nn.Module:
    """Every token gets a little of the one before it, as convolutions and recurrences mix them."""
    model = FAMILIES["qwen2_tied"](V)
    model.model.layers[0].register_forward_hook(lambda module, args, out: out + 0.1 * out.roll(1, 1))
    return model


def silent() -> nn.Module:
    """Attention that does not say how far it sees."""
    model = FAMILIES["gemma3_tied"](V)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    return model


def dropping_layout() -> nn.Module:
    """A block that does not hand on the layout."""
    model = FAMILIES["qwen3_untied"](V)
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = partial(lambda forward, *args, layout=None, **kwargs: forward(*args, **kwargs), forward)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [(neighbourly, "apart"), (silent, "ask for"), (dropping_layout, "Error")],
)
def test_a_model_that_is_not_fit_is_said_to_be_so_and_shown_padded_rows(make, why):
    tried, plain = logprob_model(make(), True), logprob_model(make(), False)
    plain.load_state_dict(tried.state_dict())
    with pytest.warns(RuntimeWarning, match=f"padded rows, not on packed ones: .*{why}"):
        got = found(tried, *GROUPS[:2])
    assert tried.packs is False
    assert_alike(got, found(plain, *GROUPS[:2]), 1e-7)


# -- kernels for rows of unequal length, which are for CUDA: here, what they are documented to compute stands in


def loop(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, *longest: int, scale: float, window: tuple[int, int]
) -> Tensor:
    """Row by row; the last query of a row sees its last key, and each one before it a key less."""
    assert longest == tuple(int(x.diff().max()) for x in (queries, keys))
    assert queries.dtype == keys.dtype == torch.int32
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = []
    for a, b, c, d in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * scale
        behind = torch.arange(d - c)[None] - torch.arange(b - a)[:, None] - ((d - c) - (b - a))
        unseen = behind > window[1]
        if window[0] >= 0:
            unseen |= behind < -window[0]
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v[c:d]))
    return torch.cat(out)


def as_torch_has_it(q, k, v, *rest, scale, window_size, enable_gqa=False):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return loop(q, k, v, *rest, scale=scale, window=window_size)


def as_torch_2_11_has_it(q, k, v, *rest, scale, window_size):
    """It compares no heads: its kernel takes fewer of keys than of queries."""
    return loop(q, k, v, *rest, scale=scale, window=window_size)


def as_flash_has_it(q, k, v, *rest, dropout_p, softmax_scale, causal, window_size, softcap, deterministic):
    assert (dropout_p, causal, softcap) == (0.0, True, 0.0)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    return loop(q, k, v, *rest, scale=softmax_scale, window=window_size)


def as_flash_3_has_it(q, k, v, *rest, **how):
    """FlashAttention-3 takes no dropout."""
    return as_flash_has_it(q, k, v, *rest, dropout_p=0.0, **how)


@pytest.mark.parametrize(
    ("kernel", "of_torch"),
    [
        *(("varlen", as_torch_has_it), ("varlen", as_torch_2_11_has_it)),
        *(("flash_attention", as_torch_has_it), ("flash_attention_3", as_torch_has_it)),
    ],
)
@settings(max_examples=max(5, EXAMPLES // 5))
@given(drawn(), st.sampled_from([None, 1, 2, 5]), st.sampled_from([1, 2]))
def test_kernels_for_unequal_rows_get_the_same_rows(kernel, of_torch, some, window, heads):
    layout: PackedAttention = attention.end_to_end(*some[:2]).model_kwargs["layout"]
    n, g = int((layout.spans.end - layout.spans.start).sum()), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=g, dtype=torch.float64) for h in (2, heads, heads))
    how = AttentionSpec(window, scale=0.3, dropout=0.0, cap=None, backend="sdpa")
    cores = (attention.sdpa_attention, attention.eager_attention)
    expected, eager = (attention.bucketed_attention(q, k, v, layout, how, core=core) for core in cores)
    torch.testing.assert_close(eager, expected, rtol=0, atol=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch)
        patch.setattr(attention, "flash_varlen_function", lambda: as_flash_has_it)
        third = SimpleNamespace(flash_attn_varlen_func=as_flash_3_has_it)
        patch.setitem(sys.modules, "flash_attn_interface", third)
        attention.has_gqa_flag.cache_clear()
        got = getattr(attention, kernel)(q, k, v, layout, how)
    attention.has_gqa_flag.cache_clear()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@settings(max_examples=max(5, EXAMPLES // 5))
@given(drawn())
def test_keys_and_values_are_gathered_at_once_and_pulled_back_to_those_that_were_read(some):
    """As two gathers are, whose pullbacks add up what each token gets from all that read it."""
    layout: PackedAttention = attention.end_to_end(*some[:2]).model_kwargs["layout"]
    n, g = int((layout.spans.end - layout.spans.start).sum()), torch.Generator().manual_seed(0)
    made = partial(torch.randn, generator=g, dtype=torch.float64)
    apart, together = ([x.clone().requires_grad_() for x in found] for found in [(made(n, 2, 8), made(n, 2, 4))] * 2)
    expected = [attention.gather_tokens(x, layout.ragged_rows.key) for x in apart]
    got = attention.gather_keys_and_values(*together, layout)
    slopes = [made(x.shape) for x in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride(-1) == 1, "what the kernels ask for"
    torch.autograd.backward(expected, slopes)
    torch.autograd.backward(got, slopes)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_a_flash_attn_without_the_function_for_unequal_rows_is_left_out(monkeypatch):
    """flash-attn 4 installs `flash_attn.cute` in a package that has nothing else."""
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    for package, expected in ((SimpleNamespace(flash_attn_varlen_func=print), print), (SimpleNamespace(), None)):
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        attention.flash_varlen_function.cache_clear()
        warned = pytest.warns(RuntimeWarning, match="runs on torch's kernels, without flash-attn: ImportError")
        with nullcontext() if expected else warned:
            assert attention.flash_varlen_function() is expected
    attention.flash_varlen_function.cache_clear()
