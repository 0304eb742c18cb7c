"""Prompts of several messages, as chat data sets have them: `[{"role": "user", "content": "..."}, ...]`.

No torch in here: reward workers open problems that hold such prompts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant")


class Conversation(str):
    """A prompt of several messages: a str, the JSON list of them, so that it is shown, compared and stored as text.

    `messages` reads the list back. A chat template turns it into tokens; `hf.encode_prompt` does.
    """

    __slots__ = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages, each with "role" and "content"."""
        return json.loads(self)


def is_message_list(value: object) -> bool:
    """Whether a field of a row holds messages, rather than text."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def read_messages(value: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages of a row, checked: a role of ROLES and text in each.

    Args:
        value: `[{"role": ..., "content": ...}, ...]`; a content may be a list of parts `{"type": "text", "text": ...}`,
            which are joined.

    Returns:
        The messages, each with "role" and "content" alone.

    Raises:
        ValueError: for another role or key, or content that is no text; names the message, counted from 0.
    """
    found = []
    for place, message in enumerate(value):
        keys = {key for key, held in message.items() if held is not None}
        if keys != {"role", "content"}:
            raise ValueError(
                f"message {place}: got the keys {', '.join(map(str, keys)) or 'none'}, wanted role, content"
            )
        if message["role"] not in ROLES:
            raise ValueError(f"message {place}: got the role {message['role']!r}, wanted one of {', '.join(ROLES)}")
        found.append({"role": message["role"], "content": _text(message["content"], place)})
    return found


def chat_prompt(messages: Sequence[Mapping[str, str]], fill: Callable[[str], str]) -> str:
    """The prompt of a row's messages, which a completion of the assistant follows.

    Args:
        messages: as `read_messages` returns them; the last one is the user's.
        fill: applied to the content of the last message: a template.

    Returns:
        The text itself where there is one message alone, which needs no chat template; else a Conversation.

    Raises:
        ValueError: where the last message is not the user's.
    """
    if not messages or messages[-1]["role"] != "user":
        got = messages[-1]["role"] if messages else "none"
        raise ValueError(f"last message: got one of {got!r}, wanted one of 'user', which the completion answers")
    last = fill(messages[-1]["content"])
    if len(messages) == 1:
        return last
    return Conversation(json.dumps([*messages[:-1], {"role": "user", "content": last}], ensure_ascii=False))


def _text(content: object, place: int) -> str:
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:  # JSON can spell a surrogate alone; no tokenizer takes it
            raise ValueError(f"message {place}: got {content[error.start]!a}, wanted Unicode text") from error
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts) or not parts:
        raise ValueError(f"message {place}: got content {str(content)[:80]}, wanted text, or a list of text parts")
    return _text("".join(texts), place)
