"""From the rewards of a step to the advantage of every token: `(scored) -> [P G T]`.

    scored      the step, P prompts with G samples each: their rewards and log-probs
    advantage   (reward [G], valid [G]) -> [G], the advantages within one group
    credit      (scored) -> [P, G, T], the advantages that are changed
    beta        coefficient of the KL, in units of the reward per nat
    gamma       discount a turn, in [0, 1]
    eps         added to the std, in units of what it divides
    returns     the advantage of each token, [P, G, T]; 0 where ~mask and for invalid samples

A credit is shown the whole scored step. It says which number the groups are compared by, and what a comparison over
more than one group adds. What changes the advantages of another credit takes it as its knob `credit`, as
transformations of optax are chained. The step is whole wherever this runs, so that a mean over it is the same number
however many processes share the work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.func import vmap

from grpo_fn.algo import advantage as of_group
from grpo_fn.core.batch import by_group, check_tensor, scored_rows
from grpo_fn.core.types import Batch, Gains, Groups, Reward, Rollout, Undeclared

_PAIRS = 1 << 20  # of turns that are compared at once: the memory of `by_state`
PASSES = ("logp_ref", "logp_teacher", "energy")  # forward passes that a step makes for those who declare them


@dataclass(frozen=True)
class ScoredStep:
    """A sampled and scored step, as credits see it. A forward pass over its rows is made when one first reads it."""

    groups: Groups
    passes: Mapping[str, Callable[[], Tensor]]  # name -> log-probs or energies of the rows, [B, T]
    needs: frozenset[str]  # that the algorithm declares; a credit reads logp_old and these
    gains: Gains
    steps: int  # taken before
    demonstrations: Callable[[int], Rollout] | None = None  # steps taken before -> given rows
    figures: dict[str, float] = field(default_factory=dict)  # metrics that functions of the step add
    results: dict[str, Tensor] = field(default_factory=dict)  # of the passes that were made

    def rows(self, name: str) -> Float[Tensor, "B T"]:
        """logp_old, logp_ref, logp_teacher (nats) or energy of every token."""
        if name in PASSES and name not in self.needs:
            Undeclared(name).read()
        if name not in self.results:
            self.results[name] = self.passes[name]() if name in self.passes else None
        if self.results[name] is None:
            raise ValueError(
                f"got no {name} from the policy or the run, expected it: a function of the step declares it"
            )
        return self.results[name]

    def by_group(self, rows: Shaped[Tensor, "B T"]) -> Shaped[Tensor, "P G T"]:
        """Row b = p * G + g to [p, g]."""
        return by_group(rows, len(self.groups.reward.value))

    @property
    def reward(self) -> Reward:
        """Rewards of the samples, [P, G]."""
        return self.groups.reward

    @property
    def mask(self) -> Tensor:
        """The mask of sampled tokens, [P, G, T]."""
        return self.by_group(self.groups.rollout.mask)

    @property
    def drift(self) -> Float[Tensor, "P G T"]:
        """logp_old - logp_ref, times the gain of the KL: summed over a row the estimate k1 of its KL, in nats."""
        return self.gains.kl * self.by_group(self.rows("logp_old") - self.rows("logp_ref"))

    @property
    def teacher_gap(self) -> Float[Tensor, "P G T"]:
        """log pi_teacher - log pi_old, in nats."""
        return self.by_group(self.rows("logp_teacher") - self.rows("logp_old"))


Advantage = Callable[[Tensor, Tensor], Tensor]  # one group: reward [G], valid [G] -> [G]
Credit = Callable[[ScoredStep], Tensor]


def token_advantages(scored: ScoredStep, credit: Credit | None) -> Float[Tensor, "P G T"]:
    """The advantage of every token; zeros where no credit makes any: rewards are measured only."""
    if credit is None:
        return torch.zeros_like(scored.mask, dtype=scored.reward.value.dtype)
    adv = credit(scored)
    check_tensor("step.Algorithm.credit", adv, tuple(scored.mask.shape), torch.float32)
    return adv


def outcome(scored: ScoredStep, *, advantage: Advantage) -> Float[Tensor, "P G T"]:
    """A_gt = advantage(R)_g: every token of a sample has the sample's advantage within its group.

    GRPO's outcome supervision (arXiv:2402.03300, section 4.1.2).

    Use it when: always, but for what the others are for.
    Peers: all.
    """
    return over_tokens(vmap(advantage)(scored.reward.value, scored.reward.valid), scored.mask)


outcome.NEEDS = frozenset({"groups"})


def outcome_minus_kl(scored: ScoredStep, *, advantage: Advantage, beta: float) -> Float[Tensor, "P G T"]:
    """A_gt = advantage(R - beta sum_t drift_t)_g: the KL to the reference as a part of the sample's reward.

    RLOO (arXiv:2402.14740). In expectation the policy gradient of the reward minus beta times the KL of whole rows.

    Use it when: the KL should be a part of what samples are compared by; exact for the KL of whole sequences.
    Peers: verl, OpenRLHF: KL in the reward, k1.
    """
    reward, mask = scored.reward, scored.mask
    value = reward.value - beta * zero_outside_mask(scored.drift, mask).sum(-1) if beta else reward.value
    return over_tokens(vmap(advantage)(value, reward.valid), mask)


outcome_minus_kl.NEEDS = lambda knobs: frozenset({"groups", "logp_ref"} if knobs["beta"] else {"groups"})


def outcome_length_baseline(scored: ScoredStep) -> Float[Tensor, "P G T"]:
    """A_gt = R_g - b, b = sum_i |o_i| R_i / sum_i |o_i| over the group's valid samples, |o_i| sampled tokens.

    OPO (arXiv:2505.23585; from verl's code): where the squared norm of a row's gradient grows with its length, this
    baseline has the least variance. A sample is part of its own baseline, as in `advantage.mean_centered`.

    Use it when: lengths differ much within a group, one update a rollout.
    Peers: verl `opo`, whose group of one has baseline 0; here its advantage is 0.
    """
    reward, mask = scored.reward, scored.mask
    # From the smallest reward of the group, as advantage.mean_centered does it: equal rewards are exact zeros.
    least = torch.where(reward.valid, reward.value, torch.inf).amin(-1, keepdim=True)
    above = torch.where(reward.valid, reward.value - least, 0.0)
    length = torch.where(reward.valid, mask.sum(-1), 0).to(above.dtype)
    baseline = (length * above).sum(-1, keepdim=True) / length.sum(-1, keepdim=True).clamp(min=1)
    return over_tokens(torch.where(reward.valid, above - baseline, 0.0), mask)


outcome_length_baseline.NEEDS = frozenset({"groups"})


def batch_scaled(scored: ScoredStep, *, credit: Credit, eps: float) -> Float[Tensor, "P G T"]:
    """A = a / (s + eps), a from `credit`, s the std of all valid rewards of the step, with n - 1 in its denominator.

    Lite PPO (arXiv:2508.08221): groups are compared by their own mean and scaled by what rewards of the whole step
    differ by, so a group of nearly equal rewards is not blown up. A step of equal rewards gives exactly 0.

    Use it when: around `outcome(mean_centered)`: rewards of unknown scale, no difficulty bias.
    Peers: TRL `scale_rewards="batch"`, eps 1e-4.
    """
    adv, reward = credit(scored), scored.reward
    samples = reward.valid.sum()
    std = moments(reward.value[reward.valid])[1] * (samples / (samples - 1).clamp(min=1)).sqrt()
    counted = scored.mask & reward.valid[..., None] & (std != 0)
    return torch.where(counted, standardise(adv, torch.zeros_like(std), std, eps), 0.0)


def reward_to_go(scored: ScoredStep, *, beta: float) -> Float[Tensor, "P G T"]:
    """A_gt = R_g - beta sum_{s >= t} drift_s: no comparison within the group, and the KL that is still to come.

    REINFORCE++ (arXiv:2501.03262v9, eq. 4) before its normalisation; wrap it in `token_whitened` (eq. 5).

    Use it when: inside `token_whitened`.
    Peers: OpenRLHF `reinforce`.
    """
    reward, mask = scored.reward, scored.mask
    to_go = reward.value[..., None]
    if beta:
        to_go = to_go - beta * zero_outside_mask(scored.drift, mask).flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & reward.valid[..., None], to_go, 0.0)


reward_to_go.NEEDS = lambda knobs: frozenset({"logp_ref"} if knobs["beta"] else ())


def token_baseline(
    scored: ScoredStep, *, credit: Credit, energy_weight: Callable[[Tensor, Batch], Tensor] | None
) -> Float[Tensor, "P G T"]:
    """A = a less `advantage.optimal_token_baseline` of its group at every token, a from `credit`.

    OTB (arXiv:2602.07078; from verl's code). Costs one more forward pass a step, for the energies of the tokens.

    Use it when: around `reward_to_go`, with one update a rollout, rows long or confident by turns.
    Peers: verl `optimal_token_baseline`.

    Args:
        energy_weight: (logp_old [T], row) -> w [T], an importance weight: energies count w^2 times; None: once.
    """
    value, energy, valid = credit(scored), scored.by_group(scored.rows("energy")), scored.reward.valid
    if energy_weight is not None:
        logps = [scored.rows("logp_old")] * 3
        rows = scored_rows(scored.groups.rollout, valid, value, *logps)
        energy = scored.by_group(vmap(energy_weight)(logps[0], rows)).square() * energy
    return vmap(of_group.optimal_token_baseline)(value, energy, scored.mask & valid[..., None])


token_baseline.NEEDS = frozenset({"energy"})


def per_part(
    scored: ScoredStep,
    *,
    advantage: Advantage,
    weights: Mapping[str, float],
) -> Float[Tensor, "P G T"]:
    """A_gt = sum_k weights[k] advantage(R^k)_g: each part of the reward is compared within the group by itself.

    GDPO (arXiv:2601.05242, eq. 4 and 7): normalised after the sum, different mixtures of parts can come out the same;
    before it they do not; wrap it in `row_whitened` for eq. 6. Parts without a weight do not count.

    Use it when: the reward has parts of different scale or difficulty.
    Peers: verl `gdpo`, NeMo-RL.

    Args:
        weights: weight of each part of the reward, by the part's name.

    Raises:
        ValueError: there is no weight, or one of a part that the reward does not have.
    """
    reward = scored.reward
    unknown = sorted(weights.keys() - reward.parts.keys())
    if unknown or not weights:
        raise ValueError(f"weights: got parts {unknown}, expected some of {sorted(reward.parts)}")
    compared = [w * vmap(advantage)(reward.parts[name], reward.valid) for name, w in weights.items()]
    return over_tokens(torch.stack(compared).sum(0), scored.mask)


per_part.NEEDS = frozenset({"groups"})


def token_whitened(scored: ScoredStep, *, credit: Credit, eps: float) -> Float[Tensor, "P G T"]:
    """A = (a - mean a) / (std a + eps), a from `credit`, mean and std over the sampled tokens of all valid rows.

    The std has N in its denominator. REINFORCE++ (arXiv:2501.03262v9, eq. 5) and, around `outcome` of `mean_centered`,
    its baseline form (eq. 6 and 7). A batch of one value gives exactly 0. Long rows weigh more in the mean, so a group
    without signal does not stay at 0 here unless the whole batch is without; in `row_whitened` it does.

    Use it when: REINFORCE++, and around `outcome(mean_centered)` its baseline form.
    Peers: verl `reinforce_plus_plus(_baseline)`, also for GDPO (`masked_whiten`); std with N - 1 there.
    """
    adv = credit(scored)
    counted = scored.mask & scored.reward.valid[..., None]
    mean, std = moments(adv[counted])
    return torch.where(counted, standardise(adv, mean, std, eps), 0.0)


def row_whitened(scored: ScoredStep, *, credit: Credit, eps: float) -> Float[Tensor, "P G T"]:
    """A = (a - mean a) / (std a + eps), mean and std over rows, each with the advantage of its first sampled token.

    As `token_whitened`, but a long row counts once: GDPO (arXiv:2601.05242, eq. 6), around `per_part`. For a `credit`
    that gives all tokens of a row the same. Where the advantages of a group sum to 0, groups without signal stay at 0.

    Use it when: GDPO; or whitening that long rows do not dominate.
    Peers: TRL-GDPO; verl's `gdpo` whitens over tokens.
    """
    adv = credit(scored)
    mask, valid = scored.mask, scored.reward.valid
    mean, std = moments(first_token(adv, mask)[valid & mask.any(-1)])
    return torch.where(mask & valid[..., None], standardise(adv, mean, std, eps), 0.0)


def over_tokens(adv: Float[Tensor, "P G"], mask: Bool[Tensor, "P G T"]) -> Float[Tensor, "P G T"]:
    """A sample's advantage at each of its sampled tokens, 0 elsewhere."""
    check_tensor("advantage, taken over all groups by vmap", adv, tuple(mask.shape[:2]), torch.float32)
    return torch.where(mask, repeat(adv, "p g -> p g t", t=mask.shape[-1]), 0.0)


def first_token(x: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B"]:
    """The value at each row's first sampled token; at its first column when there is none."""
    return x.gather(-1, mask.int().argmax(-1, keepdim=True))[..., 0]


def zero_outside_mask(x: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"]) -> Float[Tensor, "*B T"]:
    """The value where `mask`, 0 elsewhere."""
    return torch.where(mask, x, 0.0)


def moments(values: Float[Tensor, "N"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and population standard deviation, in float64; 0 of no values, and exactly 0 deviation of equal ones."""
    x = values.double()
    if not len(x):
        return x.sum(), x.sum()
    least = x.amin()  # the mean of equal numbers can be an ulp off them; that of their zero distances is not
    above = x - least
    mean = above.mean()
    return least + mean, ((above - mean) ** 2).mean().sqrt()


def standardise(
    x: Float[Tensor, "*B T"], mean: Float[Tensor, ""], std: Float[Tensor, ""], eps: float
) -> Float[Tensor, "*B T"]:
    """(x - mean) / (std + eps) in the dtype of x; 0 where x is as near to the mean as rounding can bring it.

    So it stays exactly 0 what the groups of a step leave at 0 when they cancel out: their mean is then 0 but for
    rounding, which among subnormal numbers is absolute. A std of 0 gives 0 everywhere, nan gives nan.
    """
    far, limits = x.double() - mean, torch.finfo(x.dtype)
    near = far.abs() <= (64 * limits.eps * std).clamp(min=limits.tiny)
    return torch.where(near, 0.0, far / (std + eps)).to(x.dtype)


# For rows of several turns: `reward.turns [P G K]` is what the environment gave at every turn, `reward.states [P G K]`
# the number of the state that it began in, -1 where a row has no such turn. The k-th run of sampled tokens is the k-th
# turn. A row without turns is an episode of one, and a step of them gets what `outcome` gives.


def turn_returns(scored: ScoredStep, *, advantage: Advantage, gamma: float) -> Float[Tensor, "P G T"]:
    """A_gt = advantage(R_k)_g, R_gk = sum_{j >= k} gamma^(j - k) r_gj, k the turn of token t: the past does not count.

    Turns are compared with the turns of the same number in the group's other samples, those that got that far. Rewards
    of turns are discounted a turn, not a token. The sample's own reward, which parts and weights make, is not read.

    Use it when: the environment rewards turns, and what came before a turn should not count for it.
    Peers: SkyRL turn-level rewards; verifiers; ROLL step-wise REINFORCE.
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
        state_weight: w, weight of the comparison of turns.
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
    worth, there, state = (rearrange(x, "p g k -> p (g k)") for x in (returns, taken, states))
    size = worth.shape[-1]

    def own(place: Tensor, worth: Tensor, there: Tensor, state: Tensor) -> Tensor:
        at = torch.arange(size, device=place.device) == place
        here = torch.where(at, state, 0).sum()
        return torch.where(at, advantage(worth, there & (state == here)), 0.0).sum()

    places = torch.arange(size, device=worth.device)
    each = vmap(own, in_dims=(0, None, None, None), chunk_size=max(1, _PAIRS // size))
    compared = torch.stack([each(places, *prompt) for prompt in zip(worth, there, state, strict=True)])
    return rearrange(torch.where(there, compared, 0.0), "p (g k) -> p g k", g=returns.shape[1])


def turns_over_tokens(adv: Float[Tensor, "P G K"], mask: Bool[Tensor, "P G T"]) -> Float[Tensor, "P G T"]:
    """A turn's advantage at each of its sampled tokens, 0 elsewhere; tokens beyond the last turn are that one's."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[..., :-1]
    turn = (begins.long().cumsum(-1) - 1).clamp(0, adv.shape[-1] - 1)
    return torch.where(mask, adv.gather(-1, turn), 0.0)
