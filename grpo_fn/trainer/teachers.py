"""Teachers of on-policy distillation: frozen models that say how likely they find what the policy sampled."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.groups import select_groups
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.sampler.interface import positions

TeacherKey = Callable[[Problem], str]
TeacherLogp = Callable[[Rollout], Tensor]  # of one teacher: log-probs of the sampled tokens, [B T]

ONE = "teacher"


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


def teacher_logp(groups: Groups, *, teachers: Mapping[str, TeacherLogp], key: TeacherKey) -> Float[Tensor, "B T"]:
    """Log-probs of the sampled tokens, each row's under the teacher of its problem.

    Args:
        groups: P problems and their samples, B = P * G rows.
        teachers: for each key, rollout -> log-probs of its tokens, [B, T], in nats.
        key: problem -> which teacher.

    Returns:
        Log-probs in nats, [B, T]; 0 where nothing was sampled.
    """
    size = groups.reward.value.shape[1]
    chosen = [key(problem) for problem in groups.problems]
    out = torch.zeros_like(groups.rollout.logp_sampled)
    for name in sorted({*chosen}):
        of_name = [p for p, found in enumerate(chosen) if found == name]
        rows = [p * size + g for p in of_name for g in range(size)]
        out[rows] = teachers[name](select_groups(groups, of_name).rollout)
    return out


def check_teacher_shapes(
    models: Mapping[str, PretrainedConfig], own: PretrainedConfig, max_total_tokens: int | None
) -> None:
    """Raise ValueError for a teacher that cannot read every token, or not as many of them, as the policy writes.

    Args:
        models: configuration of each teacher's model, by key.
        own: that of the policy.
        max_total_tokens: most tokens of a prompt and its completion; None: as many as the policy reads.
    """
    longest = positions(own) if max_total_tokens is None else max_total_tokens
    for name, config in models.items():
        theirs, ours = (one.get_text_config().vocab_size for one in (config, own))
        if theirs < ours:
            raise ValueError(
                f"sections.Teacher.models: got {name!r} with {theirs} rows in its embedding, wanted at least the "
                f"policy's {ours}, as the policy can sample each of them"
            )
        reach = positions(config)
        if reach is not None and (longest is None or reach < longest):
            raise ValueError(
                f"sections.Teacher.models: got {name!r}, which reads {reach} positions, wanted "
                f"{longest or 'no limit'}, or sections.Sampling.max_total_tokens = {reach}"
            )


def check_same_tokenizer(name: str, teacher: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the first difference, unless both have the same token for every id.

    Args:
        name: key of the teacher.
        teacher: its tokenizer.
        own: the policy's.
    """
    theirs, ours = ({i: token for token, i in one.get_vocab().items()} for one in (teacher, own))
    differing = sorted(i for i in theirs.keys() | ours.keys() if theirs.get(i) != ours.get(i))
    if differing:
        i = differing[0]
        raise ValueError(
            f"sections.Teacher.models: got {name!r} ({teacher.name_or_path}) whose tokenizer has "
            f"{token_text(theirs.get(i))} as token {i}, wanted the policy's ({own.name_or_path}), which has "
            f"{token_text(ours.get(i))}; {len(differing)} of {len(theirs.keys() | ours.keys())} tokens differ"
        )


def token_text(token: str | None) -> str:
    """A token for people; None is one that is not there."""
    return "nothing" if token is None else repr(token)


def check_keys(problems: Sequence[Problem], models: Mapping[str, object], key: TeacherKey) -> None:
    """Raise ValueError for a problem whose key names no teacher.

    Args:
        problems: those of the training.
        models: teachers by key.
        key: problem -> which teacher.
    """
    for problem in problems:
        if (found := key(problem)) not in models:
            raise ValueError(
                f"sections.Teacher.key: got {found!r} for the problem {problem.prompt[:60]!r}, wanted one of "
                f"{', '.join(map(repr, models))}, the keys of sections.Teacher.models"
            )


def reads_gap(distillation: Callable[[Tensor, Tensor, Tensor], Tensor]) -> bool:
    """Whether advantages move with the log-prob gap to the teacher, found by asking the function.

    Args:
        distillation: (advantage [P, G, T], gap [P, G, T], mask [P, G, T]) -> [P, G, T].
    """
    adv = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]]], dtype=torch.float64)
    gap = torch.tensor([[[0.3, -0.1], [0.2, -0.7]]], dtype=torch.float64)
    ask = partial(distillation, adv)
    everything = torch.ones_like(adv, dtype=torch.bool)
    return not torch.equal(ask(gap, everything), ask(0 * gap, everything))


def check_distillation(
    distillation: Callable[[Tensor, Tensor, Tensor], Tensor], teacher: object | None, *, also: bool
) -> None:
    """Raise ValueError for an algorithm that learns from a teacher in a run without one.

    Args:
        distillation: `step.Algorithm.distillation`.
        teacher: `train.train.teacher`.
        also: whether the objective looks at a teacher, too.
    """
    if teacher is None and (also or reads_gap(distillation)):
        raise ValueError(
            "train.train.teacher: got None with an algorithm that learns from a teacher, wanted one: "
            "--gin_file scale/teacher.gin --gin_param TEACHER='FOLDER', or step.Algorithm.distillation = "
            "@distillation.no_teacher and an objective without one"
        )


def open_teachers(sources: Mapping[str, hf.ModelSource], own: PreTrainedTokenizerBase) -> dict[str, str]:
    """The folder of each teacher, made or found, once its tokenizer has proven to be the policy's.

    Args:
        sources: of the teachers' models, by key.
        own: tokenizer of the policy.

    Returns:
        Folders by key.

    Raises:
        ValueError: a token differs.
    """
    folders = {name: source.folder() for name, source in sources.items()}
    for name, folder in folders.items():
        check_same_tokenizer(name, hf.load_tokenizer(folder), own)
    return folders
