"""The `renderers` package's formats of model families, for templates that change what was written before.

Its own contract is ours: a bridge to the next turn keeps what was sampled. What it puts behind a turn is asked for with
a short conversation, as it does not depend on the one that is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_fn.core.environment import Message, ToolCall
from grpo_fn.shell.episodes.chat_format import read_turn

OPENING = ({"role": "user", "content": "question"},)
TURNS = ("answer", "another")  # what is put behind must not depend on them


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
        first, second = (self._behind(turn, messages) for turn in TURNS)
        if first != second:
            raise ValueError("renderer: got observations that depend on the turn before, wanted the same tokens")
        return first

    def parse(self, turn: Sequence[int]) -> Message:
        """The text and the calls, as the family's parser reads them; thinking is not part of the text."""
        found = self.renderer.parse_response(list(turn))
        calls, wrong = [], ""
        for call in found.tool_calls:
            if call.status == "ok" and call.name is not None and isinstance(call.arguments, dict):
                calls.append(ToolCall(call.name, call.arguments))
            else:
                wrong = wrong or f"got a tool call that is {call.status}: {call.raw[:80]!r}"
        return Message("assistant", found.content, "", tuple(calls), wrong)

    def read(self, turn: Sequence[int]) -> str:
        """The whole text."""
        return read_turn(self.tokenizer, turn)

    def _behind(self, turn: str, messages: Sequence[Message]) -> list[int]:
        before = self.renderer.render_ids(list(OPENING), add_generation_prompt=True)
        written = [*self.tokenizer(turn, add_special_tokens=False)["input_ids"], self.end]
        found = self.renderer.bridge_to_next_turn(before, written, as_dicts(messages))
        row = [*before, *written]
        if found is None or list(found.token_ids[: len(row)]) != row:
            raise ValueError(
                f"renderer: got no bridge from a turn to messages of {', '.join(m.role for m in messages)}, wanted one "
                "that keeps what was sampled"
            )
        return list(found.token_ids[len(row) :])


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
        ValueError: where the package is missing, does not know the family, or cannot append observations of such roles.
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
        made.extend([Message(role, "observation")])
    return made
