"""Whether the functions of an algorithm fit one another and the run, by their signatures and by what they declare.

Of the functions only `share` is called, at every step of the run: shapes are checked on the first batch (`algo.step`),
before its update.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from grpo_fn.algo import credit as credits
from grpo_fn.algo import distillation, supervised
from grpo_fn.algo.curriculum import Curriculum, begin_curriculum, choose_uids, update_curriculum
from grpo_fn.algo.needs import needs
from grpo_fn.algo.step import Algorithm, from_sampler
from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.batch import outcome_reward
from grpo_fn.core.partials import describe_function, function_and_knobs, uses_of
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.checks.try_out import shown_type
from grpo_fn.trainer.sections import Settings

# Positional arguments of the function in a knob of this name, among the knobs of grpo_fn's own functions at any depth.
ARGUMENTS = {
    **{"objective": ("scores", "batch", "totals", "gains"), "credit": ("scored",), "beside": ("scored",)},
    **{"group_sampling": ("explore", "carried", "prompts"), "old_logp": ("policy", "rollout")},
    **{"filters": ("rollout", "adv"), "token_mask": ("batch", "keys"), "reweighting": ("logp", "rows")},
    **{"control": ("gains", "figures"), "token_loss": ("logp", "row"), "kl": ("logp", "row")},
    **{"importance_correction": ("logp", "row"), "energy_weight": ("logp", "row"), "token_weight": ("logp", "row")},
    **{"loss_aggregation": ("batch", "totals"), "share": ("steps",), "advantage": ("reward", "valid")},
}


def check_algorithm(settings: Settings) -> None:
    """Raise ValueError for functions of the algorithm that do not fit one another or the run."""
    algorithm, steps = settings.algorithm, settings.steps
    section = "supervised.Stage." if isinstance(algorithm, supervised.Stage) else "step.Algorithm."
    for knob, value in functions_of(vars(algorithm), section):
        check_signature(knob, value)
        if knob.endswith(".share"):
            check_step_share(knob, value, steps)
    if isinstance(algorithm, supervised.Stage):
        for name in ("teacher", "demonstrations"):
            if getattr(settings, name) is not None:
                raise ValueError(
                    f"train.train.{name}: got one in a supervised stage, wanted None: sections.Data.task has the "
                    "demonstrations of the stage"
                )
        return
    check_provided(settings, algorithm.needs)
    check_sampler_logp(algorithm, settings.sampling.max_staleness)
    check_group_size(algorithm)
    for term in uses_of(supervised.observations, algorithm.beside):
        coef = function_and_knobs(term)[1].get("coef", 0.0)
        if not 0 <= coef < math.inf:
            raise ValueError(f"supervised.observations.coef: got {coef}, wanted a finite number of at least 0")


def functions_of(knobs: Any, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function among some knobs, with the knobs that lead to it; also those in grpo_fn's own functions."""
    for name, value in knobs.items():
        for function in value if isinstance(value, list | tuple) else [value]:
            if callable(function):
                yield f"{path}{name}", function
                inner, inner_knobs = function_and_knobs(function)
                if inner.__module__.startswith("grpo_fn."):  # a user's function has knobs of its own meaning
                    yield from functions_of(inner_knobs, f"{path}{name}.")


def check_signature(knob: str, function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that cannot be called with the positional arguments of its knob."""
    names = ARGUMENTS.get(knob.rpartition(".")[2])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    if names is None:
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = describe_function(function_and_knobs(function)[0]).removesuffix("{}")
        raise ValueError(
            f"{knob}: got {name}{signature} ({error}), expected a function of ({', '.join(names)})"
        ) from error


def check_step_share(knob: str, share: Callable[[int], float], steps: int) -> None:
    """Raise ValueError for a share of a step that is none, at any step of the run."""
    for step in range(steps):
        if not 0 <= (value := share(step)) <= 1:
            raise ValueError(f"{knob}: got {value} after {step} steps, wanted a share, 0 to 1")


def check_provided(settings: Settings, declared: frozenset[str]) -> None:
    """Raise ValueError for what the algorithm declares and the run has not, and for demonstrations without a use."""
    shown = settings.demonstrations
    if "logp_teacher" in declared and settings.teacher is None:
        raise ValueError(
            "train.train.teacher: got None with an algorithm that learns from a teacher, wanted one: "
            "--gin_file scale/teacher.gin --gin_param TEACHER='FOLDER', or the policy itself: --gin_file "
            "scale/self_teacher.gin"
        )
    if "demonstrations" in declared and shown is None:
        raise ValueError(
            "train.train.demonstrations: got None with an algorithm that learns from given completions too, wanted "
            "some: --gin_file task/demonstrations.gin --gin_param DEMONSTRATIONS='FILE'"
        )
    if "episodes" in declared and settings.episodes is None:
        raise ValueError(
            "train.train.episodes: got None with an algorithm that learns from what environments write, wanted "
            "@sections.Episodes(), or step.Algorithm.beside without @supervised.observations"
        )
    if shown is not None and "demonstrations" not in declared:
        raise ValueError(
            "train.train.demonstrations: got some with an algorithm that does not learn from them, wanted None, or "
            "step.Algorithm.beside = [@supervised.demonstrations]: --gin_file algo/chord.gin"
        )
    if shown is not None and shown.rows % settings.algorithm.minibatches:
        raise ValueError(
            f"sections.Demonstrations.rows: got {shown.rows} for {settings.algorithm.minibatches} minibatches, wanted "
            "a multiple"
        )


def check_sampler_logp(algorithm: Algorithm, max_staleness: int) -> None:
    """Raise ValueError for functions that compare the sampler with itself, and for uncorrected stale samples."""
    declared, learned = algorithm.needs, needs(algorithm.objective)
    itself = function_and_knobs(algorithm.old_logp)[0] is from_sampler
    if itself and "trainer_logp" in declared:
        raise ValueError(
            "step.Algorithm.old_logp: got @step.from_sampler with a function that compares logp_old with the sampler's "
            "log-probs, which are then the same (importance_correction, energy_weight or token_mask), so that its "
            "weights are all 1: wanted step.Algorithm.old_logp = @step.from_trainer, or None in that function's place"
        )
    corrects = "trainer_logp" in learned or "logp_sampled" in learned or (itself and "fresh_samples" not in learned)
    if max_staleness > 0 and not corrects:
        raise ValueError(
            f"max_staleness: got {max_staleness} with an objective that does not ask how likely the sampler found its "
            "samples, so stale ones would be learned from as if they were fresh: wanted max_staleness 0, or "
            "step.Algorithm.old_logp = @step.from_trainer and "
            "objective.policy_objective.importance_correction = @importance.truncated_weight"
        )


def check_group_size(algorithm: Algorithm) -> None:
    """Raise ValueError for groups of one that are compared within."""
    declared = needs(algorithm.credit)
    # A teacher's gap is a signal of its own, unless it only reweighs advantages.
    gap = "logp_teacher" in declared and not any(uses_of(distillation.teacher_reweighted, algorithm.credit))
    if algorithm.group_size == 1 and "groups" in declared and not gap:
        raise ValueError(
            "group_size: got 1 with an advantage that compares within a group (always 0), wanted 2 or more"
        )


def check_parts(credit: Callable[..., Any] | None, parts: Sequence[str]) -> None:
    """Raise ValueError for a credit that weighs parts which the reward does not have."""
    for use in uses_of(credits.per_part, credit):
        weights = function_and_knobs(use)[1].get("weights", {})
        unknown = sorted(weights.keys() - {*parts})
        if unknown or not weights:
            raise ValueError(f"weights: got parts {unknown}, wanted some of {sorted(parts)}")


# -- whether the curriculum fits the task, the sampler and the rewards, by a first step of it


KNOB = "train.train.curriculum"


def check_curriculum_of_run(settings: Settings, task: Task, parts: Sequence[str]) -> None:
    """Raise ValueError for a curriculum that is none, or that task, sampler, stage or rewards do not fit."""
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
