"""The teachers of a run: looked at before any weights are loaded, what each is to read, and how it is asked."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Groups
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import LoadedModel
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.shell.world import World
from grpo_fn.trainer.checks.check_teachers import (
    check_keys,
    check_teacher_prompts,
    open_teachers,
    template_difference,
)
from grpo_fn.trainer.checks.validate import ValidatedPlan
from grpo_fn.trainer.sections import Settings, Teacher
from grpo_fn.trainer.teachers import PromptChange, TeacherLogp, ask_server, teacher_logp


class PreparedTeachers(NamedTuple):
    """What is known of the teachers."""

    folders: Mapping[str, str]  # of those that are loaded, by key
    changes: Mapping[str, PromptChange]  # of those that read other prompts than the policy, by key
    notes: Sequence[str]  # for people


NO_TEACHERS = PreparedTeachers({}, {}, ())


def prepare_teachers(
    settings: Settings,
    checked: ValidatedPlan,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    main: bool,
) -> PreparedTeachers:
    """Find the teachers and look at all that they are to read.

    Args:
        settings: of the run.
        checked: what validation found out.
        drawn: the problems that are trained on.
        tokenizer: the policy's.
        main: whether this rank is the one that asks servers.

    Returns:
        Folders, prompts, and notes about templates.

    Raises:
        ValueError: a problem whose key names no teacher, a tokenizer or a server that does not agree with the policy,
            or a prompt that leaves no space for the completion.
    """
    how = settings.teacher
    if how is None:
        return NO_TEACHERS
    check_keys(drawn, how.models, how.key)
    opened = open_teachers({name: source for name, (source, _) in checked.teachers.items()}, tokenizer)
    if main:
        vocabulary = checked.config.get_text_config().vocab_size
        for name, served in how.on_servers().items():
            served.check_server(name, tokenizer, vocabulary, longest_row(settings, checked))
    changes = prompt_changes(how, settings, checked, {name: theirs for name, (_, theirs) in opened.items()}, tokenizer)
    for name, change in changes.items():
        check_teacher_prompts(
            [problem for problem in drawn if how.key(problem) == name],
            change.prompt,
            change.encode,
            name=name,
            size=settings.algorithm.group_size,
            parts=checked.parts,
            max_new_tokens=settings.sampling.max_new_tokens,
            reach=change.positions,
        )
    encode, prompts = settings.data.encode_prompt, [problem.prompt for problem in drawn]
    differing = (
        template_difference(name, theirs, tokenizer, encode, prompts)
        for name, (_, theirs) in opened.items()
        if how.encode_prompt is None
    )
    return PreparedTeachers({name: folder for name, (folder, _) in opened.items()}, changes, [*filter(None, differing)])


def prompt_changes(
    how: Teacher,
    settings: Settings,
    checked: ValidatedPlan,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    own: PreTrainedTokenizerBase,
) -> dict[str, PromptChange]:
    """What each teacher reads; none where all of them read what the policy reads."""
    if how.prompt is None and how.encode_prompt is None:
        return {}
    encode = how.encode_prompt or settings.data.encode_prompt
    return {
        name: PromptChange(
            prompt=how.prompt,
            encode=partial(encode, own if how.encode_prompt is None else tokenizers.get(name, own)),
            positions=teacher_positions(name, how, checked),
        )
        for name in how.models
    }


def teacher_positions(name: str, how: Teacher, checked: ValidatedPlan) -> int | None:
    """Most tokens that a teacher reads; None: no limit."""
    if name in checked.teachers:
        return positions(checked.teachers[name][1])
    served = how.on_servers()
    return served[name].max_model_len - 1 if name in served else positions(checked.config)


def longest_row(settings: Settings, checked: ValidatedPlan) -> int | None:
    """Most tokens of a row that the policy writes; None: no limit."""
    longest = settings.sampling.max_total_tokens
    return positions(checked.config) if longest is None else longest


def teacher_of_run(
    how: Teacher | None, policy: FSDPPolicy, loaded: LoadedModel, taught: PreparedTeachers, world: World
) -> Callable[[Groups, Tensor], Tensor] | None:
    """What a step asks for the teacher's log-probs."""
    if how is None:
        return None
    if how.relative_entropy:
        (policy.entropy_teacher,) = loaded.teachers.values()
    models = {**loaded.teachers, **{name: f(policy, loaded.reference_model) for name, f in how.of_policy().items()}}
    ask: dict[str, TeacherLogp] = {name: partial(policy.logp_under, model) for name, model in models.items()}
    ask |= {name: partial(ask_server, served, world) for name, served in how.on_servers().items()}
    return partial(teacher_logp, teachers=ask, changes=taught.changes, key=how.key)
