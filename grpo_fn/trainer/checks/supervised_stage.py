"""The demonstrations of a run, looked at before any weights are loaded."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_fn.algo.supervised import Stage
from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.shell.model.demonstrations import check_demonstrations
from grpo_fn.shell.sampler.interface import positions
from grpo_fn.tasks.task import Task, train_problems
from grpo_fn.trainer.run import SHOWING
from grpo_fn.trainer.sections import Settings


def shown_key(settings: Settings) -> Tensor:
    """Key of the stream of demonstrations beside sampled completions."""
    return prng.fold_in(prng.key(settings.seed, device="cpu"), SHOWING)


def look_at_demonstrations(
    settings: Settings,
    shown: Task | None,
    drawn: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: PretrainedConfig,
) -> None:
    """Raise ValueError for a demonstration of the run, or a held-out one, that cannot be made or is too long."""
    problems = [*drawn, *task.test] if isinstance(settings.algorithm, Stage) else []
    if shown is not None:
        draws = min(shown.size, settings.demonstrations.rows * settings.steps) if shown.rows else settings.steps
        problems += train_problems(shown, shown_key(settings), 0, draws)
    check_demonstrations(
        problems,
        tokenizer=tokenizer,
        demonstration=settings.data.demonstration,
        encode=settings.data.encode_prompt,
        most=settings.sampling.max_total_tokens or positions(config),
    )
