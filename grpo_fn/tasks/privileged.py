"""Privileged prompts: what a teacher reads before the tokens that the policy sampled from the problem's own prompt.

Each is a pure function `(problem, samples, place, *, knobs) -> prompt | None`.

    problem    the problem, with its answer
    samples    all samples of its group
    place      place of the sample that is taught, whose prompt is made
    template   text with {prompt} and {privileged}; other fields raise ValueError
    returns    the prompt; None: that sample is not taught
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
    """The prompt with the problem's answer; None for a problem without one.

    RLSD (arXiv:2604.03128; from ms-swift's code), OPSD (arXiv:2601.18734).
    """
    return add_privileged(problem.prompt, template, problem.answer)


def with_field(problem: Problem, samples: Sequence[Sample], place: int, *, template: str, name: str) -> str | None:
    """The prompt with a field of the problem's `meta`, a worked solution or a demonstration; None where it is empty.

    SDFT (arXiv:2601.19897; from the documentation of TRL and Tinker).

    Args:
        name: name of the field.
    """
    return add_privileged(problem.prompt, template, str(problem.meta.get(name) or ""))


def with_right_sibling(
    problem: Problem, samples: Sequence[Sample], place: int, *, template: str, least_reward: float
) -> str | None:
    """The prompt with the first other sample of the group that earned at least `least_reward`.

    SDPO (arXiv:2601.20802; from TRL's code): what one sample found out teaches the others, and not itself.

    Args:
        least_reward: least reward of a sample that teaches.
    """
    others = (sample for i, sample in enumerate(samples) if i != place)
    right = (sample.text for sample in others if sample.reward is not None and sample.reward >= least_reward)
    return add_privileged(problem.prompt, template, next(right, ""))


def with_feedback(problem: Problem, samples: Sequence[Sample], place: int, *, template: str) -> str | None:
    """The prompt with the sample itself and what each part of its reward was.

    SDPO (arXiv:2601.20802), with the graders' numbers as feedback: `name: value`, a line each. None for a sample that
    could not be scored.
    """
    sample = samples[place]
    if sample.reward is None:
        return None
    lines = [f"{name}: {value:g}" for name, value in sample.parts.items()] or [f"reward: {sample.reward:g}"]
    return add_privileged(problem.prompt, template, "\n".join([sample.text, "", *lines]))


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
