"""Several rewards to one: a weighted sum that knows which of its rows could be scored."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange

from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.partials import unwrap_reward
from grpo_fn.core.problem import Completion, Problem, RewardFn, Scorer
from grpo_fn.core.types import Reward, Rollout


def score_serially(fn: RewardFn, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float | None]:
    """The plain scorer: one row after the other, in this process. For rewards that cannot hang, no coroutines."""
    return [fn(problem, completion) for problem, completion in zip(problems, completions, strict=True)]


def combine(
    problems: Sequence[Problem], rollout: Rollout, *, parts: Sequence[RewardFn], weights: Sequence[float], score: Scorer
) -> Reward:
    """Weighted sum of several rewards: `value[p, g] = sum_k weights[k] * parts[k](problem p, completion p * G + g)`.

    A sample is valid when every part with a non-zero weight could score it; the value of an invalid one is 0. In
    `parts` what could not be scored is 0 as well: read it where `valid`. A part of weight 0 is only logged: it makes
    no sample invalid, so who compares parts one by one (GDPO) gives each of them a weight. Parts are named after
    their functions.

    Of episodes, a turn that the environment could not score makes the sample invalid, and `turns` and `states` are what
    it gave at every turn; a row without turns is one, worth its value.

    Args:
        problems: the P problems of the batch.
        rollout: their completions, P * G rows, the G of a problem one after the other.
        parts: reward functions, (problem, completion) -> float, or None for what cannot be scored.
        weights: factor of each part.
        score: applies one part to all rows: the reward pool's, or `score_serially`.

    Returns:
        The reward, float32 and dimensionless: `value` and `valid` [P, G], the unweighted `parts` [P, G] by name, and
        `turns` and `states` [P, G, K].

    Raises:
        ValueError: for no parts, not one weight per part, the same part twice, or rows that are no whole groups.
    """
    if not parts or len(parts) != len(weights):
        raise ValueError(
            f"reward parts: got {len(parts)} parts and {len(weights)} weights, expected one weight per part"
        )
    names = part_names(parts)
    completions = completions_of(rollout)
    if not problems or len(completions) % len(problems):
        raise ValueError(f"rollout: got {len(completions)} rows for {len(problems)} problems, expected G rows for each")
    group = len(completions) // len(problems)
    asked = [problem for problem in problems for _ in range(group)]
    scores = [score(fn, asked, completions) for fn in parts]

    def grid(column: list[Any]) -> torch.Tensor:
        return rearrange(torch.tensor(column, device=rollout.mask.device), "(p g) -> p g", g=group)

    table = [grid([0.0 if s is None else float(s) for s in column]) for column in scores]
    known = [grid([s is not None for s in column]) for column, w in zip(scores, weights, strict=True) if w != 0]
    whole = grid([all(turn.reward is not None for turn in completion.turns) for completion in completions])
    valid = torch.stack([whole, *known]).all(0)
    value = torch.stack([w * part for w, part in zip(weights, table, strict=True)]).sum(0)
    parts_by_name = dict(zip(names, table, strict=True))
    return with_turns(outcome_reward(torch.where(valid, value, 0.0), valid, parts_by_name), completions)


def with_turns(reward: Reward, completions: Sequence[Completion]) -> Reward:
    """The reward of episodes: the same, and what the environment gave at every turn.

    A sample with a turn that could not be scored is invalid. States are numbered as they come.
    """
    most = max((len(completion.turns) for completion in completions), default=0)
    if not most:
        return reward
    numbers: dict[str, int] = {}
    gained, begun, scored = [], [], []
    for completion in completions:
        turns, missing = completion.turns, most - len(completion.turns)
        gained.append([turn.reward or 0.0 for turn in turns] + [0.0] * missing)
        begun.append([numbers.setdefault(turn.state, len(numbers)) for turn in turns] + [-1] * missing)
        scored.append(all(turn.reward is not None for turn in turns))
    device, shape = reward.value.device, (*reward.value.shape, most)
    valid = reward.valid & torch.tensor(scored, device=device).view(reward.valid.shape)
    rewards, states = (torch.tensor(column, device=device).view(shape) for column in (gained, begun))
    return reward._replace(value=torch.where(valid, reward.value, 0.0), valid=valid, turns=rewards, states=states)


def completions_of(rollout: Rollout) -> list[Completion]:
    """Every row's text, its length in sampled tokens, whether it ran into a limit, and its turns."""
    lengths, truncated = rollout.mask.sum(-1).tolist(), rollout.truncated.tolist()
    turns = rollout.turns or ((),) * len(rollout.text)
    return [Completion(*row) for row in zip(rollout.text, lengths, truncated, turns, strict=True)]


# Names that reward/<part> would take from the metrics of the whole reward.
TAKEN = {"mean", "std", "min", "max", "correct_rate", "invalid"}


def part_names(parts: Sequence[RewardFn]) -> list[str]:
    """The functions' names, `module.name` where two share one or the name is taken; an object has its class's name.

    A wrapper goes by the name of what it wraps, as `unwrap_reward` has it. Raises ValueError when two
    parts are one function.
    """
    bare = [unwrap_reward(fn) for fn in parts]
    short = [getattr(fn, "__name__", type(fn).__name__) for fn in bare]
    clash = TAKEN | {name for name, times in Counter(short).items() if times > 1}
    names = [f"{fn.__module__}.{name}" if name in clash else name for fn, name in zip(bare, short, strict=True)]
    if len(set(names)) != len(names):
        raise ValueError(f"reward parts: got {names}, expected different functions")
    return names
