"""Calculator episodes for a model with random weights: whatever it writes calls the tool with the same expression."""

from fakes import VOCABULARY, problem
from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import ToolCall
from grpo_fn.core.problem import Problem
from grpo_fn.environments import tool_use
from grpo_fn.environments.tools import calculator
from grpo_fn.rewards.episode import used_tool
from grpo_fn.shell.episodes.chat_format import TextFormat

EXPRESSION, RESULT = "12*(7+5)", "144"
CALCULATOR = tool_use.environment(tools=[calculator], grade=used_tool, instructions="", max_turns=3, pure=True)


def calls_the_calculator(tokenizer: PreTrainedTokenizerBase) -> TextFormat:
    """Every turn is a call."""
    call = ToolCall("calculator", {"expression": EXPRESSION})
    return TextFormat(tokenizer, lambda text: ("", (call,), ""))


def ends() -> list[int]:
    """Tokens that end a turn: a third of all, so that a model with random weights ends turns by itself."""
    return [*range(0, VOCABULARY, 3), VOCABULARY - 1]


def problems(*, short: int, long: int) -> list[Problem]:
    """So many with short openings, and with openings that fill a cached block and a half."""
    texts = [f"{i} + 7" for i in range(short)] + [f"{i} " + "7" * 190 for i in range(long)]
    return [problem(100 + i, text) for i, text in enumerate(texts)]
