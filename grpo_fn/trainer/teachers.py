"""Teachers of on-policy distillation: models that say how likely they find what the policy sampled.

A teacher is another model, frozen; the policy itself (`self_teachers`); or a model on a vLLM server. It reads the
policy's prompt, or one that has more in it (`privileged`), before the same sampled tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_fn.core.batch import select_groups
from grpo_fn.core.problem import Problem
from grpo_fn.core.reprompt import change_prompts, restore_places
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.shell.vllm.served_teacher import VllmTeacher
from grpo_fn.shell.world import World
from grpo_fn.tasks.privileged import PrivilegedPrompt, Sample

TeacherKey = Callable[[Problem], str]
TeacherLogp = Callable[[Rollout], Tensor]  # of one teacher: log-probs of the sampled tokens, [B T]
EncodePrompt = Callable[[str], list[int]]

ONE = "teacher"


@dataclass(frozen=True, kw_only=True)
class PromptChange:
    """What a teacher reads in the place of the policy's prompt."""

    prompt: PrivilegedPrompt | None  # None: the problem's own
    encode: EncodePrompt  # a prompt to token ids
    positions: int | None  # most tokens of a row; None: no limit


def one_teacher(problem: Problem) -> str:
    """The same teacher for every problem: the one that `sections.Teacher.models` has under "teacher".

    Args:
        problem: any one.

    Returns:
        "teacher".
    """
    return ONE


def teacher_of_field(problem: Problem, *, name: str) -> str:
    """A teacher by a field of the problem: the one that `sections.Teacher.models` has under the field's value.

    Args:
        problem: with the field in its `meta`.
        name: of the field: "task", "source", "subject".

    Returns:
        The field's value as a text; "" for a problem that has no such field.
    """
    return str(problem.meta.get(name, ""))


def teacher_logp(
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    *,
    teachers: Mapping[str, TeacherLogp],
    changes: Mapping[str, PromptChange],
    key: TeacherKey,
) -> Float[Tensor, "B T"]:
    """Log-probs of the sampled tokens, each row's under the teacher of its problem.

    Args:
        groups: P problems and their samples, B = P * G rows.
        logp_old: log-probs under pi_old, [B, T], in nats.
        teachers: for each key, rollout -> log-probs of its tokens, [B, T], in nats.
        changes: other prompts, for the keys whose teachers do not read the policy's.
        key: problem -> which teacher.

    Returns:
        Log-probs in nats, [B, T]: logp_old in rows that are not taught; 0 where nothing was sampled.
    """
    size = groups.reward.value.shape[1]
    chosen = [key(problem) for problem in groups.problems]
    out = torch.zeros_like(groups.rollout.logp_sampled)
    for name in sorted({*chosen}):
        of_name = [p for p, found in enumerate(chosen) if found == name]
        rows = [p * size + g for p in of_name for g in range(size)]
        some = select_groups(groups, of_name)
        if name in changes:
            out[rows] = logp_behind_prompts(some, logp_old[rows], ask=teachers[name], change=changes[name])
        else:
            out[rows] = teachers[name](some.rollout)
    return out


def logp_behind_prompts(
    groups: Groups, logp_old: Float[Tensor, "B T"], *, ask: TeacherLogp, change: PromptChange
) -> Float[Tensor, "B T"]:
    """Log-probs of the sampled tokens under a teacher that reads other prompts before them.

    A row is not taught where there is no prompt for it, or where prompt and completion are more tokens than the
    teacher reads.

    Args:
        groups: P problems and their samples, B = P * G rows.
        logp_old: log-probs under pi_old, [B, T], in nats.
        ask: rollout -> log-probs of its tokens, in nats.
        change: the prompts.

    Returns:
        Log-probs in nats, [B, T]: logp_old in rows that are not taught; 0 where nothing was sampled.
    """
    rollout = groups.rollout
    out = torch.where(rollout.mask, logp_old, torch.zeros_like(logp_old))
    places = torch.arange(rollout.mask.shape[1], device=rollout.mask.device) * rollout.mask
    first = rollout.mask.long().argmax(-1)
    length = (places.amax(-1) + 1 - first).tolist()
    encode, limit = cache(change.encode), change.positions
    taught = {
        b: encode(prompt)
        for b, prompt in enumerate(teacher_prompts(groups, change.prompt))
        if prompt is not None and (limit is None or len(encode(prompt)) + length[b] <= limit)
    }
    if taught:
        rows, prompts = [*taught], [*taught.values()]
        asked = Rollout(*(x[rows] for x in rollout[:4]), tuple(rollout.text[b] for b in rows))
        out[rows] = restore_places(ask(change_prompts(asked, prompts)), prompts, asked)
    return out


def teacher_prompts(groups: Groups, prompt: PrivilegedPrompt | None) -> list[str | None]:
    """The prompt that the teacher reads before each row's tokens; None for a row that is not taught."""
    size, reward = groups.reward.value.shape[1], groups.reward
    value, valid = reward.value.tolist(), reward.valid.tolist()
    parts = {name: x.tolist() for name, x in reward.parts.items()}
    found: list[str | None] = []
    for p, problem in enumerate(groups.problems):
        samples = [
            Sample(
                groups.rollout.text[p * size + g],
                value[p][g] if valid[p][g] else None,
                {name: x[p][g] for name, x in parts.items()},
            )
            for g in range(size)
        ]
        found += [problem.prompt if prompt is None else prompt(problem, samples, g) for g in range(size)]
    return found


def stand_ins(size: int, parts: Sequence[str], text: str) -> list[Sample]:
    """A group of samples that are right by any measure, to try a prompt with."""
    return [Sample(text, float("inf"), dict.fromkeys(parts, float("inf")))] * max(2, size)


def ask_server(served: VllmTeacher, world: World, rollout: Rollout) -> Float[Tensor, "B T"]:
    """Log-probs of a rollout's tokens from vLLM servers, which one rank asks for all."""
    return world.agree_at_length(partial(served.logp, rollout), what="the teacher's log-probs from its servers")
