"""How a step is dealt out to micro-batches changes nothing: every preset, from rewards to learning signals.

Every rank of a step judges the whole of it first, so credit, marks and totals are the step's before its rows are
dealt out. Then rows may go to any number of micro-batches, in any company and order: each token's signal is the same.
"""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from steps import PRESETS, Learned, learn, preset, rich_step, steps
from torch import Tensor

from grpo_fn.core.types import Batch

SOME = settings(max_examples=max(3, settings.default.max_examples // 25))
FEW = settings(max_examples=max(2, settings.default.max_examples // 30))


def exactly(got: Learned, wanted: Learned) -> None:
    torch.testing.assert_close(got.signals, wanted.signals, rtol=1e-12, atol=1e-12)
    assert got.objective == pytest.approx(wanted.objective, rel=1e-12, abs=1e-12)


def in_piles(random, batch: Batch, micro_tokens: int, devices: int) -> list[Tensor]:
    """A split that looks at nothing: every row on any of up to four piles, the piles in any order."""
    rows = list(range(len(batch.tokens)))
    random.shuffle(rows)
    ends = sorted(random.choices(range(len(rows) + 1), k=3))
    piles = [rows[a:b] for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]
    return [torch.tensor(pile, dtype=torch.long) for pile in piles]


@pytest.mark.parametrize("name", PRESETS)
@SOME
@given(
    step=steps(st.integers(1, 4)), micro_tokens=st.integers(1, 30), devices=st.integers(1, 3), epochs=st.integers(1, 2)
)
def test_the_number_and_the_size_of_micro_batches_change_nothing(name, step, micro_tokens, devices, epochs):
    """Also in a second pass over the rollout, when the policy has moved."""
    learned = partial(learn, preset(name), step, epochs=epochs, lr=0.1)
    exactly(learned(micro_tokens=micro_tokens, devices=devices), learned())


@pytest.mark.parametrize("name", PRESETS)
@SOME
@given(step=steps(st.integers(1, 4)), random=st.randoms(use_true_random=False))
def test_any_rows_in_any_order_may_share_a_micro_batch(name, step, random):
    """An empty micro-batch is nothing, too."""
    wanted = learn(preset(name), step)
    exactly(learn(preset(name), step, cut=partial(in_piles, random)), wanted)


@pytest.mark.parametrize("name", PRESETS)
@FEW
@given(
    seed=st.integers(0, 2**32),
    minibatches=st.integers(1, 2),
    each=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_the_order_of_prompts_within_a_minibatch_changes_nothing(name, seed, minibatches, each, random):
    """One update a minibatch, whatever micro-batches it comes in; which prompts it has does matter."""
    how, step = preset(name), rich_step(seed, minibatches * each, group_size=3)
    runs = [[*range(m * each, (m + 1) * each)] for m in range(minibatches)]
    for run in runs:
        random.shuffle(run)
    learned = partial(learn, how, step, minibatches=minibatches, lr=0.1)
    exactly(learned(only=[p for run in runs for p in run], micro_tokens=7), learned())
    assert len(learned().signals) == minibatches


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@SOME
@given(seed=st.integers(0, 2**32), micro_tokens=st.integers(1, 60), share=st.floats(0.05, 0.9))
def test_tokens_are_marked_among_those_of_the_step(name, seed, micro_tokens, share):
    """The share of the papers is one token of any step that a test can hold."""
    how, step = preset(name), rich_step(seed, 3)
    more = replace(how, token_mask=partial(how.token_mask, share=share))
    exactly(learn(more, step, micro_tokens=micro_tokens), learn(more, step))


@pytest.mark.parametrize("name", PRESETS)
def test_parts_of_a_step_judged_by_themselves_learn_something_else(name):
    """Why ranks that share the work still judge the whole: if each judges its own prompts, they learn another step."""
    step, how = rich_step(1, 3), preset(name)
    whole = learn(how, step).signals
    apart = sum(learn(how, step, only=prompts).signals for prompts in ([0], [1, 2]))
    assert (apart - whole).abs().max() > 1e-3 * whole.abs().max()
