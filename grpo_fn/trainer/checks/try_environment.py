"""An environment tried out before anything expensive starts: it has to begin an episode, and to answer any text."""

from collections.abc import Callable, Sequence
from heapq import nlargest

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.tasks import overlong
from grpo_fn.tasks.overlong import Length
from grpo_fn.tasks.task import Task
from grpo_fn.trainer.sections import Episodes

TEXTS = ("", "text", "<tool_call>", "\N{REPLACEMENT CHARACTER}")  # an environment answers to any message
LONGEST = 4  # problems whose openings are counted


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


def check_openings(
    episodes: Episodes | None, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, limit: int
) -> None:
    """Raise ValueError where an opening leaves no token for a turn, among the problems with the longest prompts.

    Others are found out when they are sampled, and those of environments that are not pure, as a replay is without
    their tools. One that cannot begin is no error here: the tape of a replay may say how it began.
    """
    if episodes is None or not episodes.environment.pure:
        return
    longest = nlargest(LONGEST, problems, key=lambda problem: len(problem.prompt))
    with episodes.pool() as pool:
        chat = episodes.environments(tokenizer, pool).chat
        for problem, future in [(problem, pool.start(problem, 0)) for problem in longest]:
            begun = future.result()
            opening = [] if begun.failure else chat.open(begun.messages)
            if len(opening) > limit:
                raise ValueError(
                    f"sections.Episodes.environment: {episodes.name}: got an opening of {len(opening)} tokens for "
                    f"problem {problem.uid}, wanted at most {limit} (sections.Sampling.max_total_tokens less one for "
                    f"a turn): {begun.messages[0].content[:80]!r}"
                )


def fitting_episodes(
    rule: Callable[..., tuple[Task, int]],
    episodes: Episodes,
    task: Task,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    length: Length,
    limit: int,
) -> Task:
    """The task without the episodes that `overlong_prompts` leaves out by the length of their openings."""
    refuses = function_and_knobs(rule)[0] is overlong.refuse
    if not episodes.environment.pure:
        if drawn and not task.rows:
            overlong.refuse(task._replace(rows=tuple(drawn)), length, limit)
        left, count = rule(task, length, limit)
        if count:
            raise ValueError(
                f"sections.Data.overlong_prompts: got a rule that leaves out {count} problems by their prompts, and "
                f"{episodes.name}, which is not pure, wanted overlong.refuse: what such an environment begins with is "
                "known when it is asked, in the run"
            )
        return left
    if not refuses and task.rows:
        with episodes.pool() as pool:
            task = rule(task, opening_length(episodes.environments(tokenizer, pool)), limit)[0]
    check_openings(episodes, (*(() if task.rows and not refuses else drawn), *task.test), tokenizer, limit)
    return task


def opening_length(environments: Environments) -> Length:
    """Counts the tokens of a problem's opening, once; one that cannot begin has none."""
    known: dict[int, tuple[Problem, int]] = {}  # by identity: the rows of a task have no numbers yet

    def length(problem: Problem) -> int:
        if id(problem) not in known:
            begun = environments.caller.start(problem, 0).result()
            known[id(problem)] = problem, 0 if begun.failure else len(environments.chat.open(begun.messages))
        return known[id(problem)][1]

    return length


def require_answer(what: str, answer: Answer) -> None:
    """Raise ValueError for a failure."""
    if answer.failure:
        raise ValueError(f"{what}: {answer.failure}")
