"""vLLM's options draw what the package's own functions draw, and every row has a seed of its own."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo_fn.core import prng
from grpo_fn.core.sampling import categorical, greedy, gumbel_max, nucleus
from grpo_fn.shell.vllm.engine import (
    COMPILE_THREADS,
    NEUTRAL,
    RESERVED,
    SEEDS,
    check_extra,
    import_vllm,
    row_seeds,
    sampling_params,
)

temperatures = st.floats(0.01, 2.0)
uids = st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True)


@given(temperature=temperatures, top_k=st.integers(0, 99), top_p=st.floats(0.1, 1.0))
def test_a_function_of_ours_becomes_its_knobs_and_nothing_else(temperature: float, top_k: int, top_p: float) -> None:
    assert sampling_params(partial(partial(categorical), temperature=temperature), {}) == {"temperature": temperature}
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    assert sampling_params(partial(nucleus, **knobs), {}) == knobs
    assert sampling_params(greedy, {}) == {"temperature": 0.0}


def test_other_functions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"token_sampler: got fork_rng, expected sampling.greedy, .* vLLM draws itself"
    ):
        sampling_params(partial(torch.random.fork_rng, enabled=True), {})
    with pytest.raises(ValueError, match=r"token_sampler: got gumbel_max, expected sampling.greedy"):
        sampling_params(partial(gumbel_max, temperature=1.0), {})


@given(temperature=st.floats(0.0, 0.0099) | st.floats(2.001, 99.0))
def test_temperatures_that_vllm_changes_or_refuses_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature: got .*, expected one that vLLM draws at, 0.01 to 2"):
        sampling_params(partial(categorical, temperature=temperature), {})


BIASES = {
    **{"repetition_penalty": 1.1, "presence_penalty": -0.1, "frequency_penalty": 0.5, "min_p": 0.05, "top_p": 0.9},
    **{"top_k": 50, "logit_bias": {3: 1.0}, "bad_words": ["no"], "min_tokens": 4, "allowed_token_ids": [1, 2]},
    **{"structured_outputs": {"regex": "a"}, "no_field_of_today": 0},
}


@given(extra=st.dictionaries(st.sampled_from(sorted(BIASES)), st.none(), min_size=1))
def test_what_may_bias_is_refused_unless_the_config_accepts_it(extra: dict[str, Any]) -> None:
    extra = {name: BIASES[name] for name in extra}
    check_extra(extra, allow_biased=True)
    with pytest.raises(ValueError, match="may draw from another distribution") as refused:
        check_extra(extra, allow_biased=False)
    assert all(f"{name} = {value!r}" in str(refused.value) for name, value in extra.items())


def test_what_changes_nothing_is_accepted_and_what_the_sampler_sets_itself_is_not_for_others() -> None:
    check_extra({**NEUTRAL, "top_k": 0}, allow_biased=False)
    for name in RESERVED:
        with pytest.raises(ValueError, match=f"extra: got {name}, which the sampler sets itself"):
            check_extra({name: 1}, allow_biased=True)


def test_function_and_extra_fields_do_not_disagree() -> None:
    draw = partial(nucleus, temperature=1.0, top_k=0, top_p=0.9)
    assert sampling_params(draw, {"min_p": 0.1, "top_p": 0.9}) == {**sampling_params(draw, {}), "min_p": 0.1}
    with pytest.raises(ValueError, match=r"extra: got top_p = 0.5, expected as `token_sampler` has it, top_p = 0.9"):
        sampling_params(draw, {"top_p": 0.5})


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
