"""Which tokens of a step are treated apart: as many as asked for, and the right ones."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from batches import GARBAGE, batches, with_garbage
from catalogue import bound, each
from hypothesis import given, settings
from torch import Tensor

from grpo_fn.algo import masking
from grpo_fn.core import prng
from grpo_fn.core.types import Batch

ALL = bound(masking, "batch", "key")
COSTLY = settings(max_examples=max(5, settings.default.max_examples // 4))  # of each function at each setting


def keys(rows: int, seed: int = 0) -> Tensor:
    return prng.split(prng.key(seed, device="cpu"), rows)


@st.composite
def steps(draw) -> tuple[Batch, Tensor]:
    """Rows to choose from, with the key of each."""
    _, batch = draw(batches())
    return batch, keys(len(batch.mask), draw(st.integers(0, 2**32)))


def covariances(batch: Batch) -> Tensor:
    """Token by token, as the paper writes it: nan where nothing was sampled."""
    m = batch.mask
    cov = (batch.logp_old - batch.logp_old[m].mean()) * (batch.adv - batch.adv[m].mean())
    return torch.where(m, cov, torch.nan)


def wide(rows: int, width: int, seed: int) -> Batch:
    """Many tokens, all of them sampled."""
    draw = partial(torch.randn, rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = torch.ones(rows, width, dtype=torch.bool)
    logp = -draw().abs()
    return Batch(mask.long(), mask, logp, logp, logp, logp, draw(), ~mask, mask.long())


@each(ALL)
@COSTLY
@given(steps(), st.sampled_from(GARBAGE))
def test_only_sampled_tokens_are_marked_and_only_they_have_a_say(f, step, garbage):
    batch, key = step
    selected = f(batch, key)
    assert selected.shape == batch.mask.shape
    assert selected.dtype == torch.bool
    assert not (selected & ~batch.mask).any()
    assert torch.equal(f(with_garbage(batch.logp_old, batch, garbage)[1], key), selected)


@each(ALL)
@COSTLY
@given(steps(), st.randoms(use_true_random=False))
def test_a_row_keeps_its_marks_wherever_it_stands(f, step, random):
    """In eighths of a nat, whose sums are exact: otherwise the order of a sum could decide by an ulp."""
    batch, key = step
    batch = batch._replace(adv=(batch.adv * 8).round() / 8, logp_old=(batch.logp_old * 8).round() / 8)
    order = list(range(len(key)))
    random.shuffle(order)
    shuffled = f(Batch(*(x[order] for x in batch)), key[order])
    assert torch.equal(shuffled, f(batch, key)[order])


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.1, 0.37, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_share_of_marked_tokens_is_the_knobs(share, seed):
    batch = wide(8, 25, seed)
    expected = max(1, int(share * 200)) if share else 0
    assert int(masking.kl_cov_tokens(batch, keys(8), share=share).sum()) == expected
    everything = partial(masking.clip_cov_tokens, low=-1e9, high=1e9)
    assert int(everything(batch, keys(8), share=share).sum()) == expected


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_marks_the_highest_covariances(seed):
    batch = wide(8, 25, seed)
    selected, cov = masking.kl_cov_tokens(batch, keys(8), share=0.1), covariances(batch)
    assert cov[selected].min() > cov[~selected].max()


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_from_the_band_alone(seed):
    batch = wide(8, 25, seed)
    cov, band = covariances(batch), partial(masking.clip_cov_tokens, low=0.5, high=1.5)
    inside = (cov > 0.5) & (cov < 1.5)
    assert not (band(batch, keys(8), share=0.02) & ~inside).any()
    assert torch.equal(band(batch, keys(8), share=1.0), inside)  # fewer than asked for: all there are


def test_clip_cov_draws_evenly_and_by_the_key_alone():
    batch, times = wide(4, 10, 0), 400
    band = partial(masking.clip_cov_tokens, batch, low=-1e9, high=1e9, share=0.25)
    counts = sum(band(keys(4, seed)).int() for seed in range(times))
    assert torch.equal(band(keys(4, 7)), band(keys(4, 7)))
    # 100 of 400 each, in expectation; a binomial's standard deviation is 8.7
    assert (counts - times / 4).abs().max() < 5 * 8.7


def test_a_share_above_one_is_refused():
    with pytest.raises(ValueError, match=r"share: got 1\.5, expected 0 to 1"):
        masking.kl_cov_tokens(wide(1, 2, 0), keys(1), share=1.5)


# -- the second moment


def apart(log_w: list[float]) -> Batch:
    """One row whose trainer is log_w off the sampler."""
    batch = wide(1, len(log_w), 0)
    everything = torch.ones_like(batch.mask)
    return batch._replace(mask=everything, logp_old=batch.logp_sampled + torch.tensor([log_w]))


@pytest.mark.parametrize(
    ("log_w", "limit", "selected"),
    [
        ([0.0, 0.0, 0.0], 0.04, []),
        ([0.1, -0.1, 3.0], 0.04, [2]),
        ([0.1, -3.0, 3.0], 0.04, [1, 2]),  # in either direction, and what is as far goes with it
        ([1.0, 1.0], 0.04, [0, 1]),
        ([0.1, 1.0, 2.0], 0.6, [2]),  # (0.01 + 1) / 2 is below it
        ([0.1, 1.0, 2.0], 2.0, []),
    ],
)
def test_as_few_tokens_are_left_out_as_bring_the_second_moment_below_its_limit(log_w, limit, selected):
    found = masking.second_moment_tokens(apart(log_w), keys(1), limit=limit)
    assert found[0].nonzero()[:, 0].tolist() == selected
