"""Credit of turns: against loops over turns and tokens, and what it comes down to without turns."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from grpo_fn.algo import advantage, credit
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.types import Reward
from grpo_fn.testing.steps import scored_step
from grpo_fn.testing.strategies import masks, tensors

ADVANTAGES = {
    "mean_centered": advantage.mean_centered,
    "leave_one_out": advantage.leave_one_out,
    "group_normalized": partial(advantage.group_normalized, eps=1e-4, ddof=1),
}
each_advantage = pytest.mark.parametrize("compare", ADVANTAGES.values(), ids=ADVANTAGES)
eighths = st.integers(-16, 16).map(lambda n: n / 8)


@st.composite
def episodes(draw) -> tuple[Reward, Tensor]:
    """Rewards and masks of rows whose runs of tokens are their turns; some rows are invalid."""
    p, g, k = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    taken = draw(tensors((p, g), st.integers(1, k))).long()
    there = torch.arange(k) < taken[..., None]
    turns = torch.where(there, draw(tensors((p, g, k), eighths)), 0.0)
    states = torch.where(there, draw(tensors((p, g, k), st.integers(0, 2))).long(), -1)
    lengths, gaps = (draw(tensors((p, g, k), st.integers(1, 2))).long() for _ in range(2))
    width = 1 + 4 * k
    mask = torch.zeros(p, g, width, dtype=torch.bool)
    for i in range(p):
        for j in range(g):
            at = 1
            for turn in range(int(taken[i, j])):
                mask[i, j, at : at + int(lengths[i, j, turn])] = True
                at += int(lengths[i, j, turn] + gaps[i, j, turn])
    plain = outcome_reward(draw(tensors((p, g), eighths)), draw(masks((p, g))), {})
    return plain._replace(turns=turns, states=states), mask


def turn_of(row: list[bool], t: int) -> int:
    """Number of the run of True that the token t is in, from 0."""
    return sum(row[s] and not row[s - 1] for s in range(1, t + 1)) - 1 + row[0]


def returns_from(gains: list[float], k: int, gamma: float) -> float:
    return sum(gamma ** (j - k) * gains[j] for j in range(k, len(gains)))


def compared(compare, worth: list[float], members: list[bool], place: int) -> float:
    """The advantage of one of the members."""
    return compare(torch.tensor(worth, dtype=torch.float64), torch.tensor(members))[place].item()


@each_advantage
@given(episodes(), st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_returns_as_a_loop_over_tokens(compare, step, gamma):
    reward, mask = step
    got = credit.turn_returns(scored_step(reward, mask), advantage=compare, gamma=gamma)
    g = mask.shape[1]
    for p, b, t in mask.nonzero().tolist():
        k = turn_of(mask[p, b].tolist(), t)
        worth = [returns_from(reward.turns[p, j].tolist(), k, gamma) for j in range(g)]
        members = [bool(reward.valid[p, j] and reward.states[p, j, k] >= 0) for j in range(g)]
        expected = compared(compare, worth, members, b) if reward.valid[p, b] else 0.0
        assert got[p, b, t].item() == pytest.approx(expected, abs=1e-9)
    assert (got[~mask] == 0).all()


@each_advantage
@given(episodes(), st.sampled_from([0.0, 0.95, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_group_in_group_as_a_loop_over_tokens(compare, step, gamma, weight):
    reward, mask = step
    knobs = {"advantage": compare, "gamma": gamma, "state_weight": weight}
    got = credit.group_in_group(scored_step(reward, mask), **knobs)
    g, most = mask.shape[1], reward.turns.shape[-1]
    for p, b, t in mask.nonzero().tolist():
        k = turn_of(mask[p, b].tolist(), t)
        samples = compared(compare, reward.value[p].tolist(), reward.valid[p].tolist(), b)
        all_turns = [(j, i) for j in range(g) for i in range(most)]
        worth = [returns_from(reward.turns[p, j].tolist(), i, gamma) for j, i in all_turns]
        same = [bool(reward.valid[p, j] and reward.states[p, j, i] == reward.states[p, b, k]) for j, i in all_turns]
        turns = compared(compare, worth, same, all_turns.index((b, k)))
        expected = samples + weight * turns if reward.valid[p, b] else 0.0
        assert got[p, b, t].item() == pytest.approx(expected, abs=1e-9)


def test_a_detour_through_a_maze_is_credited_as_computed_by_hand():
    """One sample leaves at once from state 0, the other goes round: there its first turn is worse, its last as good."""
    reward = outcome_reward(torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool), {})
    turns = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    states = torch.tensor([[[0, -1, -1], [0, 1, 0]]])
    mask = torch.tensor([[[0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0]]]).bool()
    episode = reward._replace(turns=turns, states=states)
    knobs = {"advantage": advantage.mean_centered, "gamma": 0.5}
    adv = credit.group_in_group(scored_step(episode, mask), **knobs, state_weight=1.0)
    # Returns in state 0 are 1 of the first sample, 1/4 and 1 of the second: mean 3/4. State 1 is met once.
    assert adv[0, 0].tolist() == [0, 0.25, 0, 0, 0, 0, 0]
    assert adv[0, 1].tolist() == [0, -0.5, 0, 0, 0, 0.25, 0]
    adv = credit.turn_returns(scored_step(episode, mask), **knobs)
    # First turns: 1 and 1/4. The second sample alone has others.
    assert adv[0, 0].tolist() == [0, 0.375, 0, 0, 0, 0, 0]
    assert adv[0, 1].tolist() == [0, -0.375, 0, 0, 0, 0, 0]


@each_advantage
@given(episodes(), st.sampled_from([0.5, 1.0]))
def test_rows_without_turns_are_credited_with_their_outcome(compare, step, gamma):
    reward, mask = step
    plain = scored_step(outcome_reward(reward.value, reward.valid, {}), mask)
    outcome = credit.outcome(plain, advantage=compare)
    by_turn = credit.turn_returns(plain, advantage=compare, gamma=gamma)
    knobs = {"advantage": compare, "gamma": gamma, "state_weight": 1.0}
    assert torch.equal(by_turn, outcome)
    torch.testing.assert_close(credit.group_in_group(plain, **knobs), 2 * outcome)


def test_many_turns_are_compared_in_pieces(monkeypatch):
    torch.manual_seed(0)
    states, returns = torch.randint(0, 4, (2, 3, 5)), torch.rand(2, 3, 5, dtype=torch.float64)
    there = torch.rand(2, 3, 5) < 0.8
    whole = credit.by_state(returns, there, states, advantage.mean_centered)
    monkeypatch.setattr(credit, "_PAIRS", 40)
    torch.testing.assert_close(credit.by_state(returns, there, states, advantage.mean_centered), whole)
