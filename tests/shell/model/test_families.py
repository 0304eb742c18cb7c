"""Every published family is sampled and trained as plain transformers computes it, or refused in one line."""

import warnings
from pathlib import Path

import pytest
import torch
from fakes import VOCABULARY
from families import PUBLISHED, published
from family_table import made_up_rows, measure, row

from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.sampler.local.decode_step import decoding_unsupported_reason
from grpo_fn.shell.sampler.local.hf_cache_decode import SLIGHT, check_decoding

CPU = torch.device("cpu")
PAGE = (Path(__file__).parents[3] / "docs" / "running" / "families.md").read_text()
CLOSE = 5e-5  # nats, and of all gradients: float32 against float64. Most is lost by delta rules in chunks: 2e-5


def quick_first(*quick: str) -> list[str]:
    """All families; those behind the quick ones are for the slow tests."""
    return [*quick, *(name for name in PUBLISHED if name not in quick)]


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", quick_first("qwen3_5_text", "qwen3_moe", "gpt_oss", "gemma3_text", "lfm2"))
def test_log_probs_and_gradients_of_a_family_are_those_of_plain_transformers(name: str) -> None:
    x = measure(name)
    assert row(name, x) in PAGE, "run python tools/tables docs/running/families.md"
    assert x.trainer_error < CLOSE
    assert x.gradient_error < CLOSE
    assert x.sampler_error < (SLIGHT if name == "nemotron_h" else CLOSE) or x.sampled == "refused"


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", quick_first("deepseek_v32", "falcon", "gemma2", "afmoe", "qwen3_5_text"))
def test_a_model_computes_what_it_did_before_it_was_tried(name: str) -> None:
    plain, model, rows = published(name, VOCABULARY), published(name, VOCABULARY), made_up_rows()
    padding = (torch.arange(60) >= torch.tensor([0, 2, 37] * 4)[:, None]).long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # which say how it is decoded and trained
        decoding_unsupported_reason(model, CPU)
        LogprobModel(model, temperature=0.7, logits_chunk_elements=10**5)(rows.tokens, rows.mask)
    assert model.config.to_json_string() == plain.config.to_json_string()
    assert model.config._attn_implementation == plain.config._attn_implementation
    for kwargs in ({}, {"attention_mask": padding}):
        logits = [m(input_ids=rows.tokens, use_cache=False, **kwargs).logits for m in (plain, model)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["xlstm", "recurrent_gemma", "deepseek_v4"])
def test_a_model_that_keeps_states_in_ways_of_its_own_is_refused_before_it_samples(name: str) -> None:
    model = published(name, VOCABULARY)
    with pytest.raises(ValueError, match=rf"^{type(model).__name__}: got .* cache \(.*\), expected .*families\.md"):
        check_decoding(model, CPU)
