"""The `renderers` package's formats of model families, for templates that change what was written before.

Its own contract is ours: a bridge to the next turn keeps what was sampled. What it puts behind a turn is asked for with
a short conversation, as it does not depend on the one that is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.shell.episodes.chat_format import first_difference

OPENING = ({"role": "user", "content": "question"},)
# What is put behind must not depend on the turn. Families that open a thought themselves want it closed.
TURNS = (("answer", "another"), ("thought</think>answer", "more thoughts</think>another"))


@dataclass(frozen=True)
class RendererFormat:
    """A renderer of the package, as a chat format."""

    tokenizer: PreTrainedTokenizerBase
    renderer: Any  # renderers.Renderer, whose package is optional
    end: int

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The messages and the beginning of the policy's turn."""
        return list(self.renderer.render_ids(as_dicts(messages), add_generation_prompt=True))

    def extend(self, messages: Sequence[Message]) -> list[int]:
        """What stands behind a turn's end token. Raises ValueError where the renderer cannot append exactly."""
        for pair in TURNS:
            first, second = (self._behind(turn, messages) for turn in pair)
            if first is None or second is None:
                continue
            if first != second:
                raise ValueError("renderer: got observations that depend on the turn before, wanted the same tokens")
            return first
        raise ValueError(
            f"renderer: got no bridge from a turn to messages of {', '.join(m.role for m in messages)}, wanted one "
            "that keeps what was sampled"
        )

    def parse(self, turn: Sequence[int]) -> Message:
        """The text and the calls, as the family's parser reads them; thinking is not part of the text."""
        before = self.renderer.render_ids(list(OPENING), add_generation_prompt=True)  # which may open a thought
        found = self.renderer.parse_response(list(turn), prompt_ids=before)
        calls, wrong = [], ""
        for call in found.tool_calls:
            if call.status == "ok" and call.name is not None and isinstance(call.arguments, dict):
                calls.append(ToolCall(call.name, call.arguments))
            else:
                wrong = wrong or f"got a tool call that is {call.status}: {call.raw[:80]!r}"
        return Message("assistant", found.content, "", tuple(calls), wrong)

    def read(self, turn: Sequence[int]) -> str:
        """The whole text."""
        return self.tokenizer.decode(list(turn), skip_special_tokens=True)

    def _behind(self, turn: str, messages: Sequence[Message]) -> list[int] | None:
        """What the package's bridge puts behind a turn; None where it has none that keeps the turn."""
        before = self.renderer.render_ids(list(OPENING), add_generation_prompt=True)
        written = [*self.tokenizer(turn, add_special_tokens=False)["input_ids"], self.end]
        found = self.renderer.bridge_to_next_turn(before, written, as_dicts(messages))
        row = [*before, *written]
        return None if found is None or list(found.token_ids[: len(row)]) != row else list(found.token_ids[len(row) :])


def check_conversation(made: RendererFormat, role: str) -> None:
    """Compare a row with the conversation as the package renders it whole.

    Raises ValueError, with the first token that differs, where turns cannot be appended exactly, and for a family that
    ends turns with the beginning of the next message.
    """
    name = "tool"
    call = {"type": "function", "id": "functions.tool:0", "function": {"name": name, "arguments": {"x": 1}}}
    called = {"content": "", "tool_calls": [call]} if role == "tool" else {"content": "answer"}
    observed = {"role": role, "content": "observation"}
    if role == "tool":
        observed |= {"name": name, "tool_call_id": call["id"]}
    opened = made.renderer.render_ids(list(OPENING), add_generation_prompt=True)
    for thought in ({}, {"reasoning_content": "thoughts"}):  # families whose prompts open a thought render one
        said = [*OPENING, {"role": "assistant", **called, **thought}, observed]
        whole = list(made.renderer.render_ids(said, add_generation_prompt=True))
        if whole[: len(opened)] == opened:
            break
    rest = whole[len(opened) :]
    turn = rest[: rest.index(made.end) + 1] if made.end in rest else rest
    row = [*opened, *turn, *made.extend([Message(role, "observation", observed.get("name", ""))])]
    if row != whole:
        place, got, wanted = first_difference(made.tokenizer, row, whole)
        raise ValueError(
            f"renderer: got {got} as token {place} of a conversation with a {role} message, wanted {wanted}, as the "
            "package renders it whole: turns of this family cannot be appended exactly"
        )


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as the package takes them."""
    return [{"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})} for m in messages]


def family_renderer(tokenizer: PreTrainedTokenizerBase, *, family: str, observed: Sequence[str]) -> RendererFormat:
    """The format of a model family, by the `renderers` package (extra `agents`).

    Args:
        tokenizer: of the policy.
        family: the package's name of the family: "qwen3", "glm-5", ...
        observed: roles of the observations that environments answer with: "tool", "user".

    Returns:
        The format.

    Raises:
        ValueError: where the package is missing, does not know the family, or cannot append observations of such roles
            exactly, with the first token that differs.
    """
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise ValueError(
            f"renderers_format.family_renderer: got no package renderers ({error}), wanted pip install grpo_fn[agents]"
        ) from error
    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
    except (ValueError, KeyError, AssertionError) as error:
        raise ValueError(
            f"renderers_format.family_renderer.family: got {family!r} ({error}), wanted one that the package knows and "
            "whose special tokens the tokenizer has"
        ) from error
    ends = renderer.get_stop_token_ids()
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    made = RendererFormat(tokenizer, renderer, end)
    for role in observed:
        check_conversation(made, role)
    return made
