"""A small Qwen2 that can walk a maze, made here: warm-started on walks of two kinds, of which one finds the exit.

Rows are laid out as `chat_format.text` lays out episodes of `environments.maze`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from pathlib import Path

from transformers import Qwen2Config

from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.core.problem import Problem
from grpo_fn.environments import maze
from grpo_fn.shell import warm_start
from grpo_fn.shell.model import hf, tiny_model
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.tasks import mazes

TEXTS = 500  # walks that the tokenizer is trained on
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}


@dataclass(frozen=True, kw_only=True)
class MazeWarmStart:
    """Supervised steps on walks through training mazes: cross-entropy of each direction and EOS, AdamW."""

    steps: int  # optimizer updates
    rows: int  # walks a step
    lr: float  # peak of a warm-up and a decay
    moves: int  # directions of a walk, unless it reaches the exit before
    seeking_share: float  # of the walks, the share that seeks the exit; the others take the first way that is named


@dataclass(frozen=True, kw_only=True)
class MazeRecipe:
    """The recipe of a tiny model that can walk a maze, which decides its every byte."""

    side: int  # places in a row of the maze
    test_size: int  # held-out mazes, in which no demonstration walks
    before: str  # text in front of what is seen, as the chat format has it
    after: str  # text behind it
    shape: Shape  # of the model
    initializer_range: float  # standard deviation of the weights that it begins with
    warm_start: MazeWarmStart  # supervised steps before the run
    seed: int  # of weights and demonstrations
    cache: str  # folder that models are kept in; ~ is the home

    def config(self) -> Qwen2Config:
        """The shape, without making the model."""
        return tiny_model.initial_config(self.shape, self.initializer_range, eos=self.shape.vocabulary - 1)

    def folder(self) -> str:
        """The cached folder, made now when it is not there."""
        return tiny_model.cached_folder("maze", self, [__name__], make_maze_model)


def make_maze_model(recipe: MazeRecipe, path: Path, *, report: Callable[[str], None] = print) -> None:
    """Build, warm-start and write the model."""
    key = prng.key(recipe.seed, device="cpu")
    task = mazes.task(side=recipe.side, show_map=False, test_size=recipe.test_size)
    plan, chance = recipe.warm_start, random.Random(recipe.seed)

    def walks(number: int) -> Iterator[list[warm_start.Segment]]:
        stream = prng.fold_in(key, number)
        for index in count_from():
            choose = seek_exit if chance.random() < plan.seeking_share else take_first
            choose = partial(choose, chance=chance)
            yield walk(task.train(stream, index), choose, moves=plan.moves, before=recipe.before, after=recipe.after)

    texts = ["".join(text for text, _ in row) for row, _ in zip(walks(0), range(TEXTS), strict=False)]
    tokenizer = tiny_model.train_tokenizer(texts, vocabulary=recipe.shape.vocabulary)
    config = tiny_model.initial_config(recipe.shape, recipe.initializer_range, eos=tokenizer.eos_token_id)
    model = tiny_model.random_weights(config, seed=recipe.seed)
    warm_start.train_supervised(model, tokenizer, walks(1), recipe.warm_start, report=report)
    hf.export(model, tokenizer, path)


# (open ways, those of them that lead nearer to the exit, the way back) -> the way that is taken
ChooseWay = Callable[[Sequence[str], Sequence[str], str], str]


def take_first(ways: Sequence[str], nearer: Sequence[str], back: str, *, chance: random.Random) -> str:
    """The first way that is named: a walk to and fro, unless the exit happens to be there."""
    return ways[0]


def seek_exit(ways: Sequence[str], nearer: Sequence[str], back: str, *, chance: random.Random) -> str:
    """A way that leads nearer to the exit, by chance where there are two; back only where nothing else is open."""
    ahead = [way for way in ways if way != back] or ways
    return chance.choice([way for way in ahead if way in nearer] or ahead)


def walk(problem: Problem, choose: ChooseWay, *, moves: int, before: str, after: str) -> list[warm_start.Segment]:
    """The walk of a walker through the maze."""
    walker = maze.environment(cost=0.0)
    state, messages = walker.start(problem, 0)
    row, back = [("\n".join(message.content for message in messages), False)], ""
    for move in range(moves):
        place = state["maze"], state["row"], state["column"]
        way = choose(maze.open_ways(*place), maze.exit_directions(*place), back)
        back = OPPOSITE[way]
        row.append((way, True))
        state, messages, _, done = walker.step(state, Message("assistant", way), 0)
        if done or move + 1 == moves:
            break
        row += [(f"{before}{message.content}{after}", False) for message in messages]
    return row
