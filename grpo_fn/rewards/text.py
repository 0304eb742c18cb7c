"""Is the completion the text that was wanted, word for word?"""

from grpo_fn.core.problem import Completion, Problem


def same_text(problem: Problem, completion: Completion) -> float:
    """1 iff the completion ended by itself and is the answer, white space around them aside; else 0.

    Args:
        problem: its answer is the text that is wanted.
        completion: the completion that is judged.

    Returns:
        1.0 or 0.0.
    """
    return float(not completion.truncated and completion.text.strip() == problem.answer.strip())
