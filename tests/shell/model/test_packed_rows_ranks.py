"""Ranks that share prompts, each among its own rows, compute what one process computes from padded rows."""

from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from batches import packed_split
from crew import crew
from fakes import MODELS
from families import FAMILIES
from hypothesis import given, settings
from test_fsdp import assert_same, plain
from test_fsdp_ranks import ACTIVATIONS, UNSHRUNK, Case, alike, built, gathered_grads, oracle, scale_of
from test_packed_rows import GROUPS, Found, V, assert_alike, drawn, found, logprob_model
from torch import Tensor

from grpo_fn.core.types import Batch, Scores
from grpo_fn.shell.policy.mesh import shard
from grpo_fn.shell.world import World

pytestmark = pytest.mark.xdist_group("sharded")
EXAMPLES = settings.default.max_examples


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with a folder of every model."""
    there = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        model(V).save_pretrained(there / name)
    return there


def signals(mask: Tensor) -> Scores:
    g = torch.Generator().manual_seed(0)
    return Scores(*(torch.randn(mask.shape, generator=g) for _ in range(2)))


def pulled(world: World, folder: str, case: Case, micros: list[tuple[Batch, Scores]]) -> tuple[Any, ...]:
    """Scores of each micro-batch, the gradient of all, and whether rows were end to end."""
    policy = built(world, folder, case)
    policy.set_accumulation_steps(len(micros))
    scores = []
    for micro, signal in micros:
        seen, pullback = policy.vjp(micro)
        pullback(signal)
        scores.append(seen)
    return scores, gathered_grads(policy), policy.logprob_model.packs


def on_one(folders: Path, case: Case, batch: Batch, signal: Scores) -> tuple[Scores, dict[str, Tensor]]:
    one = oracle(folders, case)
    scores, pullback = one.vjp(batch)
    pullback(signal)
    return scores, one.grads


@settings(max_examples=max(4, EXAMPLES // 20), phases=UNSHRUNK)
@given(drawn(), st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(ACTIVATIONS)), st.booleans())
def test_two_ranks_compute_what_one_process_does(folders, some, model, activations, adapted):
    check(folders, some.tokens, some.mask, Case(model, "full_shard", activations, adapted))


def test_a_rank_without_a_row_takes_part(folders):
    check(folders, GROUPS.tokens[:1], GROUPS.mask[:1], Case("gemma2_capped", "full_shard"))


def check(folders: Path, tokens: Tensor, mask: Tensor, case: Case) -> None:
    if not mask.any():
        return
    batch, signal = plain(tokens, mask), signals(mask)
    ((scores,), grads, fit) = alike(crew(2).run(pulled, str(folders / case.model), case, [(batch, signal)]))
    expected, right = on_one(folders, case, batch, signal)
    assert fit
    for got, x in zip(scores, expected, strict=True):
        torch.testing.assert_close(got, x, rtol=0, atol=5e-6)
    assert_same(grads, right, 2e-6)


def test_micro_batches_by_what_is_read_add_up_to_the_same_gradient(folders):
    model = "qwen3_untied"
    case, signal = Case(model, "full_shard"), signals(GROUPS.mask)
    batch = plain(*GROUPS[:2])._replace(adv=signal.logp, logp_ref=signal.entropy)  # the signal goes where its row goes
    parts = packed_split(batch, 14, 2)
    assert len(parts) > 1
    micros = [(part, Scores(part.adv * part.mask, part.logp_ref * part.mask)) for part in parts]
    _, grads, _ = alike(crew(2).run(pulled, str(folders / model), case, micros))
    assert_same(grads, on_one(folders, case, batch, signal)[1], 2e-6)


def unfit_on_two(world: World, tokens: Tensor, mask: Tensor) -> Found:
    """A model that is not fit for it, put over two ranks: the question fails in the middle of a pass."""
    model = FAMILIES["qwen3_untied"](V)
    for layer in model.model.layers:
        layer.forward = partial(without_layout, layer.forward)
    scoring, how = logprob_model(model, True), scale_of(Case("qwen3_untied", "full_shard"))
    shard(scoring, model, how.mesh(world), torch.float32, how)
    with pytest.warns(RuntimeWarning, match="padded rows, not on packed ones"):
        scoring(tokens, mask)
    got = found(scoring, tokens, mask)
    assert scoring.packs is False
    return got._replace(grads={n: x.full_tensor() for n, x in got.grads.items()})


def without_layout(forward: Any, *args: Any, layout: Any = None, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def test_ranks_agree_that_a_model_is_not_fit_and_go_on():
    expected = found(logprob_model(FAMILIES["qwen3_untied"](V), False), *GROUPS[:2])
    for got in crew(2).run(unfit_on_two, *GROUPS[:2]):  # both have the same rows: gradients add up to twice as much
        assert_alike(got._replace(grads={n: x / 2 for n, x in got.grads.items()}), expected, 2e-6)
