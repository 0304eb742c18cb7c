"""An environment tried out before anything expensive starts: it has to begin an episode, and to answer any text."""

from grpo_fn.core.environment import Message
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.trainer.sections import Episodes

TEXTS = ("", "text", "<tool_call>", "\N{REPLACEMENT CHARACTER}")  # an environment answers to any message


def try_environment(episodes: Episodes | None, problem: Problem) -> None:
    """Raise ValueError unless the environment answers a problem and any text.

    It is asked in a worker process, as in the run. What is wrong for one text only is no error here, as a row bears it.
    """
    if episodes is None:
        return
    name = episodes.name
    with episodes.pool() as pool:
        begun = pool.start(problem, 0).result()
        require_answer(f"sections.Episodes.environment: {name}.start of problem {problem.uid}", begun)
        if not begun.messages:
            raise ValueError(f"sections.Episodes.environment: {name}.start: got no messages, wanted what is read first")
        answers = [pool.step(begun.state, Message("assistant", text), 0) for text in TEXTS]
        found = [future.result() for future in answers]
    if all(answer.failure for answer in found):
        require_answer(f"sections.Episodes.environment: {name} of problem {problem.uid}", found[0])
    for answer in found:
        if not answer.failure and not answer.done and not answer.messages:
            raise ValueError(
                f"sections.Episodes.environment: {name}: got a step that is not done and has no messages, wanted an "
                "observation that the policy reads"
            )


def require_answer(what: str, answer: Answer) -> None:
    """Raise ValueError for a failure."""
    if answer.failure:
        raise ValueError(f"{what}: {answer.failure}")
