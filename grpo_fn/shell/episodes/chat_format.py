"""Chat formats: messages as token ids behind what is there already, and sampled token ids as a message.

A row is never rendered again. What the policy sampled, the token that ended its turn included, stays as it is;
observations are put behind it as ids that were not sampled, up to where the policy writes again. A turn that a limit
cut has no end, and ends the episode.

The tokenizer's own chat template is taken where turns can be appended to it exactly, and refused before sampling where
they cannot. Behind a turn stands what the template puts there: rendered are a short conversation and an answer in the
place of the policy's turn, and what stands behind that answer's end token is what is appended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message
from grpo_fn.shell.episodes.tool_calls import ReadCalls

OPENING = (Message("user", "question"),)
# Turns as a policy may write them: a template that changes one of them cannot be appended to.
TRIED = (
    "answer",
    "",
    " spaces around \n",
    "<think>\nthoughts\n</think>\n\nanswer",
    '<tool_call>\n{"name": "tool", "arguments": {"x": 1}}\n</tool_call>',
)


@runtime_checkable
class ChatFormat(Protocol):
    """How a model family writes conversations. Implementations: `TextFormat`, `TemplateFormat`."""

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


class TokenizerFormat:
    """What the formats over a tokenizer share."""

    tokenizer: PreTrainedTokenizerBase
    read_calls: ReadCalls

    @property
    def end(self) -> int:
        """The tokenizer's EOS, which ends a turn in chat models."""
        return self.tokenizer.eos_token_id

    def parse(self, turn: Sequence[int]) -> Message:
        """The turn's text without special tokens, apart from its tool calls."""
        content, calls, malformed = self.read_calls(self.read(turn))
        return Message("assistant", content, "", calls, malformed)

    def read(self, turn: Sequence[int]) -> str:
        """The turn's whole text without special tokens."""
        return self.tokenizer.decode(list(turn), skip_special_tokens=True)


def first_difference(
    tokenizer: PreTrainedTokenizerBase, got: Sequence[int], wanted: Sequence[int]
) -> tuple[int, str, str]:
    """Where two rows that differ begin to, and what either has there, for people."""
    pairs = enumerate(zip(got, wanted, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(got), len(wanted)))
    first, second = (
        repr(tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "the end" for ids in (got, wanted)
    )
    return place, first, second


@dataclass(frozen=True)
class TextFormat(TokenizerFormat):
    """Messages as plain text, for models that know no chat: each turn of the policy ends with the end of a text."""

    tokenizer: PreTrainedTokenizerBase
    before: str  # in front of an observation
    after: str  # behind it
    read_calls: ReadCalls

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The contents one behind the other, a line break between two."""
        return self._ids("\n".join(message.content for message in messages))

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """Every content between the two marks."""
        return self._ids("".join(f"{self.before}{message.content}{self.after}" for message in messages))

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


@dataclass(frozen=True)
class TemplateFormat(TokenizerFormat):
    """A chat template that was found to append turns exactly."""

    tokenizer: PreTrainedTokenizerBase
    observed: tuple[str, ...]  # roles of observations that it was found so for
    read_calls: ReadCalls

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The messages and the beginning of the policy's turn."""
        return self.render(messages)

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """What stands behind a turn's end token. Raises ValueError for roles for which the template was not tried."""
        if odd := [message.role for message in messages if message.role not in self.observed]:
            raise ValueError(f"chat template: got an observation of role {odd[0]!r}, wanted {', '.join(self.observed)}")
        whole, opening = self.render([*OPENING, Message("assistant", TRIED[0]), *messages]), self.render(OPENING)
        return whole[whole.index(self.end, len(opening)) + 1 :]

    def render(self, messages: Sequence[Message]) -> list[int]:
        """A conversation and the beginning of the policy's turn, as the template has them."""
        turns = [{"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})} for m in messages]
        chat = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
        return chat["input_ids"]


def tokenizer_template(
    tokenizer: PreTrainedTokenizerBase, *, observed: Sequence[str], read_calls: ReadCalls
) -> TemplateFormat:
    """The tokenizer's chat template.

    Args:
        tokenizer: of the policy.
        observed: roles of the observations that environments answer with: "tool", "user".
        read_calls: (text) -> content, calls and what is malformed: `tool_calls.hermes` and its kin.

    Returns:
        The format.

    Raises:
        ValueError: for a tokenizer without a template or an EOS token, and for a template to which a turn cannot be
            appended exactly, with the first token that differs.
    """
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise ValueError("chat format: got a tokenizer without chat template or EOS token, wanted both")
    made = TemplateFormat(tokenizer, tuple(observed), read_calls)
    for role in made.observed:
        for turn in TRIED:
            check_appending(made, turn, [Message(role, "observation")])
    return made


def check_appending(made: TemplateFormat, turn: str, messages: Sequence[Message]) -> None:
    """Raise ValueError, with the first token that differs, unless the turn can be appended exactly."""
    wanted = made.render([*OPENING, Message("assistant", turn), *messages])
    try:  # as sampling makes the row
        written = made.tokenizer(turn, add_special_tokens=False)["input_ids"]
        got = [*made.render(OPENING), *written, made.end, *made.extend(messages)]
    except ValueError as error:
        raise ValueError(
            f"chat template: got no {made.tokenizer.eos_token!r} behind a turn ({error}), wanted the end-of-turn token"
        ) from error
    if got != wanted:
        place, ours, theirs = first_difference(made.tokenizer, got, wanted)
        raise ValueError(
            f"chat template: got {theirs} as token {place} of a conversation with the turn {turn!r} before a "
            f"{messages[0].role} message, wanted {ours}: the template changes what was written before, so a turn "
            "cannot be appended to it exactly"
        )
