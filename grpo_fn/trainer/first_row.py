"""The first row of a run for people: its prompt as the policy reads it, and what the reward gives to its own answer."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.display_text import escape_control, short_line
from grpo_fn.core.problem import COMPLETION, Problem, Turn
from grpo_fn.rewards.judge import judges_of
from grpo_fn.shell.episodes.answers import Answer
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.demonstrations import Demonstration, given_rows
from grpo_fn.shell.reward_workers.reward_pool import RewardError
from grpo_fn.shell.reward_workers.worker_pool import WorkerPool
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.plan import ValidatedPlan
from grpo_fn.trainer.prepare import CHECKED, DATA, check_prompts, draws_to_check
from grpo_fn.trainer.sections import Episodes, Settings

Pool = TypeVar("Pool", bound=WorkerPool)
LONGEST_PROMPT = 1500  # characters that are shown
LONGEST_ANSWER = 100


class FirstRow(NamedTuple):
    """Tokens of a row, and completions that state its answer; those of an episode with its first turn."""

    read: Demonstration
    completions: Sequence[str]
    turns: Sequence[tuple[Turn, ...]] = ()


def first_row(
    settings: Settings, task: Task, tokenizer: PreTrainedTokenizerBase, folder: str, config: PretrainedConfig
) -> list[str]:
    """The first training row of a run. Raises ValueError as `first_row_lines` does."""
    return first_row_lines(
        settings, first_problems(settings, task, 1)[0], tokenizer, end_ids(tokenizer, folder, config), config
    )


def planned_first_row(settings: Settings, plan: ValidatedPlan) -> list[str]:
    """The same of a run that is not started, by what there is of the model's folder.

    Raises ValueError as `first_row_lines` does, and for prompts without their questions.
    """
    problems, source = (
        first_problems(settings, plan.task, min(CHECKED, draws_to_check(settings, plan.task))),
        plan.source,
    )
    if not isinstance(source, hf.Pretrained):
        return first_row_lines(settings, problems[0], None, (), plan.config)
    try:
        tokenizer = hf.load_tokenizer(source.name)
    except ValueError as error:
        return [f"first row: it is not shown, {short_line(str(error), LONGEST_PROMPT)}"]
    if settings.episodes is None:
        prompts = [problem.prompt for problem in (*problems, *plan.task.test[:CHECKED])]
        check_prompts(prompts, tokenizer, settings.data.encode_prompt)
    return first_row_lines(settings, problems[0], tokenizer, end_ids(tokenizer, source.name, plan.config), plan.config)


def first_problems(settings: Settings, task: Task, count: int) -> Sequence[Problem]:
    """The first problems of a run without a curriculum."""
    return train_problems(task, prng.fold_in(prng.key(settings.seed, device="cpu"), DATA), 0, count)


def first_row_lines(
    settings: Settings,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Sequence[int],
    config: PretrainedConfig,
) -> list[str]:
    """The row of a problem; without a tokenizer its text alone. `ends` are the tokens that end a completion.

    Raises ValueError for a prompt that cannot be rendered, or has tokens that the model does not know.
    """
    trains = isinstance(settings.algorithm, Stage)
    if tokenizer is None:
        row = FirstRow(Demonstration([0, 0], [False, True]), own_answers(problem))
        lines = [
            "first row, its text alone, as its tokenizer is made with the model:",
            *quote_lines(problem.prompt, "|"),
        ]
    else:
        row = (
            read_episode(settings.episodes, problem, tokenizer)
            if settings.episodes
            else read_row(settings, problem, tokenizer)
        )
        vocabulary = config.get_text_config().vocab_size
        hf.check_ids(row.read.tokens, vocabulary, tokenizer, "the first row")
        special = sum(token in special_ids(tokenizer) for token in row.read.tokens)
        counted = f"{len(row.read.tokens)} tokens, {special} of them special («so»)"
        counted += f", {sum(row.read.learn)} are learned (>)" if trains else ""
        lines = [
            f"first row, as the policy reads it: {counted}",
            *(
                line
                for learn, part in groupby(zip(row.read.tokens, row.read.learn, strict=True), lambda pair: pair[1])
                for line in quote_lines(marked_text(tokenizer, [token for token, _ in part]), ">" if learn else "|")
            ),
        ]
        if not trains:
            turn = f", a turn after {settings.episodes.max_turn_tokens}" if settings.episodes else ""
            names = ", ".join(f"{marked_text(tokenizer, [token])} ({token})" for token in ends)
            texts = "".join(f", {stop!r}" for stop in settings.sampling.stop)
            lines.append(
                f"a completion ends    with {names}{texts}, or after {settings.sampling.max_new_tokens} tokens{turn}"
            )
    if trains:
        return lines
    lines.append(f"the row's answer     {short_line(problem.answer, LONGEST_ANSWER) or '(none)'}")
    return [*lines, f"its reward           {reward_text(settings, problem, row, tokenizer)}"]


def read_row(settings: Settings, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> FirstRow:
    """The prompt of a row, or in a supervised stage all of the row."""
    data = settings.data
    if isinstance(settings.algorithm, Stage):
        return FirstRow(data.demonstration(tokenizer, problem, encode=data.encode_prompt), ())
    tokens = data.encode_prompt(tokenizer, problem.prompt)
    return FirstRow(Demonstration(tokens, [False] * len(tokens)), own_answers(problem))


def read_episode(episodes: Episodes, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> FirstRow:
    """The opening of an episode, and its first turn for each spelling of the answer."""
    with one_worker(episodes.pool()) as pool:
        chat = episodes.environments(tokenizer, pool).chat
        opening = pool.start(problem, 0).result()
        tokens = [] if opening.failure else chat.open(opening.messages)
        texts = [] if opening.failure or opening.done else own_answers(problem)
        messages = [chat.parse([*tokenizer(text, add_special_tokens=False)["input_ids"], chat.end]) for text in texts]
        answers: list[Answer] = [pool.step(opening.state, message, 0).result() for message in messages]
    turns = [
        (Turn(text, 1, "", answer.reward, "", error=answer.failure),)
        for text, answer in zip(texts, answers, strict=True)
    ]
    return FirstRow(Demonstration(tokens, [False] * len(tokens)), texts, turns)


def own_answers(problem: Problem) -> list[str]:
    r"""Completions that state the row's own answer: as it is, and in a box, or in a fence if tests judge it."""
    if not problem.answer:
        return []
    marked = f"```python\n{problem.answer}\n```" if "tests" in problem.meta else rf"\boxed{{{problem.answer}}}"
    shown = problem.meta.get(COMPLETION)
    return [*dict.fromkeys([problem.answer, marked, *([shown] if isinstance(shown, str) and shown else [])])]


def reward_text(settings: Settings, problem: Problem, row: FirstRow, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """What the reward gives to each completion, with its parts."""
    if any(judges_of(settings.rewards.reward)):
        return "is not tried here: it asks a judge"
    if not row.completions:
        return "is not tried here: the row has no answer"
    answers = [
        [0] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"] for text in row.completions
    ]
    rows = [
        Demonstration([*row.read.tokens, *ids, 0], [*[False] * len(row.read.tokens), *[True] * (len(ids) + 1)])
        for ids in answers
    ]
    rollout = given_rows(rows, row.completions, pad=0, device=torch.device("cpu"))._replace(turns=tuple(row.turns))
    try:
        with one_worker(settings.rewards.pool()) as pool:
            reward = settings.rewards.reward((problem,), rollout, score=pool.score)
    except RewardError as error:
        return f"raised: {short_line(str(error), LONGEST_PROMPT)}"
    parts = {name: value[0].tolist() for name, value in reward.parts.items()} if len(reward.parts) > 1 else {}
    shown = []
    for i, (text, value, valid) in enumerate(
        zip(row.completions, reward.value[0].tolist(), reward.valid[0].tolist(), strict=True)
    ):
        of_parts = ", ".join(f"{name} {values[i]:.2f}" for name, values in parts.items())
        number = f"{value:.2f}{f' ({of_parts})' if of_parts else ''}" if valid else "none (it cannot be scored)"
        shown.append(f"{number} for {short_line(text, LONGEST_ANSWER)}")
    if not any(valid and value > 0 for valid, value in zip(reward.valid[0], reward.value[0], strict=True)):
        shown.append("no spelling that was tried is rewarded: is the answer in the form that the reward reads?")
    return "; ".join(shown)


def one_worker(pool: Pool) -> Pool:
    """The pool, which is not open yet, with a single process: what it does is little."""
    pool.workers = 1
    return pool


def end_ids(tokenizer: PreTrainedTokenizerBase, folder: str, config: PretrainedConfig) -> list[int]:
    """The tokens that end a completion, by the files of a model alone."""
    named = hf.generation_config(folder, config).eos_token_id
    return sorted({tokenizer.eos_token_id, *(named if isinstance(named, list) else [] if named is None else [named])})


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that stand for no text: the named special ones, and added ones such as the marks of turns."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *added}


def marked_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The tokens decoded, each special one between « and »."""
    special = special_ids(tokenizer)
    parts = []
    for is_special, run in groupby(tokens, lambda token: token in special):
        ids = [*run]
        parts += [f"«{tokenizer.decode([token])}»" for token in ids] if is_special else [tokenizer.decode(ids)]
    return "".join(parts)


def quote_lines(text: str, mark: str) -> list[str]:
    """The text line by line behind a mark, without its middle if it is long; control characters are escapes."""
    half = LONGEST_PROMPT // 2
    shown = text if len(text) <= LONGEST_PROMPT else f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"
    return [f"  {mark} {line}" for line in escape_control(shown).split("\n")]
