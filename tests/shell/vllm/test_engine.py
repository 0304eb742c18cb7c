"""vLLM's options draw what the package's own functions draw, and every row has its own seed."""

import os
import sys
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.core import prng
from grpo_fn.core.sampling import categorical, greedy, gumbel_max, nucleus
from grpo_fn.shell.vllm.engine import (
    COMPILE_THREADS,
    SEEDS,
    import_vllm,
    row_seeds,
    sampling_params,
)

temperatures = st.floats(0.01, 2.0)
uids = st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True)


@given(temperature=temperatures, top_k=st.integers(0, 99), top_p=st.floats(0.1, 1.0))
def test_a_function_of_ours_becomes_its_knobs_and_nothing_else(temperature: float, top_k: int, top_p: float) -> None:
    assert sampling_params(partial(partial(categorical), temperature=temperature)) == {"temperature": temperature}
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert sampling_params(partial(nucleus, **knobs)) == knobs
    assert sampling_params(greedy) == {"temperature": 0.0}


def test_other_functions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"token_sampler: got fork_rng, expected sampling.greedy, .* vLLM draws itself"
    ):
        sampling_params(partial(torch.random.fork_rng, enabled=True))
    with pytest.raises(ValueError, match=r"token_sampler: got gumbel_max, expected sampling.greedy"):
        sampling_params(partial(gumbel_max, temperature=1.0))


@given(temperature=st.floats(0.0, 0.0099) | st.floats(2.001, 99.0))
def test_temperatures_that_vllm_changes_or_refuses_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature: got .*, expected one that vLLM draws at, 0.01 to 2"):
        sampling_params(partial(categorical, temperature=temperature))


@given(seed=st.integers(0, 2**64 - 1), uids=uids, group_size=st.integers(1, 5))
def test_a_rows_seed_is_that_of_its_own_key(seed: int, uids: list[int], group_size: int) -> None:
    key = prng.key(seed, device="cpu")
    seeds = row_seeds(key, uids, group_size)
    assert [len(of_each) for of_each in seeds] == [group_size] * len(uids)
    for uid, of_each in zip(uids, seeds, strict=True):
        assert row_seeds(key, [uid], group_size) == [of_each]
        assert row_seeds(key, [uid], group_size + 2)[0][:group_size] == of_each
        for g, one in enumerate(of_each):
            assert one == int(prng.randint(prng.fold_in(key, uid, g), low=0, high=SEEDS))
            assert 0 <= one < 2**31


@pytest.mark.parametrize("before", [None, "5"])
def test_the_trainers_compile_threads_are_what_they_were_before_vllm(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"import os\nos.environ[{COMPILE_THREADS!r}] = '1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")  # which it sets, put back afterwards
    monkeypatch.delenv(COMPILE_THREADS, raising=False)
    if before is not None:
        monkeypatch.setenv(COMPILE_THREADS, before)
    assert import_vllm("sampler").__file__ == str(tmp_path / "vllm" / "__init__.py")
    assert os.environ.get(COMPILE_THREADS) == before
    monkeypatch.delitem(sys.modules, "vllm")
