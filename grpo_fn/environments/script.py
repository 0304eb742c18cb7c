"""Episodes in which the policy's messages are known in advance."""

from collections.abc import Sequence

from grpo_fn.core.environment import Environment, Message, Start, Step
from grpo_fn.core.problem import Problem


def play_script(
    environment: Environment, problem: Problem, messages: Sequence[Message], key: int
) -> tuple[Start, tuple[Step, ...]]:
    """The episode in which the policy writes these messages, up to the last one or the end.

    Args:
        environment: the environment.
        problem: the problem.
        messages: of the policy, one a turn.
        key: seed of the episode; turn n has `key + n`, so that a turn that ignores the state still differs.

    Returns:
        The start, and the answer to each message that the episode took.
    """
    start = environment.start(problem, key)
    steps: list[Step] = []
    for turn, message in enumerate(messages, 1):
        steps.append(environment.step(steps[-1].state if steps else start.state, message, key + turn))
        if steps[-1].done:
            break
    return start, tuple(steps)
