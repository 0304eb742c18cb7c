"""The same tokens behind other prompts: nothing but the prompts changes, and everything finds its place again."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from grpo_fn.core.batch import change_prompts, restore_places
from grpo_fn.core.types import Rollout

ids = st.integers(0, 30)


@st.composite
def rollouts(draw) -> tuple[Rollout, list[list[int]]]:
    """Rows whose sampled tokens may have others between them, and another prompt for each."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    tokens = torch.tensor([[draw(ids) for _ in range(width)] for _ in range(rows)])
    mask = torch.tensor([[False] + [draw(st.booleans()) for _ in range(width - 1)] for _ in range(rows)])
    for b in range(rows):
        mask[b, draw(st.integers(1, width - 1))] = True
    logp = -torch.rand(rows, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    prompts = [draw(st.lists(ids, min_size=1, max_size=6)) for _ in range(rows)]
    return Rollout(tokens, mask, logp, ~mask[:, 0], tuple(map(str, range(rows)))), prompts


def ended(rollout: Rollout, b: int) -> tuple[int, int]:
    """First sampled column, and the one behind the last, by looking at each."""
    sampled = [t for t, one in enumerate(rollout.mask[b].tolist()) if one]
    return sampled[0], sampled[-1] + 1


@given(rollouts())
def test_the_sampled_tokens_are_the_same_ids_behind_the_other_prompt(case):
    rollout, prompts = case
    moved = change_prompts(rollout, prompts)
    for b, prompt in enumerate(prompts):
        begin, end = ended(rollout, b)
        n = len(prompt) + end - begin
        assert moved.tokens[b, :n].tolist() == prompt + rollout.tokens[b, begin:end].tolist()
        assert moved.mask[b].tolist()[:n] == [False] * len(prompt) + rollout.mask[b, begin:end].tolist()
        assert not moved.mask[b, n:].any()
    assert torch.equal(moved.truncated, rollout.truncated)
    assert moved.text == rollout.text
    assert moved.tokens.shape[1] == max(len(p) + e - s for b, p in enumerate(prompts) for s, e in [ended(rollout, b)])


@given(rollouts())
def test_values_of_tokens_return_to_their_places(case):
    rollout, prompts = case
    moved = change_prompts(rollout, prompts)
    back = restore_places(moved.logp_sampled, prompts, rollout)
    assert torch.equal(back, torch.where(rollout.mask, rollout.logp_sampled, 0.0))
