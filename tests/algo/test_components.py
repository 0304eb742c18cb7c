"""Observed tokens beside sampled ones: their cross entropy has a denominator of its own and changes nothing else."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from steps import Step, learn, preset, steps
from torch import Tensor

from grpo_fn.core.batch import observed_tokens

FEW = settings(max_examples=max(5, settings.default.max_examples // 3))
COEF = 0.1


def observed(step: Step) -> list[tuple[int, int]]:
    """(row, token) of what stands between two sampled tokens of a row whose reward is valid, by a loop."""
    found = []
    valid = step.groups.reward.valid.flatten().tolist()
    for b, row in enumerate(step.groups.rollout.mask.tolist()):
        sampled = [t for t, on in enumerate(row) if on]
        found += [(b, t) for t in range(sampled[0], sampled[-1]) if not row[t] and valid[b]]
    return found


def signals(step: Step, coef: float, **how) -> Tensor:
    return learn(preset("echo"), step, observation_coef=coef, **how).signals


@FEW
@given(steps(st.integers(1, 3)))
def test_observations_add_their_cross_entropy_and_leave_sampled_tokens_alone(step: Step):
    """arXiv:2605.24517: L_GRPO + lambda L_Env, by a loop over the observed tokens."""
    places = observed(step)
    wanted = torch.zeros_like(step.logp)
    for b, t in places:
        wanted[b, t] = -COEF / len(places)
    alone, both = signals(step, 0.0), signals(step, COEF)
    if len(alone):
        torch.testing.assert_close(both, alone + wanted, rtol=1e-12, atol=1e-12)
    elif places:  # a step without signal learns from its observations
        torch.testing.assert_close(both, wanted[None], rtol=1e-12, atol=1e-12)
    else:
        assert not len(both)


@FEW
@given(steps(st.just(2)), st.integers(1, 20), st.sampled_from([1, 2]))
def test_micro_batches_of_observations_add_up(step: Step, micro_tokens: int, minibatches: int):
    how = {"minibatches": minibatches}
    whole, parts = signals(step, COEF, **how), signals(step, COEF, micro_tokens=micro_tokens, **how)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@given(steps(st.integers(1, 2)), st.integers(1, 3))
def test_padding_and_prompts_are_no_observations(step: Step, extra: int):
    mask = step.groups.rollout.mask
    wide = torch.nn.functional.pad(mask, (extra, extra))
    found = observed_tokens(wide)
    assert torch.equal(found[:, extra:-extra], observed_tokens(mask))
    assert not found[:, :extra].any()
    assert not found[:, -extra:].any()
    assert not (found & wide).any()
