"""Chat formats: messages as token ids behind what is there already, and sampled token ids as a message.

A row is never rendered again. What the policy sampled, the token that ended its turn included, stays as it is;
observations are put behind it as ids that were not sampled, up to where the policy writes again. A turn that a limit
cut has no end, and ends the episode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message
from grpo_fn.shell.episodes.tool_calls import ReadCalls


@runtime_checkable
class ChatFormat(Protocol):
    """How a model family writes conversations. Implementations: `TextFormat`, `chat_template.TemplateFormat`."""

    end: int  # the token that ends a turn

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The ids of an episode's first messages, up to where the policy writes."""

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """The ids behind a turn's end token: observations, up to where the policy writes again."""

    def parse(self, turn: Sequence[int]) -> Message:
        """What the policy sampled in a turn, its end token included, as a message."""

    def read(self, turn: Sequence[int]) -> str:
        """The text of a turn as the policy wrote it, its calls and its thinking included, without special tokens."""


MakeChatFormat = Callable[[PreTrainedTokenizerBase], ChatFormat]


def parse_turn(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], read_calls: ReadCalls) -> Message:
    """The turn's text without special tokens, apart from its tool calls."""
    content, calls, malformed = read_calls(read_turn(tokenizer, turn))
    return Message("assistant", content, "", calls, malformed)


def read_turn(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int]) -> str:
    """The turn's whole text without special tokens."""
    return tokenizer.decode(list(turn), skip_special_tokens=True)


@dataclass(frozen=True)
class TextFormat:
    """Messages as plain text, for models that know no chat: each turn of the policy ends with the end of a text."""

    tokenizer: PreTrainedTokenizerBase
    before: str  # in front of an observation
    after: str  # behind it
    read_calls: ReadCalls

    @property
    def end(self) -> int:
        """The tokenizer's EOS."""
        return self.tokenizer.eos_token_id

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The contents one behind the other, a line break between two."""
        return self._ids("\n".join(message.content for message in messages))

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """Every content between the two marks."""
        return self._ids("".join(f"{self.before}{message.content}{self.after}" for message in messages))

    def parse(self, turn: Sequence[int]) -> Message:
        """The text."""
        return parse_turn(self.tokenizer, turn, self.read_calls)

    def read(self, turn: Sequence[int]) -> str:
        """The whole text."""
        return read_turn(self.tokenizer, turn)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def text(tokenizer: PreTrainedTokenizerBase, *, before: str, after: str, read_calls: ReadCalls) -> TextFormat:
    """A format for models that know no chat: contents as plain text.

    Args:
        tokenizer: of the policy.
        before: text in front of an observation.
        after: text behind an observation, where the policy writes again.
        read_calls: (text) -> content, calls and what is malformed: `tool_calls.tags` and its kin.

    Returns:
        The format.

    Raises:
        ValueError: for a tokenizer without an end-of-sequence token, as nothing would end a turn.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("chat_format.text: got a tokenizer without an EOS token, wanted one: it ends a turn")
    return TextFormat(tokenizer, before, after, read_calls)
