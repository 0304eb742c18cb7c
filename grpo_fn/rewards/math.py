"""Rewards for math: the verdicts of `grpo_fn.verifier` on the answer of a completion.

    problem      the problem; its answer is the gold, LaTeX or plain text
    completion   the completion with the answer
    returns      1.0, 0.0, or None when the gold itself cannot be parsed

docs/rewards/verifier.md says which answers are equal.
"""

from grpo_fn.core.problem import Completion, Problem
from grpo_fn.verifier import judge
from grpo_fn.verifier.extract import last_value, marked_answer


def correct(problem: Problem, completion: Completion) -> float | None:
    r"""1 iff the marked answer equals the gold and is worked out, else 0; None when the gold itself cannot be parsed.

    The marked answer is the last `\boxed{...}` with those joined to it, or else what follows the last `####`, or else
    the last "the answer is"; nothing within `<think>` is. Of a gold with n parts, n boxes apart are its answer too. A
    last box that never closes, an answer longer than `LONGEST_ANSWER` and no marked answer at all are wrong. To a gold
    that is a plain number a sum or product that is still to be done is no answer; a closed form of it, 5! or i^4, is
    one here and none for `correct_evaluated`.
    """
    return judge(problem.answer, completion.text, marked_answer(completion.text), problem.prompt).closed


def correct_evaluated(problem: Problem, completion: Completion) -> float | None:
    r"""`correct`, and no closed form is left to be evaluated: 120 and not 5!, to a gold of 120.

    A gold that is a plain number gets a number, a fraction or a power. No function may be left that the gold does not
    use itself: where a prompt asks for `\binom{8}{4}`, to copy it is no answer.
    """
    return judge(problem.answer, completion.text, marked_answer(completion.text), problem.prompt).evaluated


def lenient(problem: Problem, completion: Completion) -> float | None:
    """1 iff the answer equals the gold, worked out or not; without a marked answer, the last formula or number."""
    answer = marked_answer(completion.text)
    answer = last_value(completion.text) if answer is None else answer
    return judge(problem.answer, completion.text, answer, problem.prompt).lenient
