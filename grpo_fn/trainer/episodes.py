"""Episodes of a run: its environment, tried out before anything expensive starts, and its worker processes."""

from contextlib import nullcontext

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Problem
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.episodes.chat_format import ChatFormat
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.episodes.tape import Tape
from grpo_fn.shell.reward_workers.environment_pool import EnvironmentPool
from grpo_fn.trainer.sections import Episodes, Sampling

TEXTS = ("", "text", "<tool_call>", "\N{REPLACEMENT CHARACTER}")  # an environment answers to any message


def environment_pool(episodes: Episodes) -> EnvironmentPool:
    """The worker processes of the environment. A context manager."""
    knobs = {name: getattr(episodes, name) for name in ("workers", "deadline", "memory_mb")}
    return EnvironmentPool(episodes.environment, **knobs)


def open_environments(
    episodes: Episodes | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[Environments | None, EnvironmentPool | nullcontext]:
    """What samplers need of the environment, and the context in which its workers live; None where rows have one turn.

    Raises ValueError for a tokenizer in whose chat format turns cannot be appended exactly.
    """
    if episodes is None:
        return None, nullcontext()
    chat = episodes.chat_format(tokenizer)
    if not isinstance(chat, ChatFormat):
        raise ValueError(
            f"sections.Episodes.chat_format: got a {type(chat).__name__}, wanted a ChatFormat: an object "
            "with end, open, extend and parse"
        )
    pool = environment_pool(episodes)
    made = Environments(
        name=environment_name(episodes),
        pure=episodes.environment.pure,
        caller=pool,
        chat=chat,
        max_turns=episodes.max_turns,
        max_turn_tokens=episodes.max_turn_tokens,
        fails=episodes.on_failure,
        answer_steps=episodes.answer_steps,
        tape=Tape(),
    )
    return made, pool


def environment_name(episodes: Episodes) -> str:
    """The module of the environment, which is named after it."""
    fn, _ = function_and_knobs(episodes.environment.step)
    return f"{fn.__module__}.{getattr(fn, '__qualname__', type(fn).__name__)}"


def check_episodes(episodes: Episodes | None, sampling: Sampling, problem: Problem) -> None:
    """Raise ValueError where limits do not fit, and unless the environment answers a problem and any text.

    It is asked in a worker process, as in the run; what is wrong there for one text only is no error here, as a row
    bears it.
    """
    if episodes is None:
        return
    if sampling.stop:
        raise ValueError(
            f"sections.Sampling.stop: got {tuple(sampling.stop)} with sections.Episodes, wanted (): a turn ends with "
            "the end token of its chat format"
        )
    if sampling.max_total_tokens is None:
        raise ValueError(
            "sections.Sampling.max_total_tokens: got None with sections.Episodes, wanted the most tokens of an "
            "episode, opening, turns and observations together: every slot holds as many"
        )
    name = environment_name(episodes)
    with environment_pool(episodes) as pool:
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
