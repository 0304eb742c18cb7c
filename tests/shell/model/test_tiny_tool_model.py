"""Demonstrations of a tool are laid out as the engine lays out an episode, and the tool is one that answers."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch

from grpo_fn.core import prng
from grpo_fn.core.environment import Message
from grpo_fn.environments import tool_use
from grpo_fn.environments.calculator import calculator
from grpo_fn.rewards import math
from grpo_fn.shell import warm_start
from grpo_fn.shell.episodes import chat_format, tool_calls
from grpo_fn.shell.model import tiny_model
from grpo_fn.shell.model.tiny_model import Shape
from grpo_fn.shell.model.tiny_tool_model import ToolRecipe, ToolWarmStart, demonstration
from grpo_fn.tasks import calculation

SHAPE = Shape(vocabulary=276, hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, positions=160)
WARM_START = ToolWarmStart(steps=2, rows=4, lr=1e-3, tool_share=0.5)
TASK = calculation.task(max_value=99, test_size=8)
KEY = prng.key(0, device="cpu")
LAID_OUT = partial(demonstration, instructions="", before="\n", after="\n")


@pytest.fixture(scope="module")
def tokenizer():
    problems = [TASK.train(KEY, index) for index in range(2000)]
    texts = ["".join(text for text, _ in LAID_OUT(problem, use)) for problem in problems for use in (False, True)]
    return tiny_model.train_tokenizer(texts, vocabulary=276)


@pytest.mark.parametrize("instructions", ["", "A tool: calculator(expression)."])
def test_a_demonstration_is_the_row_of_an_episode(tokenizer, instructions):
    """Calls are read back, the environment answers them as the demonstration says, and the ids are the same."""
    read = partial(tool_calls.tags, argument="expression")
    chat = chat_format.text(tokenizer, before="\n", after="\n", read_calls=read)
    tools = [partial(calculator, max_length=40)]
    play = tool_use.environment(tools=tools, grade=math.correct, instructions=instructions, max_turns=3, pure=True)
    shown_as = partial(LAID_OUT, instructions=instructions)
    for index in range(20):
        problem = TASK.train(KEY, index)
        state, opening = play.start(problem, 0)
        row, learned = [*chat.open(opening)], []
        (_, *turns) = shown_as(problem, True)
        for text in (text for text, taught in turns if taught):
            turn = [*tokenizer(text)["input_ids"], chat.end]
            learned += range(len(row), len(row) + len(turn))
            row += turn
            state, messages, reward, done = play.step(state, chat.parse(turn), 0)
            row += chat.extend(messages) if messages else []
        assert (reward, done) == (1.0, True)
        shown = warm_start.tokenized_rows([shown_as(problem, True)], tokenizer, torch.device("cpu"))
        assert shown.tokens[0].tolist() == row
        assert shown.mask[0].nonzero().flatten().tolist() == learned


def test_without_the_tool_a_demonstration_is_the_answer_alone(tokenizer):
    problem = TASK.train(KEY, 0)
    assert LAID_OUT(problem, False) == [(problem.prompt, False), (rf"\boxed{{{problem.answer}}}", True)]
    assert tool_calls.tags(LAID_OUT(problem, False)[1][0], argument="expression").calls == ()


def test_a_recipe_makes_its_model_once(tmp_path, monkeypatch):
    recipe = ToolRecipe(
        **{"max_value": 99, "test_size": 8, "instructions": "", "before": "\n", "after": "\n", "shape": SHAPE},
        **{"initializer_range": 0.05, "warm_start": WARM_START, "seed": 0, "cache": str(tmp_path)},
    )
    shown = []
    monkeypatch.setattr(
        warm_start, "train_supervised", lambda m, t, rows, plan, *, report: shown.extend(islice(rows, 500))
    )
    folder = recipe.folder()
    assert recipe.folder() == folder
    assert len(shown) == 500
    assert recipe.config().vocab_size == 276
    assert replace(recipe, seed=1).folder() != folder
    held_out = {problem.prompt for problem in TASK.test}
    assert not held_out & {row[0][0] for row in shown}
    assert 0.4 < sum(len(row) == 4 for row in shown[:500]) / 500 < 0.6


def test_instructions_that_the_environment_completes_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"instructions: got '\{tools\} Answer.', wanted the text that an episode begins"
    ):
        ToolRecipe(
            **{"max_value": 99, "test_size": 8, "instructions": "{tools} Answer.", "before": "", "after": ""},
            **{"shape": SHAPE, "initializer_range": 0.05, "warm_start": WARM_START, "seed": 0, "cache": str(tmp_path)},
        )


def test_what_is_no_call_of_the_calculator_is_answered():
    play = tool_use.environment(
        tools=[partial(calculator, max_length=40)], grade=math.correct, instructions="", max_turns=3, pure=True
    )
    state = play.start(TASK.train(KEY, 0), 0).state
    for text in ("<calculator>2+</calculator>", "<calculator>2+2", "<adder>2+2</adder>"):
        content, calls, malformed = tool_calls.tags(text, argument="expression")
        answer = play.step(state, Message("assistant", content, "", calls, malformed), 0)
        assert answer.messages[0].content.startswith("error: ")
