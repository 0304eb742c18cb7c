"""Every preset against the scalar loop written from its paper: the value of the loss, and what each token learns."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
import reference
import torch
from hypothesis import assume, given, settings
from steps import KEY, PRESETS, Learned, Step, learn, max_new_tokens, preset, rich_step, steps

from grpo_fn.algo import corrections, distillation
from grpo_fn.algo import step as algorithm
from grpo_fn.algo.step import Algorithm
from grpo_fn.core import prng
from grpo_fn.core.batch import row_keys

LOOPED = [name for name in PRESETS if hasattr(reference, name)]
SOME = settings(max_examples=max(5, settings.default.max_examples // 8))
FEW = settings(max_examples=max(2, settings.default.max_examples // 30))


def samples(step: Step) -> list[list[reference.Sample]]:
    """The step as plain numbers; the variables are (row, column)."""
    (problems, rollout, reward), logp, old, ref, teacher, energy = step
    size = reward.value.shape[1]
    keys = row_keys(step.groups, prng.fold_in(KEY, algorithm.TOKEN_MASK_KEY))
    luck = prng.uniform(keys, logp.shape[1], dtype=torch.float64, low=0.0, high=1.0)

    def sample(p: int, g: int) -> reference.Sample:
        b = p * size + g
        columns = rollout.mask[b].nonzero()[:, 0].tolist()
        return reference.Sample(
            reward.value[p, g].item(),
            {name: x[p, g].item() for name, x in reward.parts.items()},
            bool(reward.valid[p, g]),
            bool(rollout.truncated[b]),
            [reference.Dual(logp[b, t].item(), {(b, t): 1.0}) for t in columns],
            *(x[b, columns].tolist() for x in (old, ref, rollout.logp_sampled, luck, teacher, energy)),
            columns,
        )

    return [[sample(p, g) for g in range(size)] for p in range(len(problems))]


def agree(how: Algorithm, loop: Callable, step: Step, **more: object) -> Learned:
    """To 1e-9, relative and absolute; `more` for `learn`."""
    try:
        expected = loop(samples(step), max_new_tokens("grpo"))
    except reference.Undecided:
        assume(False)
    got = learn(how, step, **more)
    slope = torch.zeros_like(step.logp)
    for where, value in expected.slope.items():
        slope[where] = value
    assert got.objective == pytest.approx(expected.x, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(got.signals, slope[None], rtol=1e-9, atol=1e-9)
    return got


@pytest.mark.parametrize("name", LOOPED)
@SOME
@given(step=steps(st.integers(1, 3)))
def test_a_preset_is_what_its_paper_says(name, step):
    agree(preset(name), getattr(reference, name), step)


@pytest.mark.parametrize("name", LOOPED)
@FEW
@given(seed=st.integers(0, 2**32))
def test_a_preset_is_what_its_paper_says_for_a_step_in_which_everything_happens(name, seed):
    """18 rows of up to 5 tokens: every branch of a loss is taken."""
    agree(preset(name), getattr(reference, name), rich_step(seed, 3))


@pytest.mark.parametrize("name", LOOPED)
def test_tokens_of_a_rich_step_have_a_learning_signal(name):
    """In one of three: by chance no group of a step may have signal, with few successes of `pass_at_k` above all."""
    learned = [learn(preset(name), rich_step(seed, 3)).signals.abs().max() for seed in range(3)]
    assert max(learned) > 1e-3


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@FEW
@given(seed=st.integers(0, 2**32), share=st.floats(0.05, 1.0))
def test_the_cov_presets_for_larger_shares_of_tokens(name, seed, share):
    """The share of the papers is one token of any step that a test can hold."""
    how = preset(name)
    more = replace(how, token_mask=partial(how.token_mask, share=share))
    agree(more, partial(getattr(reference, name), share=share), rich_step(seed, 3))


@FEW
@given(seed=st.integers(0, 2**32), beta=st.floats(0.01, 1.0))
def test_rloo_with_the_kl_of_its_paper(seed, beta):
    how = preset("rloo")
    paid = replace(how, credit=partial(how.credit, beta=beta))
    agree(paid, partial(reference.rloo, beta=beta), rich_step(seed, 3))


@pytest.mark.parametrize("cap", [1.5, math.inf])
@FEW
@given(step=steps(st.integers(1, 3)), seed=st.integers(0, 2**32))
def test_otb_with_importance_weights(step, seed, cap):
    """Also over micro-batches, as credit is the step's before rows are dealt out."""
    more = {
        "credit": partial(
            preset("otb").credit,
            energy_weight=partial(corrections.truncated_weight, ratio=corrections.token_ratio, cap=cap),
        )
    }
    agree(preset("otb"), partial(reference.otb, cap=cap), step, **more)
    whole = agree(preset("otb"), partial(reference.otb, cap=cap), rich_step(seed, 3), **more)
    dealt = learn(preset("otb"), rich_step(seed, 3), micro_tokens=7, devices=2, **more)
    torch.testing.assert_close(dealt.signals, whole.signals, rtol=1e-12, atol=1e-12)
    assert not torch.equal(whole.signals, learn(preset("otb"), rich_step(seed, 3)).signals)


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7, 12, 40])
def test_rlsd_after_some_steps_of_its_schedule(taken):
    """The schedule of ms-swift's `_rlsd_effective_lambda`, written out: 0 to lam over 4 steps, to 0 over 10."""
    lam = 0.5 * taken / 4 if taken < 4 else 0.5 * max(1.0 - (taken - 4) / 10, 0.0)
    share = partial(distillation.linear_share, warmup=4, decay=10)
    more = {"credit": partial(preset("rlsd").credit, share=share), "taken": taken}
    whole = agree(preset("rlsd"), partial(reference.rlsd, lam=lam), rich_step(1, 3), **more)
    dealt = learn(preset("rlsd"), rich_step(1, 3), micro_tokens=7, devices=2, **more)
    torch.testing.assert_close(dealt.signals, whole.signals, rtol=1e-12, atol=1e-12)
