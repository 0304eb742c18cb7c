"""A small Qwen2 that can call a calculator, made here: warm-started on right answers to `calculation.task`.

Some demonstrations call the tool and read what it gives, the others state the answer alone. Rows are laid out as
`chat_format.text` lays them out with `tool_calls.tags`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import Qwen2Config

from grpo_fn.core import prng
from grpo_fn.core.problem import Problem
from grpo_fn.shell import warm_start
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.tasks import arithmetic, calculation

TEXTS = 4000  # that the tokenizer is trained on


@dataclass(frozen=True, kw_only=True)
class ToolWarmStart:
    """Supervised steps on a task's training demonstrations: cross-entropy of each turn and EOS, AdamW."""

    steps: int  # optimizer updates
    rows: int  # demonstrations a step
    lr: float  # peak of a warm-up and a decay
    tool_share: float  # of the demonstrations, the share that calls the tool


@dataclass(frozen=True, kw_only=True)
class ToolRecipe:
    """The recipe of a tiny model that can call a calculator, which decides its every byte."""

    max_value: int  # largest number of a word problem
    test_size: int  # held-out problems, which no demonstration shows
    instructions: str  # system message of every episode, as it reads there; "" for none
    before: str  # text in front of what the tool gives, as the chat format has it
    after: str  # text behind it
    shape: Shape  # of the model
    initializer_range: float  # standard deviation of the weights that it begins with
    warm_start: ToolWarmStart  # supervised steps before the run
    seed: int  # of weights and demonstrations
    cache: str  # folder that models are kept in; ~ is the home

    def __post_init__(self) -> None:
        """Raise ValueError for instructions that only the environment can complete."""
        if "{tools}" in self.instructions:
            raise ValueError(
                f"tiny_tool_model.ToolRecipe.instructions: got {self.instructions[:80]!r}, wanted the text that an "
                "episode begins with: the environment puts the tools' schemas in the place of {tools}"
            )

    def config(self) -> Qwen2Config:
        """The shape, without making the model."""
        return tiny_model.initial_config(self.shape, self.initializer_range, eos=self.shape.vocabulary - 1)

    def folder(self) -> str:
        """The cached folder, made now when it is not there."""
        return tiny_model.cached_folder("calculator", self, [__name__], make_tool_model)


def make_tool_model(
    recipe: ToolRecipe, path: Path, *, device: str = "cpu", report: Callable[[str], None] = print
) -> None:
    """Build, warm-start on the device and write the model."""
    task = calculation.task(max_value=recipe.max_value, test_size=recipe.test_size)
    key = prng.key(recipe.seed, device="cpu")
    rows = partial(demonstration, instructions=recipe.instructions, before=recipe.before, after=recipe.after)
    corpus_key = prng.fold_in(key, 0)
    problems = [task.train(corpus_key, index) for index in range(TEXTS)]
    texts = ["".join(text for text, _ in rows(problem, use)) for problem in problems for use in (False, True)]
    tokenizer = tiny_model.train_tokenizer(texts, vocabulary=recipe.shape.vocabulary)
    config = tiny_model.initial_config(recipe.shape, recipe.initializer_range, eos=tokenizer.eos_token_id)
    model = tiny_model.random_weights(config, seed=recipe.seed)
    shown = calculation.tool_demonstrations(task, prng.fold_in(key, 1), tool_share=recipe.warm_start.tool_share)
    taught = (rows(problem, use) for problem, use in shown)
    warm_start.train_supervised(model.to(device), tokenizer, taught, recipe.warm_start, report=report)
    hf.export(model, tokenizer, path)


def demonstration(
    problem: Problem, use_tool: bool, *, instructions: str, before: str, after: str
) -> list[warm_start.Segment]:
    r"""Instructions and problem, a call of the tool and what it gives if it is to be used, the answer in `\boxed{}`."""
    call = (f"<calculator>{problem.meta['expression']}</calculator>", True)
    turns = [call, (f"{before}{problem.answer}{after}", False)] if use_tool else []
    opening = f"{instructions}\n{problem.prompt}" if instructions else problem.prompt
    return [(opening, False), *turns, (arithmetic.answer_only(problem), True)]
