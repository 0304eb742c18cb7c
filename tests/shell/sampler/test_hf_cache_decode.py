"""How a model's cache is handed to it, whatever transformers calls it."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from fakes import MODELS, VOCABULARY
from torch import nn
from transformers import DynamicCache

from grpo_fn.shell.sampler.local import hf_cache_decode


class Noting(nn.Module):
    """Says what it was given."""

    def forward(self, **given):
        self.given = given
        return SimpleNamespace(logits=torch.zeros(1, 1, 3))


class Old(Noting):
    def forward(self, *, past_key_values=None, **given):
        return super().forward(past_key_values=past_key_values, **given)


class New(Noting):
    def forward(self, *, cache=None, **given):
        return super().forward(cache=cache, **given)


@pytest.mark.parametrize(
    ("made", "version", "name"),
    [
        (Old, "5.30", "past_key_values"),
        (New, "5.16", "cache"),
        (Noting, "5.23.4", "past_key_values"),
        (Noting, "5.24.0", "cache"),
        (Noting, "5.40.0", "cache"),
    ],
)
def test_the_cache_comes_under_the_name_that_the_model_knows(made, version, name, monkeypatch) -> None:
    monkeypatch.setattr(hf_cache_decode.transformers, "__version__", version)
    model, cache = made(), DynamicCache()
    one = torch.ones(1, 1, dtype=torch.long)
    hf_cache_decode.forward(model, one, one > 0, one, cache)
    assert model.given[name] is cache
    assert len(model.given.keys() & {"cache", "past_key_values"}) == 1


def test_transformers_own_models_are_given_no_name_that_goes_away() -> None:
    model, one = MODELS["qwen2_tied"](VOCABULARY), torch.ones(1, 1, dtype=torch.long)
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_cache_decode.forward(model, one, one > 0, one - 1, cache)
    assert cache.get_seq_length() == 1
