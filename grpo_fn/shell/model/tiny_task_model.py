"""A small Qwen2 with its own tokenizer for any task, made here: warm-started on right completions of its problems."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from transformers import Qwen2Config

from grpo_fn.core import prng
from grpo_fn.core.partials import describe_function, function_and_knobs
from grpo_fn.core.problem import COMPLETION, Problem
from grpo_fn.shell import warm_start
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.tasks import task as tasks
from grpo_fn.tasks.arithmetic import answer_only
from grpo_fn.tasks.task import block_uniforms

TEXTS = 2000  # that the tokenizer is trained on
_STYLE = tasks.frozen_key(prng.key(20_261_125, device="cpu"))  # decides which problems are answered
SHOWN = 64  # demonstrations that are part of the model's name: they change where a task's library does


@dataclass(frozen=True, kw_only=True)
class TaskWarmStart:
    """Supervised steps on a task's training demonstrations: cross-entropy of the completion and EOS, AdamW."""

    steps: int  # optimizer updates
    rows: int  # demonstrations a step
    lr: float  # peak of a warm-up and a decay


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """The recipe of a tiny model for any task, which decides its every byte: task, completions, shape and seed."""

    task: Callable[[], tasks.Task]  # makes the task; its held-out problems are never shown
    solution: Callable[[Problem], str]  # the completion of a training problem that is taught
    shape: Shape  # of the model
    initializer_range: float  # standard deviation of the weights that it begins with
    warm_start: TaskWarmStart  # supervised steps before the run
    seed: int  # of weights and demonstrations
    cache: str  # folder that models are kept in; ~ is the home

    def config(self) -> Qwen2Config:
        """The shape, without making the model."""
        return tiny_model.initial_config(self.shape, self.initializer_range, eos=self.shape.vocabulary - 1)

    def folder(self) -> str:
        """The cached folder, made now when it is not there."""
        made = self.task()
        first = [*islice(taught_completions(made, self.solution, self.seed), SHOWN)]
        described = DescribedRecipe(
            task=describe_function(self.task),
            solution=describe_function(self.solution),
            demonstrations=hashlib.sha256(repr(first).encode()).hexdigest(),
            shape=self.shape,
            initializer_range=self.initializer_range,
            warm_start=self.warm_start,
            seed=self.seed,
            cache=self.cache,
        )
        code = [__name__, *(function_and_knobs(fn)[0].__module__ for fn in (self.task, self.solution))]
        return tiny_model.cached_folder("task", described, code, lambda _, path: make_task_model(self, made, path))


@dataclass(frozen=True, kw_only=True)
class DescribedRecipe:
    """A `TaskRecipe` as plain text and numbers, of which the model's name is a hash."""

    task: str
    solution: str
    demonstrations: str  # hash of the first of them
    shape: Shape
    initializer_range: float
    warm_start: TaskWarmStart
    seed: int
    cache: str


def given_completion(problem: Problem) -> str:
    """The completion that a task of demonstrations gives its problem: `arithmetic.demonstration_task`.

    Args:
        problem: of such a task.

    Returns:
        Its completion.

    Raises:
        ValueError: for a problem without one.
    """
    if COMPLETION not in problem.meta:
        raise ValueError(f"problem {problem.uid}: got no completion, wanted one in meta[{COMPLETION!r}]")
    return problem.meta[COMPLETION]


def answer_or_copied_number(problem: Problem, *, answered_share: float) -> str:
    r"""A box in every case: the answer in a share of the problems, in the others the last number of the question.

    Args:
        problem: of a task whose questions hold numbers; its uid decides.
        answered_share: probability that the box holds the answer, in [0, 1].

    Returns:
        `\\boxed{answer}` or `\\boxed{last number}`.

    Raises:
        ValueError: for a question without a number.
    """
    if block_uniforms(_STYLE, 1, problem.uid)[0] < answered_share:
        return answer_only(problem)
    numbers = re.findall(r"\d+", problem.prompt)
    if not numbers:
        raise ValueError(f"problem {problem.uid}: got {problem.prompt!r}, wanted a question that holds a number")
    return rf"\boxed{{{numbers[-1]}}}"


def taught_completions(task: tasks.Task, solution: Callable[[Problem], str], seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs of training problems under a seed."""
    key = prng.fold_in(prng.key(seed, device="cpu"), 1)
    for index in count():
        problem = task.train(key, index)
        yield problem.prompt, solution(problem)


def make_task_model(recipe: TaskRecipe, task: tasks.Task, path: Path) -> None:
    """Build, warm-start and write the model."""
    shown = taught_completions(task, recipe.solution, recipe.seed)
    texts = [f"{prompt} {completion}" for prompt, completion in (next(shown) for _ in range(TEXTS))]
    tokenizer = tiny_model.train_tokenizer(texts, vocabulary=recipe.shape.vocabulary)
    config = tiny_model.initial_config(recipe.shape, recipe.initializer_range, eos=tokenizer.eos_token_id)
    model = tiny_model.random_weights(config, seed=recipe.seed)
    pairs = (((prompt, False), (completion, True)) for prompt, completion in shown)
    warm_start.train_supervised(model, tokenizer, pairs, recipe.warm_start)
    hf.export(model, tokenizer, path)
