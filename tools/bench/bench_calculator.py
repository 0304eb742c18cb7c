"""The calculator episodes of `tools/bench trl`: a model that calls the tool, its questions, and our run file's part."""

import json
import sys
from functools import partial
from pathlib import Path

import bench_reward
import torch

from grpo_fn.core import prng
from grpo_fn.environments.tools import describe_tools
from grpo_fn.shell.model import tiny_tool_model
from grpo_fn.tasks import calculation

MAX_VALUE = 99
HELD_OUT = 128
MAX_TURNS = 3
TOTAL = 128  # tokens of a slot of ours: more than the question, all that is sampled and two observations
DESCRIPTION = describe_tools({"calculator": bench_reward.calculator})  # the tool's schema, as chat templates write it
WarmStart = partial(tiny_tool_model.ToolWarmStart, rows=16, tool_share=1.0)  # shows nothing but calls of the tool


def make(
    shape: tiny_tool_model.Shape,
    warm_start: tiny_tool_model.ToolWarmStart,
    *,
    instructions: str,
    count: int,
    folder: Path,
) -> list[str]:
    """Write a model that calls the calculator and so many questions to `folder`; returns what episodes begin with."""
    recipe = tiny_tool_model.ToolRecipe(
        max_value=MAX_VALUE,
        test_size=HELD_OUT,
        instructions=instructions,
        before="\n",
        after="\n",
        shape=shape,
        initializer_range=0.07,  # that of gin/run/calculator.gin
        warm_start=warm_start,
        seed=0,
        cache=str(folder),
    )
    device, report = "cuda" if torch.cuda.is_available() else "cpu", partial(print, file=sys.stderr, flush=True)
    tiny_tool_model.make_tool_model(recipe, folder / "model", device=device, report=report)
    task, key = calculation.task(max_value=MAX_VALUE, test_size=HELD_OUT), prng.key(1, device="cpu")
    questions = list(dict.fromkeys(task.train(key, uid).prompt for uid in range(2 * count)))[:count]
    rows = [{"prompt": question, "answer": "0"} for question in questions]
    system = [{"role": "system", "content": instructions}] if instructions else []
    chats = [{"prompt": [*system, {"role": "user", "content": question}]} for question in questions]
    for name, lines in (("prompts.jsonl", rows), ("chats.jsonl", chats)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"{instructions}\n{question}" if instructions else question for question in questions]


EPISODES = """
from grpo_fn.environments import tool_use
from grpo_fn.shell.episodes import chat_format

train.train.episodes = @sections.Episodes()
sections.Episodes:
    environment = @tool_use.environment()
    chat_format = @chat_format.text
    max_turns = {max_turns}
    max_turn_tokens = {new_tokens}
    workers = {workers}
sections.Sampling.max_total_tokens = {total_tokens}
tool_use.environment:
    tools = [@bench_reward.calculator]
    grade = @bench_reward.ours
    instructions = {instructions!r}
    max_turns = {max_turns}
    pure = True
chat_format.text:
    before = "\\n"
    after = "\\n"
"""
