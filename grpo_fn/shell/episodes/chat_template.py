"""The tokenizer's own chat template, where turns can be appended exactly; what cannot is refused before sampling.

Behind a turn stands what the template puts there: rendered are a short conversation and an answer in the place of the
policy's turn, and what stands behind that answer's end token is what is appended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message
from grpo_fn.shell.episodes.chat_format import parse_turn, read_turn
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


@dataclass(frozen=True)
class TemplateFormat:
    """A chat template that was found to append turns exactly."""

    tokenizer: PreTrainedTokenizerBase
    observed: tuple[str, ...]  # roles of observations that it was found so for
    read_calls: ReadCalls

    @property
    def end(self) -> int:
        """The tokenizer's EOS, which ends a turn in chat models."""
        return self.tokenizer.eos_token_id

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The messages and the beginning of the policy's turn."""
        return self._render(messages)

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """What stands behind a turn's end token. Raises ValueError for roles for which the template was not tried."""
        if odd := [message.role for message in messages if message.role not in self.observed]:
            raise ValueError(f"chat template: got an observation of role {odd[0]!r}, wanted {', '.join(self.observed)}")
        whole, opening = self._render([*OPENING, Message("assistant", TRIED[0]), *messages]), self._render(OPENING)
        return whole[whole.index(self.end, len(opening)) + 1 :]

    def parse(self, turn: Sequence[int]) -> Message:
        """The text without the template's marks."""
        return parse_turn(self.tokenizer, turn, self.read_calls)

    def read(self, turn: Sequence[int]) -> str:
        """The whole text."""
        return read_turn(self.tokenizer, turn)

    def row_with(self, turn: str, messages: Sequence[Message]) -> list[int]:
        """The row of a conversation in which the policy wrote `turn`, as sampling makes it."""
        written = self.tokenizer(turn, add_special_tokens=False)["input_ids"]
        return [*self._render(OPENING), *written, self.end, *self.extend(messages)]

    def conversation_with(self, turn: str, messages: Sequence[Message]) -> list[int]:
        """The same conversation as the template has it."""
        return self._render([*OPENING, Message("assistant", turn), *messages])

    def _render(self, messages: Sequence[Message]) -> list[int]:
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
    wanted = made.conversation_with(turn, messages)
    try:
        got = made.row_with(turn, messages)
    except ValueError as error:
        raise ValueError(
            f"chat template: got no {made.tokenizer.eos_token!r} behind a turn ({error}), wanted the end-of-turn token"
        ) from error
    if got == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    ours, theirs = (
        repr(made.tokenizer.decode(ids[at : at + 1])) if at < len(ids) else "the end" for ids in (got, wanted)
    )
    raise ValueError(
        f"chat template: got {theirs} as token {at} of a conversation with the turn {turn!r} before a "
        f"{messages[0].role} message, wanted {ours}: the template changes what was written before, so a turn cannot be "
        "appended to it exactly"
    )
