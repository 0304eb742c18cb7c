"""The split-KV kernel in Triton's interpreter, on the CPU, against the matrix products that it takes the place of."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from fakes import VOCABULARY
from families import FAMILIES
from hypothesis import example, given, settings
from test_continuous_batching import CPU, ending
from torch import Tensor, nn

from grpo_fn.shell.model.attention import AttentionSpec
from grpo_fn.shell.sampler.local import cuda_steps
from grpo_fn.shell.sampler.local.decode_step import (
    DecodeAttention,
    KVCache,
    attend,
    decoding_difference,
    group_rows,
)

EXAMPLES = settings.default.max_examples
COSTLY = settings(max_examples=max(6, EXAMPLES // 3))  # the interpreter takes a tenth of a second a launch


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """The module with the kernel, made for Triton's interpreter (`tests/conftest.py` sees to that)."""
    pytest.importorskip("triton", reason="Triton is not installed: no kernel of it can be tried")
    importlib.import_module("interpreted_triton").patch_scalars()
    made = importlib.import_module("grpo_fn.shell.sampler.local.split_kv_triton")
    if not made.INTERPRETED:
        pytest.skip("Triton was imported for a card before, not for its interpreter: tools/device_check tries it there")
    return made


class Step(NamedTuple):
    """What a decoding step looks at."""

    lengths: list[int]  # of the prompts
    rows: list[tuple[int, int] | None]  # of each slot: which prompt it reads, and what it has drawn; no row
    heads: int  # of keys
    grouped: int
    size: int
    values: int
    cap: float | None
    window: int | None
    dtype: torch.dtype
    spare: int  # columns that no row has reached


@st.composite
def steps(draw) -> Step:
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    row = st.tuples(st.integers(0, len(lengths) - 1), st.integers(0, 70))
    rows = draw(st.lists(row | st.none(), min_size=1, max_size=6).filter(any))
    sizes = [draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.sampled_from([4, 8, 20, 64])), 8]
    sizes[3] = draw(st.sampled_from([sizes[2], 12]))
    cap, window = draw(st.none() | st.floats(0.5, 30.0)), draw(st.none() | st.integers(1, 100))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Step(lengths, rows, *sizes, cap, window, dtype, draw(st.integers(0, 40)))


def attended(step: Step, split_kv: Callable[..., Tensor] | None, *, wide: bool = False) -> Tensor:
    """`[n H E]` of one step of random numbers; zero for a slot without a row, of which nothing is asked.

    With `wide` the numbers, rounded to the step's dtype, are computed with in float32.
    """
    g = torch.Generator().manual_seed(len(step.rows))
    there = torch.tensor([row is not None for row in step.rows])
    home, drawn = (torch.tensor([(row or (0, 0))[i] for row in step.rows]) for i in (0, 1))
    prompts = KVCache(len(step.lengths), max(step.lengths))
    own = KVCache(len(step.rows), int(drawn.max()) + 1 + step.spare)

    def random(*shape: int) -> Tensor:
        found = torch.randn(*shape, generator=g).to(step.dtype)
        return found.float() if wide else found

    key, value = (random(len(step.rows), step.heads, 1, size) for size in (step.size, step.values))
    for slots in (prompts, own):
        for x in slots.of(0, key, value):
            x.copy_(random(*x.shape))  # what a row does not see is there, and must not count
    start = torch.tensor(step.lengths)[home] * there
    grouped = group_rows(home, there, len(step.lengths), max(1, int(torch.bincount(home[there]).max())))
    sizes = {"prompt_columns": prompts.columns, "columns": own.columns}
    context = DecodeAttention(prompts, own, grouped, start, start + drawn, **sizes, attend_fn=attend, split_kv=split_kv)
    module, spec = nn.Module(), AttentionSpec(step.window, step.size**-0.5, 0.0, step.cap, "sdpa")
    module.layer_idx = 0
    query = random(len(step.rows), step.heads * step.grouped, 1, step.size)
    with torch.no_grad():
        found = context.attend(module, query, key, value, spec)[:, 0]
    assert bool(found.isfinite().all())  # of slots without a row, too: tokens are drawn from what follows
    return found.where(there[:, None, None], 0.0)


# The result, up to 4 or so, is rounded once, and each weight once, by up to half of 2^-7 or 2^-10 of it.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2 * 4 * 2**-8, torch.float16: 2 * 4 * 2**-11}
LONG = [  # several parts; a window over several, capped; several tiles of queries; a slot without a row is the first
    Step([600, 3], [(0, 520), (0, 0), None, (1, 1030)], 1, 2, 8, 8, None, None, torch.float32, 0),
    Step([600], [(0, 1100), (0, 0)], 1, 2, 8, 8, 2.0, 530, torch.float32, 7),
    Step([5, 9], [(1, 2)] * 22, 1, 6, 16, 16, None, None, torch.bfloat16, 0),
    Step([5, 9], [None, (1, 2), (0, 7)], 2, 3, 8, 8, None, 4, torch.float32, 3),
]


@pytest.mark.slow
@COSTLY
@given(steps())
@example(LONG[0])
@example(LONG[1])
@example(LONG[2])
@example(LONG[3])
def test_the_kernel_is_the_matrix_products(kernel: ModuleType, step: Step) -> None:
    expected, got = attended(step, None, wide=True), attended(step, kernel.split_kv_launch)
    assert got.dtype is step.dtype
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=BOUND[step.dtype])


@pytest.mark.parametrize("step", [LONG[0], pytest.param(LONG[1], marks=pytest.mark.slow)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kernel: ModuleType, step: Step) -> None:
    columns = max(row[1] for row in step.rows if row) + step.spare
    together = attended(step, kernel.split_kv_launch)
    for b, row in list(enumerate(step.rows))[:4]:
        if row is not None:
            rows = [row if i == b else None for i in range(len(step.rows))]
            alone = attended(step._replace(rows=rows, spare=columns - row[1]), kernel.split_kv_launch)
            assert torch.equal(alone[b], together[b])


# -- in a model's steps


@pytest.mark.parametrize("name", ["gemma2_capped", pytest.param("qwen3_untied", marks=pytest.mark.slow)])
def test_a_models_steps_with_the_kernel_are_those_of_whole_rows(kernel: ModuleType, name: str) -> None:
    module = ending(name)
    with torch.no_grad():
        assert decoding_difference(module, CPU, kernel.split_kv_launch) is None
    assert cuda_steps.split_kv_uncovered_reason(module) is None


# -- where it is not used


def on_a_card(monkeypatch: pytest.MonkeyPatch, operator: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """What is chosen where the kernel could be had, and this is what it does."""
    monkeypatch.setattr(cuda_steps, "split_kv_unsupported_reason", lambda device: None)
    monkeypatch.setattr(cuda_steps, "split_kv_attention", operator)
    module = ending("qwen3_untied")
    return cuda_steps.choose_split_kv(module)


def test_a_kernel_that_is_wrong_on_this_card_is_not_used(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Tensor | float | None) -> Tensor:
        return kernel.split_kv_launch(*given) * 1.01

    assert on_a_card(monkeypatch, kernel.split_kv_launch) is kernel.split_kv_launch
    with pytest.warns(RuntimeWarning, match=r"in plain products, not in the split-KV kernel: its logits are .* apart"):
        assert on_a_card(monkeypatch, wrong) is None


def test_a_kernel_that_fails_on_this_card_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Tensor | float | None) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nmore")

    with pytest.warns(RuntimeWarning, match="kernel: RuntimeError, out of resource: shared memory$"):
        assert on_a_card(monkeypatch, fails) is None


def test_why_it_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is cpu" in cuda_steps.split_kv_unsupported_reason(CPU)
    card, capability = torch.device("cuda", 0), [(7, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert "7.0 of the card, expected 8.0" in cuda_steps.split_kv_unsupported_reason(card)
    capability[0] = (9, 0)

    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(cuda_steps, "import_module", absent)
    cuda_steps.kernel_import_problem.cache_clear()
    try:
        assert cuda_steps.split_kv_unsupported_reason(card) == "ModuleNotFoundError, No module named 'triton'"
    finally:
        cuda_steps.kernel_import_problem.cache_clear()


def test_models_that_the_kernel_does_not_cover_are_named() -> None:
    module = FAMILIES["qwen3_untied"](VOCABULARY)
    assert cuda_steps.split_kv_uncovered_reason(module) is None
    module.config.num_attention_heads, module.config.num_key_value_heads = 130, 2
    assert cuda_steps.split_kv_uncovered_reason(module).startswith("got 65 query heads to a head of keys, expected")
    module.config.head_dim = 512
    assert cuda_steps.split_kv_uncovered_reason(module).startswith("got heads of 512, expected at most 256")
    assert "float64" in cuda_steps.split_kv_uncovered_reason(module.double())


# -- code for cards


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), [(80, "fp32"), (90, "bf16")])
def test_the_kernel_compiles_for_an_absent_card(architecture: int, dtype: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: no kernel of it can be compiled")
    program = Path(__file__).with_name("compiled_kernels.py")
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(program), str(architecture), dtype]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert ran.returncode == 0, ran.stderr
    shared = json.loads(ran.stdout.splitlines()[-1])
    assert len(shared) >= 3
    assert 0 < max(shared.values()) <= {80: 163, 90: 227}[architecture] * 2**10  # bytes that a program may have
