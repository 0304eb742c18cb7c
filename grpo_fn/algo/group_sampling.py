"""The choice of a step's groups: `(explore, carried, prompts) -> GroupBatch`.

`explore(first, count)` samples and scores problems first, ..., first + count - 1 of the stream.
"""

from collections.abc import Callable
from typing import NamedTuple

from grpo_fn.core.batch import concat_groups, select_groups, with_signal
from grpo_fn.core.types import Carry, Groups

Explore = Callable[[int, int], Groups]


class GroupBatch(NamedTuple):
    """Groups to learn from now, all groups sampled for them, and the state for the next step."""

    groups: Groups
    fresh: Groups  # sampled in this step
    carried: Carry
    figures: dict[str, float]


def dynamic(explore: Explore, carried: Carry, prompts: int, *, max_gen_batches: int) -> GroupBatch:
    """Go on sampling, `prompts` problems at a time, until as many groups carry signal, at most `max_gen_batches` times.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups without signal are dropped. Groups with signal
    beyond `prompts` are not: they wait for the next step, which takes them first and so is never more than one step
    behind its samples. When there are too few, the groups without signal that came first fill the step up.

    Args:
        explore: (first, count) -> groups: samples and scores problems first, ..., first + count - 1 of the stream.
        carried: what the step before left: the place in the stream, and groups that wait.
        prompts: groups to learn from in a step.
        max_gen_batches: largest number of times that `prompts` problems are sampled in a step.

    Returns:
        `prompts` groups to learn from; all groups sampled; what waits for the next step; and `generation/batches`,
        `generation/accepted` (share of the sampled groups that carry signal), `generation/carried_over_groups` (groups
        of the step before) and `generation/zero_variance_fill` (groups without signal).
    """
    waited = [] if carried.waiting is None else [carried.waiting]
    ready = sum(len(part.problems) for part in waited)
    sampled: list[Groups] = []
    while ready < prompts and len(sampled) < max_gen_batches:
        sampled.append(explore(carried.drawn + prompts * len(sampled), prompts))
        ready += int(with_signal(sampled[-1].reward).sum())
    fresh = concat_groups(sampled)
    signal = with_signal(fresh.reward).tolist()
    good, poor = ([p for p, ok in enumerate(signal) if ok is side] for side in (True, False))
    candidates = concat_groups([*waited, select_groups(fresh, [*good, *poor])])
    rest = range(prompts, ready)
    return GroupBatch(
        select_groups(candidates, range(prompts)),
        fresh,
        carried._replace(drawn=carried.drawn + len(signal), waiting=select_groups(candidates, rest) if rest else None),
        {
            "generation/batches": float(len(sampled)),
            "generation/accepted": len(good) / len(signal),
            "generation/carried_over_groups": float(ready - len(good)),
            "generation/zero_variance_fill": float(max(0, prompts - ready)),
        },
    )
