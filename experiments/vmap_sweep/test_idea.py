"""Each slice of a vmapped step is the step of a policy on its own."""

import pytest
import torch

from experiments.vmap_sweep import idea


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("policies", [1, 3])
def test_every_slice_is_its_separate_run(adapters: bool, policies: int) -> None:
    assert max(idea.difference(policies, adapters=adapters, rows=2, steps=3)) <= idea.TOLERANCE


def test_policies_that_differ_go_different_ways() -> None:
    model = idea.built("eager", adapters=True, dtype=torch.float32)
    many = idea.Together(model, idea.starts(model, 2))
    before = many.state.params
    many.step(idea.stacked(idea.batches(2, 2, torch.float32)), torch.tensor([0.0, 1e-3]))
    moved = [max(idea.gap(many.state.params[n][k], before[n][k]) for n in before) for k in range(2)]
    assert moved[0] == 0.0  # its learning rate
    assert moved[1] > 0.0
