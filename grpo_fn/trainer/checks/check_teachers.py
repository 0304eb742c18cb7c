"""What is asked about teachers before any weights are loaded: vocabulary, template, positions, keys, prompts."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.partials import uses_of
from grpo_fn.core.problem import Problem
from grpo_fn.shell.model import hf
from grpo_fn.shell.policy.self_teachers import SelfTeacher
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.tasks.privileged import PrivilegedPrompt
from grpo_fn.trainer.sections import Settings
from grpo_fn.trainer.teachers import EncodePrompt, TeacherKey, stand_ins

COMPARED = 64  # prompts that both chat templates are laid over


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


def open_teachers(
    sources: Mapping[str, hf.ModelSource], own: PreTrainedTokenizerBase
) -> dict[str, tuple[str, PreTrainedTokenizerBase]]:
    """The folder of each teacher, made or found, and its tokenizer, which has proven to be the policy's.

    Args:
        sources: of the teachers' models, by key.
        own: tokenizer of the policy.

    Returns:
        Folder and tokenizer by key.

    Raises:
        ValueError: a token differs.
    """
    folders = {name: source.folder() for name, source in sources.items()}
    found = {name: (folder, hf.load_tokenizer(folder)) for name, folder in folders.items()}
    for name, (_, theirs) in found.items():
        check_same_tokenizer(name, theirs, own)
    return found


def template_difference(
    name: str,
    teacher: PreTrainedTokenizerBase,
    own: PreTrainedTokenizerBase,
    encode: hf.Encode,
    prompts: Iterable[str],
) -> str | None:
    """Where a teacher's own chat template would give other tokens than the policy's, in words; None where it does not.

    Args:
        name: key of the teacher.
        teacher: its tokenizer.
        own: the policy's.
        encode: (tokenizer, prompt) -> token ids.
        prompts: of the problems; the first COMPARED are looked at.
    """
    for prompt in islice(prompts, COMPARED):
        ours = encode(own, prompt)
        try:
            theirs = encode(teacher, prompt)
        except ValueError as error:
            return _said_of(name, f"that it cannot read {prompt[:60]!r} ({error})")
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            at = min(len(theirs), len(ours)) if at is None else at
            got, wanted = (own.convert_ids_to_tokens(ids[at]) if at < len(ids) else None for ids in (theirs, ours))
            found = f"{token_text(got)} as token {at} of {prompt[:60]!r}, the policy's {token_text(wanted)}"
            return _said_of(name, found)
    return None


def _said_of(name: str, found: str) -> str:
    return (
        f"teacher {name!r}: its own chat template has {found}; it reads the policy's prompt, unless "
        "sections.Teacher.encode_prompt = @hf.encode_prompt gives it its own"
    )


def check_teacher_prompts(
    problems: Sequence[Problem],
    prompt: PrivilegedPrompt | None,
    encode: EncodePrompt,
    *,
    name: str,
    size: int,
    parts: Sequence[str],
    max_new_tokens: int,
    reach: int | None,
) -> None:
    """Raise ValueError for a problem whose privileged prompt is no text, or leaves no space for the completion.

    What a prompt takes from another sample is counted as `max_new_tokens` tokens, as long as one may be.

    Args:
        problems: those of the training.
        prompt: `sections.Teacher.prompt`; None: the problem's own.
        encode: a prompt to token ids, of this teacher.
        name: key of the teacher.
        size: samples of each problem.
        parts: names of the reward's parts.
        max_new_tokens: most tokens of a completion.
        reach: most tokens of a row that the teacher reads; None: no limit.
    """
    length = cache(lambda text: len(encode(text)))
    plain, long = (stand_ins(size, parts, text) for text in ("x", "x x x x x x x x"))
    for problem in problems:
        tried = [problem.prompt if prompt is None else prompt(problem, one, 0) for one in (plain, long)]
        if odd := [one for one in tried if not isinstance(one, str | None)]:
            raise ValueError(
                f"sections.Teacher.prompt: got a {type(odd[0]).__name__} for the problem {problem.prompt[:60]!r}, "
                "wanted a prompt, or None for a sample that is not taught"
            )
        if tried[0] is None:
            continue
        needs = length(tried[0]) + max_new_tokens * (1 + (tried[0] != tried[1]))
        if reach is not None and needs > reach:
            raise ValueError(
                f"sections.Teacher.prompt: got up to {needs} tokens of prompt and completion for the teacher {name!r} "
                f"and the problem {problem.prompt[:60]!r}, wanted at most the {reach} positions that it reads"
            )


def find_teachers(settings: Settings, own: PretrainedConfig) -> dict[str, tuple[hf.ModelSource, PretrainedConfig]]:
    """Those that are loaded, by key. Raises ValueError for one that cannot read what the policy writes."""
    if settings.teacher is None:
        return {}
    for teacher in settings.teacher.on_servers().values():
        teacher.check_temperature(settings.sampling.temperature)
    found = {name: (source, source.config()) for name, source in settings.teacher.sources().items()}
    shapes = {name: config for name, (_, config) in found.items()}
    check_teacher_shapes(shapes, own, settings.sampling.max_total_tokens)
    return found


def uses_teacher(settings: Settings, kind: SelfTeacher) -> bool:
    """Whether a teacher is the policy itself, in this way."""
    return settings.teacher is not None and any(uses_of(kind, settings.teacher.of_policy()))
