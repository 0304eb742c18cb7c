"""What a run or an evaluation needs of a model besides its weights, looked at before they are loaded."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.core.problem import Problem
from grpo_fn.shell.model import hf
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.tasks import overlong
from grpo_fn.tasks.task import Task


class PreparedModel(NamedTuple):
    """A model's folder and tokenizer, and the problems whose prompts leave room for a completion."""

    folder: str
    tokenizer: PreTrainedTokenizerBase
    task: Task


def prepare(
    source: hf.ModelSource,
    task: Task,
    drawn: Sequence[Problem],
    config: PretrainedConfig,
    max_new_tokens: int,
    *,
    encode: hf.Encode,
    overlong_prompts: Callable[..., tuple[Task, int]],
) -> PreparedModel:
    """Make the model's folder there, and look at every prompt: those of the task, and those `drawn` from it.

    Raises ValueError for a prompt without tokens, and as `overlong_prompts` does for one that leaves no room.
    """
    folder = source.folder()
    tokenizer = hf.load_tokenizer(folder)
    length = cache(lambda prompt: len(encode(tokenizer, prompt)))
    if empty := [problem.prompt for problem in (*drawn, *task.test) if not length(problem.prompt)]:
        raise ValueError(
            f"got a prompt of no tokens, {empty[0][:80]!r} with the tokenizer of {folder}, wanted at least one: is "
            "the prompt empty, or the folder without the tokenizer's files?"
        )
    room = positions(config)
    if room is None:
        return PreparedModel(folder, tokenizer, task)
    if drawn and not task.rows:  # made as they are drawn: nothing can be left out
        overlong.refuse(task._replace(rows=tuple(drawn)), length, room - max_new_tokens)
    return PreparedModel(folder, tokenizer, overlong_prompts(task, length, room - max_new_tokens)[0])
