"""Privileged prompts: what a teacher reads before the tokens that the policy sampled from the problem's own prompt.

Each is a pure function `(problem, samples, place, *, knobs) -> prompt | None`: of the problem, of all samples of its
group and of the place of one of them, whose prompt is made. None: that sample is not taught.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grpo_fn.core.problem import Conversation, Problem, chat_prompt


class Sample(NamedTuple):
    """One sample of a group, as text, with what it earned."""

    text: str
    reward: float | None  # None: it could not be scored
    parts: Mapping[str, float]  # of the reward, by name


PrivilegedPrompt = Callable[[Problem, Sequence[Sample], int], str | None]


def with_answer(problem: Problem, samples: Sequence[Sample], place: int, *, template: str) -> str | None:
    """The prompt with the problem's answer.

    RLSD (arXiv:2604.03128; from ms-swift's code), OPSD (arXiv:2601.18734).

    Args:
        problem: with its answer.
        samples: of its group; not read.
        place: of the sample that is taught; not read.
        template: with {prompt} and {privileged}, which is the answer.

    Returns:
        The prompt; None for a problem without an answer.

    Raises:
        ValueError: a template with other fields.
    """
    return add_privileged(problem.prompt, template, problem.answer)


def with_field(problem: Problem, samples: Sequence[Sample], place: int, *, template: str, name: str) -> str | None:
    """The prompt with a field of the problem's `meta`: a worked solution, a demonstration.

    SDFT (arXiv:2601.19897; from the documentation of TRL and Tinker).

    Args:
        problem: with the field.
        samples: of its group; not read.
        place: of the sample that is taught; not read.
        template: with {prompt} and {privileged}, which is the field's text.
        name: of the field.

    Returns:
        The prompt; None for a problem without that field, or with an empty one.

    Raises:
        ValueError: a template with other fields.
    """
    return add_privileged(problem.prompt, template, str(problem.meta.get(name) or ""))


def with_right_sibling(
    problem: Problem, samples: Sequence[Sample], place: int, *, template: str, least_reward: float
) -> str | None:
    """The prompt with the first other sample of the group that earned at least `least_reward`.

    SDPO (arXiv:2601.20802; from TRL's code): what one sample found out teaches the others, and not itself.

    Args:
        problem: the problem.
        samples: of its group.
        place: of the sample that is taught.
        template: with {prompt} and {privileged}, which is the other sample's text.
        least_reward: of a sample that teaches.

    Returns:
        The prompt; None where no other sample earned that much.

    Raises:
        ValueError: a template with other fields.
    """
    others = (one for i, one in enumerate(samples) if i != place)
    right = (one.text for one in others if one.reward is not None and one.reward >= least_reward)
    return add_privileged(problem.prompt, template, next(right, ""))


def with_feedback(problem: Problem, samples: Sequence[Sample], place: int, *, template: str) -> str | None:
    """The prompt with the sample itself and what each part of its reward was.

    SDPO (arXiv:2601.20802), with the graders' numbers as feedback: `name: value`, a line each.

    Args:
        problem: the problem.
        samples: of its group.
        place: of the sample that is taught, and that the feedback is about.
        template: with {prompt} and {privileged}, which is the sample's text and the feedback.

    Returns:
        The prompt; None for a sample that could not be scored.

    Raises:
        ValueError: a template with other fields.
    """
    mine = samples[place]
    if mine.reward is None:
        return None
    lines = [f"{name}: {value:g}" for name, value in mine.parts.items()] or [f"reward: {mine.reward:g}"]
    return add_privileged(problem.prompt, template, "\n".join([mine.text, "", *lines]))


def add_privileged(prompt: str, template: str, privileged: str) -> str | None:
    """A prompt with a privileged text; of a Conversation its last message, the user's."""
    try:
        tried = [template.format(prompt="", privileged=one) for one in ("a", "b")]
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"template: got {template!r} ({error}), expected {{prompt}} and {{privileged}}") from error
    if tried[0] == tried[1]:
        raise ValueError(f"template: got {template!r}, expected one with {{privileged}}")
    if not privileged:
        return None

    def fill(text: str) -> str:
        return template.format(prompt=text, privileged=privileged)

    return chat_prompt(prompt.messages, fill) if isinstance(prompt, Conversation) else fill(prompt)
