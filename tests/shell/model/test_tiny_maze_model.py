"""Walks that a maze model is shown are laid out as the engine lays out an episode, and are of the two kinds."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch

from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.environments import maze
from grpo_fn.shell import warm_start
from grpo_fn.shell.episodes import chat_format, tool_calls
from grpo_fn.shell.model import tiny_model
from grpo_fn.shell.model.tiny_maze_model import MazeRecipe, MazeWarmStart, seek_exit, take_first, walk
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.tasks import mazes

SHAPE = Shape(vocabulary=320, hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, positions=320)
TASK = mazes.task(side=3, show_map=False, test_size=8)
KEY = prng.key(0, device="cpu")
SHOWN = partial(walk, moves=6, before="\n", after="\n")


def seeking(problem, n, **knobs):
    """A walk that seeks the exit."""
    return SHOWN(problem, partial(seek_exit, chance=random.Random(n)), **knobs)


def first(problem, **knobs):
    """A walk that takes the first way."""
    return SHOWN(problem, partial(take_first, chance=random.Random(0)), **knobs)


def reaches(taken, problem):
    """Whether the last move of a walk is onto the exit."""
    play = maze.environment(cost=0.0)
    state = play.start(problem, 0).state
    for text in (text for text, taught in taken if taught):
        state, _, _, done = play.step(state, Message("assistant", text), 0)
    return done


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["".join(text for text, _ in seeking(TASK.train(KEY, n), n)) for n in range(500)]
    return tiny_model.train_tokenizer(texts, vocabulary=320)


def test_a_walk_is_the_row_of_an_episode(tokenizer):
    """The environment answers each direction as the walk says, no move is into a wall, and the ids are the same."""
    chat = chat_format.text(tokenizer, before="\n", after="\n", read_calls=tool_calls.no_calls)
    play = maze.environment(cost=0.0)
    lengths = Counter()
    for n in range(20):
        problem = TASK.train(KEY, n)
        taken = seeking(problem, n) if n % 2 else first(problem)
        state, opening = play.start(problem, 0)
        row, learned, moves = [*chat.open(opening)], [], [text for text, taught in taken if taught]
        for number, text in enumerate(moves, 1):
            turn = [*tokenizer(text)["input_ids"], chat.end]
            learned += range(len(row), len(row) + len(turn))
            row += turn
            state, messages, _, done = play.step(state, chat.parse(turn), 0)
            assert not any("wall" in message.content for message in messages)
            assert done == (number == len(moves)) or (number == len(moves) == 6)
            row += chat.extend(messages) if number < len(moves) else []
        lengths[len(moves)] += 1
        shown = warm_start.tokenized_rows([taken], tokenizer, torch.device("cpu"))
        assert shown.tokens[0].tolist() == row
        assert shown.mask[0].nonzero().flatten().tolist() == learned
    assert len(lengths) > 1  # some have reached the exit


def test_only_one_kind_of_walk_finds_the_exit():
    problems = [TASK.train(KEY, n) for n in range(200)]
    found = [reaches(seeking(problem, n, moves=12), problem) for n, problem in enumerate(problems)]
    assert sum(found) / 200 > 0.75
    assert sum(reaches(first(problem, moves=12), problem) for problem in problems) / 200 < 0.25


def test_a_recipe_makes_its_model_once(tmp_path, monkeypatch):
    recipe = MazeRecipe(
        **{"side": 3, "test_size": 8, "before": "\n", "after": "\n", "shape": SHAPE, "initializer_range": 0.1},
        **{
            "warm_start": MazeWarmStart(steps=2, rows=4, lr=1e-3, moves=6, seeking_share=0.3),
            "seed": 0,
            "cache": str(tmp_path),
        },
    )
    shown, spread = [], []

    def learn(model, tokenizer, rows, plan, *, report):
        shown.extend(islice(rows, 200))
        spread.append(model.model.embed_tokens.weight.std().item())

    monkeypatch.setattr(warm_start, "train_supervised", learn)
    folder = recipe.folder()
    assert recipe.folder() == folder
    assert len(shown) == 200
    assert spread == [pytest.approx(0.1, rel=0.1)]
    assert recipe.config().vocab_size == 320
    assert replace(recipe, initializer_range=0.02).folder() != folder
