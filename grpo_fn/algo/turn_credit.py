"""From the rewards of turns to the advantage of every token of an episode.

Credit functions as in `credit`, for rows of several turns: `reward.turns [P G K]` is what the environment gave at every
turn, `reward.states [P G K]` the number of the state that it began in, -1 where a row has no such turn. The k-th run of
sampled tokens is the k-th turn. A row without turns is an episode of one, and a step of them gets what `credit.outcome`
gives.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo.credit import Advantage, over_tokens
from grpo_fn.algo.needs import ScoredStep
from grpo_fn.core.types import Reward

EXAMPLES = {"gamma": (0.95, 1.0), "state_weight": (1.0,)}  # knobs as tests try them

_PAIRS = 1 << 20  # of turns that are compared at once: the memory of `by_state`


def turn_returns(scored: ScoredStep, *, advantage: Advantage, gamma: float) -> Float[Tensor, "P G T"]:
    """A_gt = advantage(R_k)_g, R_gk = sum_{j >= k} gamma^(j - k) r_gj, k the turn of token t: the past does not count.

    Turns are compared with the turns of the same number in the group's other samples, those that got that far. Rewards
    of turns are discounted a turn, not a token. The sample's own reward, which parts and weights make, is not read.

    Use it when: the environment rewards turns, and what came before a turn should not count for it.
    Peers: SkyRL turn-level rewards; verifiers; ROLL step-wise REINFORCE.

    Args:
        scored: P prompts with G samples each, and the rewards of their turns.
        advantage: (reward [G], valid [G]) -> [G], the advantages within one group.
        gamma: discount a turn, in [0, 1].

    Returns:
        The advantage of each token, [P, G, T]; 0 where ~mask and for invalid samples.
    """
    reward = scored.reward
    by_turn = vmap(vmap(advantage, in_dims=-1, out_dims=-1))
    return turns_over_tokens(by_turn(discounted_returns(reward, gamma=gamma), turns_taken(reward)), scored.mask)


turn_returns.NEEDS = frozenset({"groups"})


def group_in_group(
    scored: ScoredStep,
    *,
    advantage: Advantage,
    gamma: float,
    state_weight: float,
) -> Float[Tensor, "P G T"]:
    """A_gt = advantage(R)_g + w advantage_s(R_k)_gk: samples of a prompt are compared, and turns from one state.

    GiGPO (arXiv:2505.10978, from verl-agent's code): R_gk is the discounted sum of the rewards from turn k on, and s
    are all turns of the group that begin in the state of turn k, its own among them. The state is the environment's, by
    its hash. A state that no other turn began in adds nothing. Both comparisons are by one function; the paper has w 1
    and gamma 0.95.

    Use it when: episodes of a prompt meet the same states again, as in mazes and games.
    Peers: ROLL `gigpo`, with a weight for both terms; verl-agent.

    Args:
        scored: P prompts with G samples each, and the rewards of their turns.
        advantage: (reward [G], valid [G]) -> [G], the advantages within one group; also of turns in one state.
        gamma: discount a turn, in [0, 1].
        state_weight: w, weight of the comparison of turns.

    Returns:
        The advantage of each token, [P, G, T]; 0 where ~mask and for invalid samples.
    """
    reward, mask = scored.reward, scored.mask
    samples = over_tokens(vmap(advantage)(reward.value, reward.valid), mask)
    turns = by_state(discounted_returns(reward, gamma=gamma), turns_taken(reward), reward.states, advantage)
    return samples + state_weight * turns_over_tokens(turns, mask)


group_in_group.NEEDS = frozenset({"groups"})


def discounted_returns(reward: Reward, *, gamma: float) -> Float[Tensor, "P G K"]:
    """R_gk = sum_{j >= k} gamma^(j - k) r_gj, from the last turn to the first."""
    to_come = torch.zeros_like(reward.value)
    returns = []
    for gained in reversed(reward.turns.unbind(-1)):
        to_come = gained + gamma * to_come
        returns.append(to_come)
    return torch.stack(returns[::-1], -1)


def turns_taken(reward: Reward) -> Bool[Tensor, "P G K"]:
    """The turns that there are of valid samples."""
    return (reward.states >= 0) & reward.valid[..., None]


def by_state(
    returns: Float[Tensor, "P G K"], taken: Bool[Tensor, "P G K"], states: Int[Tensor, "P G K"], advantage: Advantage
) -> Float[Tensor, "P G K"]:
    """The advantage of each turn among the turns of its prompt's group that begin in the same state."""
    worth, there, state = (x.flatten(1) for x in (returns, taken, states))
    size = worth.shape[-1]

    def own(place: Tensor, worth: Tensor, there: Tensor, state: Tensor) -> Tensor:
        at = torch.arange(size, device=place.device) == place
        here = torch.where(at, state, 0).sum()
        return torch.where(at, advantage(worth, there & (state == here)), 0.0).sum()

    places = torch.arange(size, device=worth.device)
    each = vmap(own, in_dims=(0, None, None, None), chunk_size=max(1, _PAIRS // size))
    compared = torch.stack([each(places, *prompt) for prompt in zip(worth, there, state, strict=True)])
    return torch.where(there, compared, 0.0).view(returns.shape)


def turns_over_tokens(adv: Float[Tensor, "P G K"], mask: Bool[Tensor, "P G T"]) -> Float[Tensor, "P G T"]:
    """A turn's advantage at each of its sampled tokens, 0 elsewhere; tokens beyond the last turn are that one's."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]
    turn = (begins.long().cumsum(-1) - 1).clamp(0, adv.shape[-1] - 1)
    return torch.where(mask, adv.gather(-1, turn), 0.0)
