"""Whether a run's curriculum fits its task, its sampler and its rewards, by a first step of it."""

from collections.abc import Sequence

import torch

from grpo_fn.algo.curriculum import Curriculum, begin_curriculum, choose_uids, update_curriculum
from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.checks.try_out import shown_type
from grpo_fn.trainer.sections import Settings

KNOB = "train.train.curriculum"


def check_curriculum_of_run(settings: Settings, task: Task, parts: Sequence[str]) -> None:
    """Raise ValueError for a curriculum that is none, or that task, sampler, stage or rewards do not fit.

    Args:
        settings: their curriculum, the prompts of a step, and what samples them.
        task: the task, whose arms are chosen.
        parts: names of the reward's parts.
    """
    curriculum = settings.curriculum
    if curriculum is None:
        return
    if not isinstance(curriculum, Curriculum):
        hint = " (bound without ()?)" if callable(curriculum) else ""
        raise ValueError(
            f"{KNOB}: got {shown_type(curriculum)}{hint}, wanted None or a Curriculum: @curricula.learnability_bandit()"
        )
    if isinstance(settings.algorithm, Stage):
        raise ValueError(f"{KNOB}: got one in a supervised stage, which samples nothing, wanted None")
    if settings.sampling.max_staleness:
        raise ValueError(
            f"{KNOB}: got one with sections.Sampling.max_staleness {settings.sampling.max_staleness}, which asks for "
            "problems before the pass rates are known that choose them, wanted max_staleness 0, or None"
        )
    state = begin_curriculum(curriculum, len(task.arms), prng.key(0, device="cpu"))
    prompts = settings.algorithm.prompts
    uids = choose_uids(curriculum, state, prng.key(1, device="cpu"), 0, 0, prompts)
    value = (torch.arange(2 * prompts) % 3 / 2).view(prompts, 2)
    reward = outcome_reward(value, torch.ones_like(value, dtype=torch.bool), dict.fromkeys(parts, value))
    update_curriculum(curriculum, state, uids, curriculum.pass_rate(reward))
