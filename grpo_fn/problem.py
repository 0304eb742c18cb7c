"""The host side of a rollout: what is asked and what came back, as text.

No torch in here: reward workers import this module and must start fast under a tight memory limit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One question. `uid` is unique among the problems of a run and is what its randomness is keyed on."""

    uid: int
    prompt: str
    answer: str
    meta: Mapping[str, Any]


class Completion(NamedTuple):
    """What the policy wrote for a problem; `length` counts sampled tokens, `truncated` means it hit the limit."""

    text: str
    length: int
    truncated: bool


# A reward maps one completion to a number; None means it cannot be scored (a broken gold, a verifier that died).
RewardFn = Callable[[Problem, Completion], float | None]

# A scorer applies one reward to many rows. The serial one is a comprehension; the shell's runs killable workers.
Scorer = Callable[[RewardFn, Sequence[Problem], Sequence[Completion]], list[float | None]]
