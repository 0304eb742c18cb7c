"""One step of a preset without a model: each token's logp is its own parameter, so its gradient is the signal."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import torch
from batches import dealt
from torch import Tensor

from grpo_fn.algo import step as algorithm
from grpo_fn.algo.group_sampling import GroupBatch
from grpo_fn.algo.step import Algorithm
from grpo_fn.config import freeze, load_config
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward, select_groups
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Batch, Carry, Groups, Pullback, Rollout, Scores
from grpo_fn.testing.strategies import tensors

PRESETS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "gin" / "algo").glob("*.gin"))
KEY = prng.key(11, device="cpu")
PARTS = ("correct", "boxed")


@cache
def preset(name: str) -> Algorithm:
    """As a run would get it from `--gin_file run/arithmetic.gin --gin_file algo/NAME.gin`."""
    return freeze(sections(name)["algorithm"], {})


def max_new_tokens(name: str) -> int:
    """Tokens of a completion at most, in such a run."""
    return sections(name)["sampling"].knobs["max_new_tokens"]


@cache
def sections(name: str) -> dict:
    """The sections of such a run, by name."""
    return load_config(["run/arithmetic.gin", f"algo/{name}.gin"], []).root.knobs


class Step(NamedTuple):
    """Groups as they were sampled and scored, and what four policies say of every token, [B, T]."""

    groups: Groups
    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    logp_teacher: Tensor
    energy: Tensor


@st.composite
def steps(draw, prompts: st.SearchStrategy[int], most: int = 6, stray: float = 2.0) -> Step:
    """At most `most` rows, ragged and with holes; equal rewards, samples that have none, truncated ones among them.

    Policies are up to `stray` nats a token apart, in steps of 1/32: no sum of them is near a clip or a tie by rounding.
    Garbage stands wherever nothing was sampled.
    """
    p = draw(prompts)
    g = draw(st.integers(1, max(1, most // p)))
    b, t = p * g, draw(st.integers(2, 4))
    mask = draw(tensors((b, t), st.booleans())).bool()
    mask[:, 0] = False
    mask[:, 1] |= ~mask.any(-1)
    logp = draw(tensors((b, t), st.integers(-192, -1))) / 32
    reach = int(32 * stray)
    gap = st.integers(-reach, reach)
    sampled, old, ref, teacher = (
        (logp - draw(tensors((b, t), gap)) / 32).clamp(max=0).where(mask, torch.nan) for _ in range(4)
    )
    verdict = st.sampled_from([0.0, 1.0]) if draw(st.booleans()) else st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.1, -0.5])
    value, *parts = (draw(tensors((p, g), verdict)) for _ in range(1 + len(PARTS)))
    valid, truncated = (draw(tensors(b, st.sampled_from([False, False, False, True]))).bool() for _ in range(2))
    energy = (draw(tensors((b, t), st.integers(0, 64))) / 32).where(mask, torch.nan)
    tokens = torch.zeros(b, t, dtype=torch.long)
    tokens[:, 0] = torch.arange(b)  # a row's number, by which the policy knows it
    rollout = Rollout(tokens, mask, sampled, truncated, ("",) * b)
    problems = tuple(Problem(draw(st.integers(0, 1000)) * 8 + i, "", "", {}) for i in range(p))
    reward = outcome_reward(value, ~valid.view(p, g), dict(zip(PARTS, parts, strict=True)))
    if draw(st.booleans()):  # of episodes of two turns at most
        turns, states = draw(tensors((p, g, 2), verdict)), draw(tensors((p, g, 2), st.integers(-1, 1))).long()
        states[..., 0].clamp_(min=0)
        reward = reward._replace(turns=torch.where(states < 0, 0.0, turns), states=states)
    return Step(Groups(problems, rollout, reward), logp, old, ref, teacher, energy)


def rich_step(seed: int, prompts: int, group_size: int = 6, width: int = 6) -> Step:
    """Rewards of every size, rows of every length, policies up to 2 nats apart; nothing equal by chance."""
    b = prompts * group_size
    keys = iter(prng.split(prng.key(seed, device="cpu"), 13))

    def between(low: float, high: float, *shape: int) -> Tensor:
        drawn = prng.uniform(next(keys), torch.Size(shape).numel(), dtype=torch.float64, low=low, high=high)
        return drawn.view(shape)

    lengths = between(1.0, float(width), b).int()
    columns = torch.arange(width)
    mask = (columns > 0) & (columns <= lengths[:, None])
    logp = between(-4.0, -0.01, b, width)
    sampled, old, ref = ((logp + between(-2.0, 2.0, b, width)).clamp(max=0) for _ in range(3))
    tokens = torch.where(columns == 0, torch.arange(b)[:, None], 0)
    rollout = Rollout(tokens, mask, sampled, between(0.0, 1.0, b) < 0.2, ("",) * b)
    value, *parts = (between(0.0, 1.5, prompts, group_size) for _ in range(1 + len(PARTS)))
    reward = outcome_reward(value, between(0.0, 1.0, prompts, group_size) < 0.9, dict(zip(PARTS, parts, strict=True)))
    problems = tuple(Problem(7 * i, "", "", {}) for i in range(prompts))
    teacher = (logp + between(-2.0, 2.0, b, width)).clamp(max=0)
    return Step(Groups(problems, rollout, reward), logp, old, ref, teacher, between(0.0, 2.0, b, width))


def whole(batch: Batch) -> list[Tensor]:
    """All rows that sampled something in one micro-batch, cut by length."""
    return dealt(batch, micro_tokens=10**6, devices=1)


class TokenPolicy:
    """Each row's logp is a parameter, known by the row's first token; plain gradient descent. Keeps every signal.

    `logp` says what the policy is now, which is not the `logp_old` of the step: see `old_of`.
    """

    dropout = False

    def __init__(self, step: Step, lr: float, cut: Callable[[Batch], list[Tensor]] = whole) -> None:
        self.logp_now, self.step, self.lr, self.split_rows = step.logp.clone(), step, lr, cut
        self.grad = torch.zeros_like(step.logp)
        self.signals: list[Tensor] = []

    def set_accumulation_steps(self, parts: int) -> None: ...

    def vjp(self, batch: Batch) -> tuple[Scores, Pullback]:
        where = batch.tokens[:, :1], torch.arange(batch.tokens.shape[1])
        logp = torch.where(batch.mask, self.logp_now[where], 0.0)

        def pullback(signal: Scores) -> None:
            assert not signal.logp[~batch.mask].any()
            self.grad[where] += signal.logp

        return Scores(logp, -logp), pullback

    def logp(self, rollout: Rollout) -> Tensor:
        return self.logp_now[rollout.tokens[:, 0]]

    def reference(self, rollout: Rollout) -> Tensor:
        return self.step.logp_ref[rollout.tokens[:, 0]]

    def energy(self, rollout: Rollout) -> Tensor:
        return self.step.energy[rollout.tokens[:, 0]]

    def update(self) -> dict[str, float]:
        self.signals.append(self.grad)
        self.logp_now = self.logp_now - self.lr * self.grad
        self.grad = torch.zeros_like(self.grad)
        return {}

    def load(self, policy: object) -> None:
        """It is its own sampler."""

    def rest(self) -> None:
        """It has no device."""

    def sample(self, problems: Sequence[Problem], group_size: int, *, key: Tensor) -> Rollout:
        raise AssertionError("everything was sampled before")


class Learned(NamedTuple):
    """The signal of each update on each token, [U, B, T], and the objective's mean value over updates."""

    signals: Tensor
    objective: float


def learn(
    how: Algorithm,
    step: Step,
    *,
    only: Sequence[int] | None = None,
    lr: float = 0.0,
    micro_tokens: int = 10**6,
    devices: int = 1,
    cut: Callable[..., list[Tensor]] = dealt,
    taken: int = 0,
    **changes: object,
) -> Learned:
    """What grpo_step makes of the step's groups, or of the groups `only` in that order, after `taken` steps.

    `changes` are of the algorithm, which has one update and no given tokens unless they say so.
    """
    groups = step.groups if only is None else select_groups(step.groups, only)
    prompts, group_size = groups.reward.value.shape
    numbers = {"prompts": prompts, "group_size": group_size, "epochs": 1, "minibatches": 1}
    plain = {"group_sampling": partial(as_sampled, groups), "old_logp": partial(old_of, step), "beside": []}
    policy = TokenPolicy(step, lr, partial(cut, micro_tokens=micro_tokens, devices=devices))
    # Also of a step without signal, which a run refuses: papers have no such rule, and a part of a step may have none.
    with patch.object(algorithm, "without_signal", return_value=False):
        _, _, figures = algorithm.grpo_step(
            policy,
            policy,
            unasked,
            algorithm.AT_THE_START._replace(steps=taken),
            key=KEY,
            algo=replace(how, **numbers | plain | changes),
            reward=unasked,
            span=silent,
            teacher=partial(taught, step),
            demonstrations=None,
        )
    return Learned(torch.stack(policy.signals) if policy.signals else torch.zeros(0), figures["loss/objective"])


def as_sampled(groups: Groups, explore: Callable, carried: Carry, prompts: int) -> GroupBatch:
    return GroupBatch(groups, groups, carried, {})


def old_of(step: Step, policy: TokenPolicy, rollout: Rollout) -> Tensor:
    return step.logp_old[rollout.tokens[:, 0]]


def taught(step: Step, groups: Groups, logp_old: Tensor) -> Tensor:
    return step.logp_teacher[groups.rollout.tokens[:, 0]]


def unasked(*args: object) -> None:
    raise AssertionError("everything was sampled and scored before")


def silent(name: str) -> nullcontext:
    return nullcontext()
