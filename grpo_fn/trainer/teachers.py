"""Teachers of on-policy distillation: models that give log-probs of what the policy sampled.

A teacher is another model, frozen; the policy itself; or a model on a vLLM server. It reads the
policy's prompt, or one that has more in it (`privileged`), before the same sampled tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, zip_longest
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.batch import change_prompts, restore_places, select_groups
from grpo_fn.core.partials import uses_of
from grpo_fn.core.problem import Problem
from grpo_fn.core.types import Groups, Rollout
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.fsdp import FSDPPolicy, ReferenceModel
from grpo_fn.shell.policy.load_and_shard import LoadedModel
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.shell.vllm.served_teacher import VllmTeacher
from grpo_fn.shell.world import World
from grpo_fn.tasks.privileged import PrivilegedPrompt, Sample
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.sections import SelfTeacher, Settings, Teacher

TeacherLogp = Callable[[Rollout], Tensor]  # of one teacher: log-probs of the sampled tokens, [B T]
EncodePrompt = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class PromptChange:
    """The prompts that a teacher reads in place of the policy's."""

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
    return "teacher"


def teacher_of_field(problem: Problem, *, name: str) -> str:
    """A teacher by a field of the problem: the one that `sections.Teacher.models` has under the field's value.

    Args:
        problem: with the field in its `meta`.
        name: of the field: "task", "source", "subject".

    Returns:
        The field's value as a text; "" for a problem that has no such field.
    """
    return str(problem.meta.get(name, ""))


# -- the policy as its own teacher: what it knows better comes with the prompt that it reads (`sections.Teacher.prompt`)


def live(policy: FSDPPolicy, start: ReferenceModel | None) -> ReferenceModel:
    """The policy as it is when the teacher's log-probs are computed, before the step's update. It costs no memory.

    Args:
        policy: the policy.
        start: the frozen start model; not read.

    Returns:
        The policy's model.
    """
    return partial(nullcontext, policy.logprob_model)


def start_model(policy: FSDPPolicy, start: ReferenceModel | None) -> ReferenceModel:
    """The policy as it began: the frozen copy that a KL to a reference needs, too; with adapters, the model without.

    Args:
        policy: the policy; not read.
        start: the frozen start model.

    Returns:
        The frozen start model.

    Raises:
        ValueError: none was kept.
    """
    if start is None:
        raise ValueError("teachers.start_model: got a run that keeps no frozen start model, expected one")
    return start


def moving_average(policy: FSDPPolicy, start: ReferenceModel | None, *, rate: float) -> ReferenceModel:
    """The exponential moving average of the policy's weights: e <- e + rate (theta - e) after each update.

    SDFT (arXiv:2601.19897), SDPO (arXiv:2601.20802); from TRL's documentation. It begins as the policy does. Kept in
    float32, of what trains alone, spread over the devices as the policy is, and in the checkpoints.

    Args:
        policy: the policy.
        start: the frozen start model; not read.
        rate: share of the new weights, above 0 and up to 1; 1 is the live policy.

    Returns:
        The policy's model under the averaged weights.

    Raises:
        ValueError: a rate that is none.
    """
    return policy.keep_average(rate)


# -- the teachers' log-probs of a step


def teacher_logp(
    groups: Groups,
    logp_old: Float[Tensor, "B T"],
    *,
    teachers: Mapping[str, TeacherLogp],
    changes: Mapping[str, PromptChange],
    key: Callable[[Problem], str],
) -> Float[Tensor, "B T"]:
    """Log-probs of the sampled tokens, each row's under the teacher of its problem."""
    size = groups.reward.value.shape[1]
    keys = [key(problem) for problem in groups.problems]
    out = torch.zeros_like(groups.rollout.logp_sampled)
    for name in sorted({*keys}):
        problems = [p for p, other in enumerate(keys) if other == name]
        rows = [p * size + g for p in problems for g in range(size)]
        part = select_groups(groups, problems)
        if name in changes:
            out[rows] = logp_behind_prompts(part, logp_old[rows], teacher=teachers[name], change=changes[name])
        else:
            out[rows] = teachers[name](part.rollout)
    return out


def logp_behind_prompts(
    groups: Groups, logp_old: Float[Tensor, "B T"], *, teacher: TeacherLogp, change: PromptChange
) -> Float[Tensor, "B T"]:
    """Log-probs of the sampled tokens under a teacher that reads other prompts before them.

    A row is not taught where there is no prompt for it, or where prompt and completion are more tokens than the
    teacher reads.
    """
    rollout = groups.rollout
    out = torch.where(rollout.mask, logp_old, torch.zeros_like(logp_old))
    places = torch.arange(rollout.mask.shape[1], device=rollout.mask.device) * rollout.mask
    first = rollout.mask.long().argmax(-1)
    length = (places.amax(-1) + 1 - first).tolist()
    encode, limit = cache(change.encode), change.positions
    prompts = {
        b: encode(prompt)
        for b, prompt in enumerate(teacher_prompts(groups, change.prompt))
        if prompt is not None and (limit is None or len(encode(prompt)) + length[b] <= limit)
    }
    if rows := [*prompts]:
        part = Rollout(*(x[rows] for x in rollout[:4]), tuple(rollout.text[b] for b in rows))
        out[rows] = restore_places(teacher(change_prompts(part, [*prompts.values()])), [*prompts.values()], part)
    return out


def teacher_prompts(groups: Groups, prompt: PrivilegedPrompt | None) -> list[str | None]:
    """The prompt that the teacher reads before each row's tokens; None for a row that is not taught."""
    size, reward = groups.reward.value.shape[1], groups.reward
    value, valid = reward.value.tolist(), reward.valid.tolist()
    parts = {name: x.tolist() for name, x in reward.parts.items()}
    prompts: list[str | None] = []
    for p, problem in enumerate(groups.problems):
        samples = [
            Sample(
                groups.rollout.text[p * size + g],
                value[p][g] if valid[p][g] else None,
                {name: x[p][g] for name, x in parts.items()},
            )
            for g in range(size)
        ]
        prompts += [problem.prompt if prompt is None else prompt(problem, samples, g) for g in range(size)]
    return prompts


def ask_server(served: VllmTeacher, world: World, rollout: Rollout) -> Float[Tensor, "B T"]:
    """Log-probs of a rollout's tokens from vLLM servers, which one rank requests for all."""
    return world.agree_at_length(partial(served.logp, rollout), what="the teacher's log-probs from its servers")


# -- checks before any weights are loaded: vocabulary, template, positions, keys, prompts


COMPARED = 64  # prompts that both chat templates are laid over


def check_teacher_shapes(
    models: Mapping[str, PretrainedConfig], own: PretrainedConfig, max_total_tokens: int | None
) -> None:
    """Raise ValueError for a teacher that cannot read every token, or not as many of them, as the policy writes."""
    longest = positions(own) if max_total_tokens is None else max_total_tokens
    for name, config in models.items():
        rows, least = config.get_text_config().vocab_size, own.get_text_config().vocab_size
        if rows < least:
            raise ValueError(
                f"sections.Teacher.models: got {name!r} with {rows} rows in its embedding, expected at least the "
                f"policy's {least}, as the policy can sample each of them"
            )
        reach = positions(config)
        if reach is not None and (longest is None or reach < longest):
            raise ValueError(
                f"sections.Teacher.models: got {name!r}, which reads {reach} positions, expected "
                f"{longest or 'no limit'}, or sections.Sampling.max_total_tokens = {reach}"
            )


def check_same_tokenizer(name: str, teacher: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
    """Raise ValueError, naming the first difference, unless both have the same token for every id."""
    tokens, own_tokens = ({i: token for token, i in x.get_vocab().items()} for x in (teacher, own))
    ids = tokens.keys() | own_tokens.keys()
    if differing := sorted(i for i in ids if tokens.get(i) != own_tokens.get(i)):
        i = differing[0]
        raise ValueError(
            f"sections.Teacher.models: got {name!r} ({teacher.name_or_path}) whose tokenizer has "
            f"{token_text(tokens.get(i))} as token {i}, expected the policy's ({own.name_or_path}), which has "
            f"{token_text(own_tokens.get(i))}; {len(differing)} of {len(ids)} tokens differ"
        )


def token_text(token: str | None) -> str:
    """A token for people; None is one that is not there."""
    return "nothing" if token is None else repr(token)


def check_keys(problems: Sequence[Problem], models: Mapping[str, object], key: Callable[[Problem], str]) -> None:
    """Raise ValueError for a problem whose key names no teacher."""
    for problem in problems:
        if (name := key(problem)) not in models:
            raise ValueError(
                f"sections.Teacher.key: got {name!r} for the problem {problem.prompt[:60]!r}, expected one of "
                f"{', '.join(map(repr, models))}, the keys of sections.Teacher.models"
            )


def template_difference(
    name: str,
    teacher: PreTrainedTokenizerBase,
    own: PreTrainedTokenizerBase,
    encode: hf.Encode,
    prompts: Iterable[str],
) -> str | None:
    """The first token at which the teacher's chat template differs from the policy's, in words; None if it does not."""
    for prompt in islice(prompts, COMPARED):
        own_ids = encode(own, prompt)
        try:
            ids = encode(teacher, prompt)
        except ValueError as error:
            difference = f"that it cannot read {prompt[:60]!r} ({error})"
        else:
            if ids == own_ids:
                continue
            at = next(i for i, (a, b) in enumerate(zip_longest(ids, own_ids)) if a != b)
            token, own_token = (own.convert_ids_to_tokens(x[at]) if at < len(x) else None for x in (ids, own_ids))
            difference = f"{token_text(token)} as token {at} of {prompt[:60]!r}, the policy's {token_text(own_token)}"
        return (
            f"teacher {name!r}: its own chat template has {difference}; it reads the policy's prompt, unless "
            "sections.Teacher.encode_prompt = @hf.encode_prompt gives it its own"
        )
    return None


def check_teacher_prompts(
    problems: Sequence[Problem],
    change: PromptChange,
    *,
    name: str,
    size: int,
    parts: Sequence[str],
    max_new_tokens: int,
) -> None:
    """Raise ValueError for a problem whose privileged prompt is no text, or leaves no space for the completion.

    What a prompt takes from another sample is counted as `max_new_tokens` tokens, as long as one may be.
    """
    prompt, reach = change.prompt, change.positions
    length = cache(lambda text: len(change.encode(text)))
    best = dict.fromkeys(parts, float("inf"))  # right by any measure
    plain, long = ([Sample(text, float("inf"), best)] * max(2, size) for text in ("x", "x x x x x x x x"))
    for problem in problems:
        tried = [problem.prompt if prompt is None else prompt(problem, one, 0) for one in (plain, long)]
        if odd := [one for one in tried if not isinstance(one, str | None)]:
            raise ValueError(
                f"sections.Teacher.prompt: got a {type(odd[0]).__name__} for the problem {problem.prompt[:60]!r}, "
                "expected a prompt, or None for a sample that is not taught"
            )
        if tried[0] is None:
            continue
        needs = length(tried[0]) + max_new_tokens * (1 + (tried[0] != tried[1]))
        if reach is not None and needs > reach:
            raise ValueError(
                f"sections.Teacher.prompt: got up to {needs} tokens of prompt and completion for the teacher {name!r} "
                f"and the problem {problem.prompt[:60]!r}, expected at most the {reach} positions that it reads"
            )


def find_teachers(settings: Settings, own: PretrainedConfig) -> dict[str, tuple[hf.ModelSource, PretrainedConfig]]:
    """Those that are loaded, by key. Raises ValueError for one that cannot read what the policy writes."""
    if settings.teacher is None:
        return {}
    check_self_teachers(settings.teacher)
    for teacher in settings.teacher.on_servers().values():
        teacher.check_temperature(settings.sampling.temperature)
    loaded = {name: (source, source.config()) for name, source in settings.teacher.sources().items()}
    shapes = {name: config for name, (_, config) in loaded.items()}
    check_teacher_shapes(shapes, own, settings.sampling.max_total_tokens)
    return loaded


def check_self_teachers(how: Teacher) -> None:
    """Raise ValueError for the live policy with its own prompt, and for several moving averages."""
    if how.prompt is None and any(uses_of(live, how.models)):
        raise ValueError(
            "sections.Teacher.models: got teachers.live, the policy as it is, with the prompt that the policy reads, "
            "from which nothing is learned; expected a sections.Teacher.prompt, or another teacher"
        )
    if len([*uses_of(moving_average, how.models)]) > 1:
        raise ValueError("sections.Teacher.models: got several teachers.moving_average, expected one at most")


def uses_teacher(settings: Settings, kind: SelfTeacher) -> bool:
    """Whether a teacher is the policy itself, in this way."""
    return settings.teacher is not None and any(uses_of(kind, settings.teacher.of_policy()))


# -- the teachers of a run


class PreparedTeachers(NamedTuple):
    """The facts about the teachers."""

    folders: Mapping[str, str]  # of those that are loaded, by key
    changes: Mapping[str, PromptChange]  # of those that read other prompts than the policy, by key
    notes: Sequence[str]  # for people


def prepare_teachers(
    settings: Settings,
    checked: ValidatedPlan,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    main: bool,
) -> PreparedTeachers:
    """Find the teachers and look at all that they are to read."""
    how = settings.teacher
    if how is None:
        return PreparedTeachers({}, {}, ())
    check_keys(drawn, how.models, how.key)
    folders = {name: source.folder() for name, (source, _) in checked.teachers.items()}
    tokenizers = {name: hf.load_tokenizer(folder) for name, folder in folders.items()}
    for name, theirs in tokenizers.items():
        check_same_tokenizer(name, theirs, tokenizer)
    if main:
        vocabulary = checked.config.get_text_config().vocab_size
        longest = settings.sampling.max_total_tokens or positions(checked.config)  # of a row; None: no limit
        for name, served in how.on_servers().items():
            served.check_server(name, tokenizer, vocabulary, longest)
    changes = prompt_changes(how, settings, checked, tokenizers, tokenizer)
    for name, change in changes.items():
        check_teacher_prompts(
            [problem for problem in drawn if how.key(problem) == name],
            change,
            name=name,
            size=settings.algorithm.group_size,
            parts=checked.parts,
            max_new_tokens=settings.sampling.max_new_tokens,
        )
    encode, prompts = settings.data.encode_prompt, [problem.prompt for problem in drawn]
    differing = (
        template_difference(name, theirs, tokenizer, encode, prompts)
        for name, theirs in tokenizers.items()
        if how.encode_prompt is None
    )
    return PreparedTeachers(folders, changes, [*filter(None, differing)])


def prompt_changes(
    how: Teacher,
    settings: Settings,
    checked: ValidatedPlan,
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
    own: PreTrainedTokenizerBase,
) -> dict[str, PromptChange]:
    """The prompts of each teacher; none if all of them read the policy's."""
    if how.prompt is None and how.encode_prompt is None:
        return {}
    encode = how.encode_prompt or settings.data.encode_prompt
    reach = dict.fromkeys(how.models, positions(checked.config))
    reach |= {name: positions(config) for name, (_, config) in checked.teachers.items()}
    reach |= {name: served.max_model_len - 1 for name, served in how.on_servers().items()}
    return {
        name: PromptChange(
            prompt=how.prompt,
            encode=partial(encode, own if how.encode_prompt is None else tokenizers.get(name, own)),
            positions=reach[name],
        )
        for name in how.models
    }


def teacher_of_run(
    how: Teacher | None, policy: FSDPPolicy, loaded: LoadedModel, taught: PreparedTeachers, world: World
) -> Callable[[Groups, Tensor], Tensor] | None:
    """The function by which a step gets the teachers' log-probs."""
    if how is None:
        return None
    if how.relative_entropy:
        (policy.entropy_teacher,) = loaded.teachers.values()
    models = {**loaded.teachers, **{name: f(policy, loaded.reference_model) for name, f in how.of_policy().items()}}
    ask: dict[str, TeacherLogp] = {name: partial(policy.logp_under, model) for name, model in models.items()}
    ask |= {name: partial(ask_server, served, world) for name, served in how.on_servers().items()}
    return partial(teacher_logp, teachers=ask, changes=taught.changes, key=how.key)
