"""The host side of a rollout: what is asked and what came back, as text.

No torch in here: reward workers import this module and must start fast under a tight memory limit.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

COMPLETION = "completion"  # what a problem's `meta` calls a completion that is given, to be learned word for word


class Problem(NamedTuple):
    """One question. `uid` is unique among the problems of a run and is what its randomness is keyed on."""

    uid: int
    prompt: str
    answer: str
    meta: Mapping[str, Any]


class Turn(NamedTuple):
    """One turn of an episode: what the policy wrote, and what the environment made of it."""

    text: str  # that the policy wrote, its tool calls included
    length: int  # sampled tokens
    observation: str  # text of the messages that answered it
    reward: float | None  # None: it cannot be scored
    state: str  # hash of the environment's state that the turn began in
    calls: int = 0  # tools that the message calls
    error: str = ""  # what was malformed in the message, or why the environment failed
    limit: str = ""  # of LIMITS: that which ended the episode with this turn, before it was done
    answer: str = ""  # what the environment answered, as JSON: this turn's entry of the tape


def transcript(text: str, turns: Sequence[Turn]) -> str:
    """An episode as a person reads it: turns, and each observation quoted behind its own; `text` without turns."""
    parts = [part for turn in turns for part in (turn.text, turn.observation and f"> {turn.observation}") if part]
    return "\n".join(parts) if turns else text


LIMITS = ("turns", "turn_tokens", "tokens", "context")  # of an episode


class Completion(NamedTuple):
    """The policy's text for a problem; `length` counts sampled tokens, `truncated` means it hit the limit.

    Of an episode, `text` is that of its last turn, `length` counts the tokens of all turns, and `turns` has each.
    """

    text: str
    length: int
    truncated: bool
    turns: tuple[Turn, ...] = ()


class ReasonedScore(float):
    """A reward's number that says why it is what it is, for people: `score` and the worker pool carry the words."""

    reason: str

    def __new__(cls, value: float, reason: str) -> "ReasonedScore":
        """The number `value` with its `reason`, one line of text or nothing."""
        score = super().__new__(cls, value)
        score.reason = reason
        return score

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        """What a pickle makes it of again."""
        return float(self), self.reason


# A reward maps one completion to a number; None means it cannot be scored (a broken gold, a verifier that died). It may
# be async: the shell's workers await what it returns.
RewardFn = Callable[[Problem, Completion], float | Awaitable[float | None] | None]

# A scorer applies one reward to many rows. The serial one is a comprehension; the shell's runs killable workers.
Scorer = Callable[[RewardFn, Sequence[Problem], Sequence[Completion]], list[float | None]]


def verdict_name(value: float | None) -> str:
    """A verdict's name: right means the whole reward, 1."""
    return "unscorable" if value is None else "right" if value >= 1.0 else "wrong"


class Program(NamedTuple):
    """Code to be run and judged. `sources` run one after the other in one module; then `setup` and `tests`, kept apart
    from it, of which each test holds when it runs without an exception.

    `names` are what setup and tests need of the program; the `classes` among them say what is `in` their objects.
    `setup` and `tests` are trusted, `sources` are not.
    """

    sources: tuple[str, ...]
    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...]
    classes: tuple[str, ...] = ()


class Ran(NamedTuple):
    """The result of a program.

    `verdicts`, one a test: it held, it did not, or None, it cannot be put to any program. `proven`: the judge saw
    every test to its end, with the program alive and nothing of it left behind. `reason` says in a few words why
    something did not hold; `printed` is the end of what the program printed; `seconds` are wall clock.
    """

    verdicts: tuple[bool | None, ...]
    proven: bool
    reason: str
    printed: str
    seconds: float


# Prompts of several messages, as chat data sets have them: `[{"role": "user", "content": "..."}, ...]`.

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
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def read_messages(value: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages of a row, checked: a role of ROLES and text in each; parts `{"type": "text", ...}` are joined.

    Raises:
        ValueError: for another role or key, or content that is no text; names the message, counted from 0.
    """
    messages = []
    for place, message in enumerate(value):
        keys = {key for key, held in message.items() if held is not None}
        if keys != {"role", "content"}:
            raise ValueError(
                f"message {place}: got the keys {', '.join(map(str, keys)) or 'none'}, expected role, content"
            )
        if message["role"] not in ROLES:
            raise ValueError(f"message {place}: got the role {message['role']!r}, expected one of {', '.join(ROLES)}")
        messages.append({"role": message["role"], "content": _text(message["content"], place)})
    return messages


def chat_prompt(messages: Sequence[Mapping[str, str]], fill: Callable[[str], str]) -> str:
    """The prompt of a row's messages, which a completion follows; `fill` is a template of the last one.

    A message alone needs no chat template: it is its text. More are a Conversation.

    Raises:
        ValueError: where the last message is not the user's.
    """
    if not messages or messages[-1]["role"] != "user":
        got = messages[-1]["role"] if messages else "none"
        raise ValueError(f"last message: got one of {got!r}, expected one of 'user', which the completion answers")
    last = fill(messages[-1]["content"])
    if len(messages) == 1:
        return last
    return Conversation(json.dumps([*messages[:-1], {"role": "user", "content": last}], ensure_ascii=False))


def _text(content: object, place: int) -> str:
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:  # JSON can spell a surrogate alone; no tokenizer takes it
            raise ValueError(f"message {place}: got {content[error.start]!a}, expected Unicode text") from error
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts) or not parts:
        raise ValueError(f"message {place}: got content {str(content)[:80]}, expected text, or a list of text parts")
    return _text("".join(texts), place)
