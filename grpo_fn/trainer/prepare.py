"""Problems and demonstrations of a run, looked at before weights are loaded: do they leave tokens for an answer?"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from heapq import nlargest
from typing import NamedTuple

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.problem import Conversation, Problem
from grpo_fn.shell.episodes.episode_rows import Environments
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.demonstrations import check_demonstrations
from grpo_fn.shell.sampler.interface import positions, short_positions
from grpo_fn.tasks import overlong
from grpo_fn.tasks.overlong import Length
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.sections import Data, Episodes, Sampling, Settings

BEGINNING = 8  # characters for each of the model's positions: twice as many tokens as fit, in most languages
LONGEST = 4  # problems whose openings are counted
CHECKED = 64  # prompts of each kind that are looked at for their question
LONG_PROMPT = 100_000  # characters of a prompt that is not looked at for it
DATA, SAMPLING, EVALUATION, ADAPTERS, PROBING, SHOWING, CHOOSING = range(7)  # streams of the run's key


def draws_to_check(settings: Settings, task: Task) -> int:
    """Training problems from the first one on among which are all that the run may sample, an epoch at most.

    A curriculum may choose a single arm all the time; where there are rows, all of them are looked at anyway.
    """
    draws = settings.algorithm.prompts * settings.steps
    if settings.curriculum is not None and not task.rows:
        draws *= len(task.arms)
    return min(task.size, draws)


class PreparedModel(NamedTuple):
    """A model's folder and tokenizer, and the problems whose prompts leave tokens for a completion."""

    folder: str
    tokenizer: PreTrainedTokenizerBase
    task: Task


def prompt_length(
    tokenizer: PreTrainedTokenizerBase, prompt: str, *, encode: hf.Encode, max_positions: int | None
) -> int:
    """The tokens of a prompt; of one whose beginning is more than the model takes, those of its beginning."""
    # A prompt of 50 MB would take minutes to tokenize, and its row is refused or left out all the same.
    if max_positions is not None and len(prompt) > BEGINNING * max_positions:
        beginning = len(encode(tokenizer, prompt[: BEGINNING * max_positions]))
        if beginning > max_positions:
            return beginning
    return len(encode(tokenizer, prompt))


def prompt_limit(sampling: Sampling, max_positions: int | None) -> int | None:
    """Most tokens that a prompt may have, None without a limit.

    Raises ValueError for a `max_total_tokens` beyond the model's positions.
    """
    total = sampling.max_total_tokens
    if total is None:
        return None if max_positions is None else max_positions - sampling.max_new_tokens
    if max_positions is not None and total > max_positions:
        raise ValueError(
            f"sections.Sampling.max_total_tokens: got {total}, expected at most the model's {max_positions} positions"
        )
    return total - 1


def prepare_data(
    source: hf.ModelSource,
    task: Task,
    drawn: Sequence[Problem],
    config: PretrainedConfig,
    data: Data,
    sampling: Sampling,
    episodes: Episodes | None,
) -> PreparedModel:
    """Make the model's folder there, and look at every prompt: those of the task, and those `drawn` from it.

    Raises ValueError for a prompt without tokens, without its question or with tokens that the model does not know, as
    `overlong_prompts` does for one that leaves no tokens, for an episode's opening that leaves none, and for a limit
    beyond the short factors of "longrope".
    """
    if (short := short_positions(config)) is not None and (sampling.max_total_tokens or 0) > short:
        raise ValueError(
            f"sections.Sampling.max_total_tokens: got {sampling.max_total_tokens}, expected at most {short}: longer "
            "rows have other frequencies (longrope), and change those of the rows beside them"
        )
    folder = source.folder()
    tokenizer = hf.load_tokenizer(folder)
    max_positions = positions(config)
    vocabulary = config.get_text_config().vocab_size
    looked_at = [] if episodes else [problem.prompt for problem in (*drawn[:CHECKED], *task.test[:CHECKED])]
    check_prompts(looked_at, tokenizer, data.encode_prompt)

    def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
        ids = data.encode_prompt(tokenizer, prompt)
        hf.check_ids(ids, vocabulary, tokenizer, f"the prompt {prompt[:80]!r}")
        return ids

    of_prompt = cache(partial(prompt_length, tokenizer, encode=encode, max_positions=max_positions))

    def length(problem: Problem) -> int:
        return of_prompt(problem.prompt)

    limit = prompt_limit(sampling, max_positions)
    if episodes is not None:
        if limit is not None:
            task = fitting_episodes(data.overlong_prompts, episodes, task, drawn, tokenizer, length, limit)
        return PreparedModel(folder, tokenizer, task)
    if empty := [problem.prompt for problem in (*drawn, *task.test) if not length(problem)]:
        raise ValueError(
            f"got a prompt of no tokens, {empty[0][:80]!r} with the tokenizer of {folder}, expected at least one: is "
            "the prompt empty, or the folder without the tokenizer's files?"
        )
    if limit is None:
        return PreparedModel(folder, tokenizer, task)
    if drawn and not task.rows:  # made as they are drawn: nothing can be left out
        overlong.refuse(task._replace(rows=tuple(drawn)), length, limit)
    return PreparedModel(folder, tokenizer, data.overlong_prompts(task, length, limit)[0])


# -- prompts that cannot be what was meant


def check_prompts(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, encode: hf.Encode) -> None:
    """Raise ValueError when the policy would not read the questions of the prompts, of which it looks at all.

    A chat template that wants a list of parts, or other fields than role and content, loses them without an error.
    """
    lost: list[str] = []
    by_tokens: dict[tuple[int, ...], str] = {}
    looked_at = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) <= LONG_PROMPT]
    for prompt in looked_at:
        ids = encode(tokenizer, prompt)
        other, reads = by_tokens.setdefault(tuple(ids), prompt), reads_question(tokenizer, prompt, ids)
        lost += [] if reads else [prompt]
        same = f"the same tokens for {other[:80]!r} and {prompt[:80]!r}" if other != prompt and not reads else ""
        all_lost = len(lost) == len(looked_at) and function_and_knobs(encode)[0] in (hf.encode_prompt, hf.with_system)
        if same or all_lost:
            raise ValueError(
                f"sections.Data.encode_prompt: got {same or f'tokens without the question {prompt[:80]!r}'}, "
                f"{tokenizer.decode(ids)[:160]!r}, expected the question among them: the tokenizer's chat template "
                "drops it (hf.bare_prompt reads the text without a template)"
            )


def reads_question(tokenizer: PreTrainedTokenizerBase, prompt: str, ids: Sequence[int]) -> bool:
    """Whether the tokens hold the longest line of the question, up to white space and how the tokenizer spells it."""
    question = prompt.messages[-1]["content"] if isinstance(prompt, Conversation) else prompt
    line = max(question.split("\n"), key=len)
    alone = tokenizer.decode(tokenizer(line, add_special_tokens=False)["input_ids"])
    return "".join(alone.split()) in "".join(tokenizer.decode(ids).split())


# -- the openings of episodes


def check_openings(
    episodes: Episodes, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, limit: int
) -> None:
    """Raise ValueError where an opening leaves no token for a turn, among the problems with the longest prompts.

    Others are found out when they are sampled. One that cannot begin is no error: the tape of a replay may have how it
    began.
    """
    longest = nlargest(LONGEST, problems, key=lambda problem: len(problem.prompt))
    with episodes.pool() as pool:
        chat = episodes.environments(tokenizer, pool).chat
        for problem, future in [(problem, pool.start(problem, 0)) for problem in longest]:
            answer = future.result()
            opening = [] if answer.failure else chat.open(answer.messages)
            if len(opening) > limit:
                raise ValueError(
                    f"sections.Episodes.environment: {episodes.name}: got an opening of {len(opening)} tokens for "
                    f"problem {problem.uid}, expected at most {limit} (sections.Sampling.max_total_tokens less one for "
                    f"a turn): {answer.messages[0].content[:80]!r}"
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
    if not episodes.environment.pure:  # a replay is without its tools
        if drawn and not task.rows:
            overlong.refuse(task._replace(rows=tuple(drawn)), length, limit)
        left, count = rule(task, length, limit)
        if count:
            raise ValueError(
                f"sections.Data.overlong_prompts: got a rule that leaves out {count} problems by their prompts, and "
                f"{episodes.name}, which is not pure, expected overlong.refuse: what such an environment begins with "
                "is known only in the run"
            )
        return left
    if not refuses and task.rows:
        with episodes.pool() as pool:
            task = rule(task, opening_length(episodes.environments(tokenizer, pool)), limit)[0]
    check_openings(episodes, (*(() if task.rows and not refuses else drawn), *task.test), tokenizer, limit)
    return task


def opening_length(environments: Environments) -> Length:
    """Counts the tokens of a problem's opening, once; one that cannot begin has none."""
    lengths: dict[int, tuple[Problem, int]] = {}  # by identity: the rows of a task have no numbers yet

    def length(problem: Problem) -> int:
        if id(problem) not in lengths:
            answer = environments.caller.start(problem, 0).result()
            lengths[id(problem)] = problem, 0 if answer.failure else len(environments.chat.open(answer.messages))
        return lengths[id(problem)][1]

    return length


# -- the demonstrations of a run


def demonstration_key(settings: Settings) -> Tensor:
    """Key of the stream of demonstrations beside sampled completions."""
    return prng.fold_in(prng.key(settings.seed, device="cpu"), SHOWING)


def check_run_demonstrations(
    settings: Settings,
    beside: Task | None,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: PretrainedConfig,
) -> None:
    """Raise ValueError for a demonstration of the run, or a held-out one, that cannot be made or is too long."""
    problems = [*drawn, *task.test] if isinstance(settings.algorithm, Stage) else []
    if beside is not None:
        draws = min(beside.size, settings.demonstrations.rows * settings.steps) if beside.rows else settings.steps
        problems += train_problems(beside, demonstration_key(settings), 0, draws)
    check_demonstrations(
        problems,
        tokenizer=tokenizer,
        demonstration=settings.data.demonstration,
        encode=settings.data.encode_prompt,
        most=settings.sampling.max_total_tokens or positions(config),
        vocabulary=config.get_text_config().vocab_size,
    )
